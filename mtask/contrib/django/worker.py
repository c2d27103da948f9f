"""The apps that workers serve. `manage.py mtask_worker` starts `mtask-worker mtask.contrib.django.worker:app`.

`app` is that of the backend "default", and `backends.NAME` that of another one. DJANGO_SETTINGS_MODULE names the
settings, as for all processes of a project.
"""

from __future__ import annotations

import django
from django.apps import apps

from mtask.app.app import App
from mtask.contrib.django.targets import DEFAULT

if not apps.ready:
    django.setup()

from mtask.contrib.django.declaring import worker_app


class Backends:
    """The apps of the backends, by their names."""

    def __getattr__(self, alias: str) -> App:
        return worker_app(alias)


backends = Backends()


def __getattr__(name: str) -> App:
    if name != "app":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return worker_app(DEFAULT)
