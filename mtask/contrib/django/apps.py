"""The Django app: its checks, and the collections that `migrate` makes."""

from __future__ import annotations

import logging
from typing import Any

from django.apps import AppConfig
from django.db.models.signals import post_migrate

logger = logging.getLogger("mtask.django")


class MtaskConfig(AppConfig):
    """The app `mtask.contrib.django`."""

    name = "mtask.contrib.django"
    label = "mtask"
    verbose_name = "mtask"

    def ready(self) -> None:
        """Register the checks of the task backends, and have `migrate` make mtask's collections."""
        from mtask.contrib.django.api import checks

        assert checks  # to import them registers them
        post_migrate.connect(make_collections, sender=self)


def make_collections(*, using: str, **_: Any) -> None:
    """Make the collections of the backends whose tasks are in this database, or that have a URI of their own."""
    from django.db import DEFAULT_DB_ALIAS

    from mtask.contrib.django.connections import client_of
    from mtask.contrib.django.targets import backends
    from mtask.errors import DatabaseUnavailable

    for backend in backends():
        target = backend.target
        if using != (target.alias or DEFAULT_DB_ALIAS):
            continue
        try:
            client_of(target).init()
        except DatabaseUnavailable as error:
            if target.alias is not None:
                raise
            # Tests of such a project may need no MongoDB. The first task that is enqueued makes the collections.
            logger.warning("mtask's collections were not made: %s", error)
