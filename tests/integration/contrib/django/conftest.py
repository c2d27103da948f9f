"""A project of Django in this process. Its settings are made before its modules are imported."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import django
import pytest
from django.conf import settings
from django.test.utils import override_settings

SHOP = "tests.integration.contrib.django.shop"
BACKEND = "mtask.contrib.django.MtaskBackend"
TASKS: dict[str, Any] = {
    "default": {"BACKEND": BACKEND, "QUEUES": ["default", "mail"]},
    "lite": {"BACKEND": BACKEND, "QUEUES": ["default"], "OPTIONS": {"URI": "mongodb://nowhere.invalid"}},
}
DATABASES: dict[str, Any] = {
    "default": {"ENGINE": "django_mongodb_backend", "HOST": "mongodb://nowhere.invalid", "NAME": "nowhere"},
    "lite": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"},
}
if not settings.configured:
    settings.configure(
        DATABASES=DATABASES,
        DEFAULT_AUTO_FIELD="django_mongodb_backend.fields.ObjectIdAutoField",
        INSTALLED_APPS=["mtask.contrib.django", SHOP],
        LOGGING_CONFIG=None,
        SECRET_KEY="for tests",
        TASKS=TASKS,
        USE_TZ=True,
    )
    from django_mongodb_backend.features import DatabaseFeatures

    # Releases for Django 6 want MongoDB 7, and need nothing of it here.
    DatabaseFeatures.minimum_database_version = min(DatabaseFeatures.minimum_database_version, (6, 0))
    django.setup()
assert sqlite3.threadsafety

from mtask.contrib.django.connections import client_of, close_clients, uri_of  # noqa: E402
from mtask.contrib.django.declaring import worker_app  # noqa: E402
from mtask.contrib.django.targets import Target, backends  # noqa: E402
from mtask.kernel.document.status import WorkerStatus  # noqa: E402
from mtask.parts.assembly import Worker  # noqa: E402
from mtask.parts.worker import WorkerOptions  # noqa: E402


@pytest.fixture(scope="package")
def project(mongo_uri: str, dropping: Callable[[str], Any]) -> Iterator[str]:
    """Point the project to databases on the server of the tests; return the name of its database."""
    from django.core.management import call_command
    from django.db import connections

    name, other = (f"test_{uuid.uuid4().hex}" for _ in range(2))
    connections["default"].settings_dict.update(HOST=mongo_uri, NAME=name)
    tasks = {**TASKS, "lite": {**TASKS["lite"], "OPTIONS": {"URI": mongo_uri, "NAME": other}}}
    with override_settings(TASKS=tasks):
        call_command("migrate", verbosity=0, run_syncdb=True)
        yield name
    close_clients()
    connection: Any = connections["default"]
    connection.close_pool()
    dropping(name)
    dropping(other)


class Running:
    """A worker in a thread of this process."""

    def __init__(self, target: Target, alias: str) -> None:
        self.worker_id = f"worker-{alias}"
        database = client_of(target).database_name
        options = WorkerOptions(uri_of(target), database, worker_id=self.worker_id, concurrency=10, scheduler=False)
        self._worker = Worker(worker_app(alias), options)
        self._thread = threading.Thread(target=lambda: asyncio.run(self._worker.run()), daemon=True)
        self._thread.start()
        end = time.monotonic() + 30
        while self._worker.status is WorkerStatus.READY:
            assert time.monotonic() < end
            assert self._thread.is_alive()
            time.sleep(0.01)

    def end(self) -> None:
        """Stop the worker at once."""
        self._worker.stop()
        self._worker.stop()
        self._thread.join()


@pytest.fixture(scope="package")
def worker(project: str) -> Iterator[Running]:
    """Run a worker for the backend "default"."""
    (target,) = (backend.target for backend in backends() if backend.alias == "default")
    made = Running(target, "default")
    yield made
    made.end()
