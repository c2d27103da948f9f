"""A backend with a URI: the models are in SQLite, and the tasks in a MongoDB of their own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

import pytest
from django.db import transaction
from django.test.utils import override_settings

from mtask import App, Client
from mtask.contrib.django.api import TaskResultDoesNotExist, task_backends
from mtask.contrib.django.connections import client_of
from mtask.contrib.django.declaring import worker_app
from mtask.contrib.django.targets import Target, backends
from mtask.contrib.django.testing import mtask_tasks
from tests.integration.contrib.django.shop import tasks


@pytest.fixture
def lite(project: str) -> Client:
    """Return the client of the backend "lite"."""
    return client_of(target_of_lite())


def target_of_lite() -> Target:
    """Return where the tasks of the backend "lite" are."""
    (found,) = (backend.target for backend in backends() if backend.alias == "lite")
    return found


class Undone(Exception):
    """Undoes a transaction."""


def test_task_is_enqueued_at_once_or_after_the_commit(lite: Client) -> None:
    with suppress(Undone), transaction.atomic(using="lite"):
        at_once = tasks.on_uri.enqueue(1)
        transaction.on_commit(lambda: tasks.on_uri.using(key="never").enqueue(2), using="lite")
        raise Undone
    assert tasks.on_uri.get_result(at_once.id).args == [1]
    with pytest.raises(TaskResultDoesNotExist):
        tasks.on_uri.get_result(f"{tasks.on_uri.module_path}:never")
    with transaction.atomic(using="lite"):
        transaction.on_commit(lambda: tasks.on_uri.using(key="then").enqueue(3), using="lite")
        with pytest.raises(TaskResultDoesNotExist):
            tasks.on_uri.get_result(f"{tasks.on_uri.module_path}:then")
    assert tasks.on_uri.get_result(f"{tasks.on_uri.module_path}:then").args == [3]


def test_backends_have_databases_of_their_own(lite: Client, project: str) -> None:
    result = tasks.on_uri.enqueue(1)
    assert lite.database_name != project
    with pytest.raises(TaskResultDoesNotExist):
        task_backends["default"].get_result(result.id)
    moved = tasks.add.using(backend="lite").enqueue(5)
    assert moved.backend == "lite"
    assert lite.get(*moved.id.split(":")).params == {"args": [5], "kwargs": {}}


def test_worker_has_the_tasks_and_schedules_of_its_backend(project: str) -> None:
    app: App = worker_app("lite")
    assert {tasks.on_uri.module_path} <= app.handlers.keys()
    assert tasks.stumble.module_path not in app.handlers
    assert app.schedules == []
    assert tasks.digest.module_path in [schedule.schedule_id for schedule in worker_app("default").schedules]


def test_bench_runs_tasks_of_a_uri_in_a_new_database(
    lite: Client, mongo_uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mtask.contrib.django.testing.server_uri", lambda: mongo_uri)
    with mtask_tasks("lite") as bench:
        result = tasks.on_uri.using(key="on the bench").enqueue(1)
        bench.run()
        result.refresh()
        assert result.return_value == 2
        assert bench.database != lite.database_name
    with pytest.raises(TaskResultDoesNotExist):
        tasks.on_uri.get_result(result.id)


def test_bench_runs_tasks_and_schedules_on_the_database_of_django(project: str) -> None:
    with override_settings(ROOT_URLCONF=""), mtask_tasks() as bench:
        result = tasks.add.enqueue(1)
        (fired,) = bench.fire(tasks.digest.module_path)[-1:]
        result.refresh()
        assert (bench.database, result.return_value) == (project, 2)
        assert (fired.returns, fired.params) == ("digest to all", {"args": [], "kwargs": {"to": "all"}})
    with pytest.raises(TaskResultDoesNotExist):
        tasks.add.get_result(result.id)


@pytest.fixture(autouse=True)
def _no_settings_are_left() -> Iterator[None]:
    yield
    assert target_of_lite().uri is not None
