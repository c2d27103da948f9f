"""Publishes, ages and reads tasks in a real store, without a worker or a client. Also puts workers on record."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any

import pytest

from mtask.database import setup
from mtask.kernel.document.identity import task_id_of
from mtask.kernel.document.options import option_of
from mtask.kernel.document.status import WorkerStatus
from mtask.kernel.document.task import Task
from mtask.kernel.driver.stores import SyncStore
from mtask.kernel.operations import claim as claims
from mtask.kernel.operations import publish as publishing
from mtask.kernel.operations import workers
from mtask.kernel.operations.publish import NewTask, Policy, Published
from mtask.kernel.operations.workers import Heartbeat, Registration
from tests.clients import server_now
from tests.mongo import Client

Document = dict[str, Any]


def ready_store(mongo: Client, database_name: str) -> SyncStore:
    """Set up the database. Return its store."""
    made = SyncStore(mongo, database_name)
    made.run(setup.ensure())
    return made


@pytest.fixture
def store(mongo: Client, database_name: str) -> SyncStore:
    """Set up the test's database, and work on it as the engine does. The conftest of a folder takes it."""
    return ready_store(mongo, database_name)


def new_task(
    key: str, params: Any = None, *, start: datetime | timedelta | None = None, queue: str = "default", **options: Any
) -> NewTask:
    """Return a validated task named "task"."""
    option = option_of({}, options).stored()
    return NewTask(task_id_of("task", key), "task", key, queue, params, option, start)


def publish(store: SyncStore, key: str, params: Any = None, *, policy: Policy | None = None, **given: Any) -> Published:
    """Publish a task named "task"."""
    return store.run(publishing.publish(new_task(key, params, **given), policy or Policy()))


def stored(store: SyncStore, key: str) -> Document:
    """Return a task's document."""
    found = store.tasks.find_one({"_id": f"task:{key}"})
    assert found is not None
    return found


def parsed(store: SyncStore, key: str) -> Task:
    """Return a task as a client reads it."""
    return Task.model_validate(stored(store, key))


def claim(
    store: SyncStore, worker_id: str, *keys: str, token: str | None = None, are_simple: bool = False
) -> list[str]:
    """Claim tasks for a worker. Return the keys of the claimed tasks."""
    ids = [f"task:{key}" for key in keys]
    taken = store.run(claims.claim(ids, worker_id, token or f"by-{worker_id}", are_simple=are_simple))
    return sorted(document["key"] for document in taken)


def lapse(store: SyncStore, key: str, worker_id: str | None = None) -> None:
    """Move the ends of an unfinished task's leases to a minute ago: of all its runs, or of one worker's."""
    past = server_now(store) - timedelta(minutes=1)
    of_worker = {} if worker_id is None else {"run.worker_id": worker_id}
    store.tasks.update_one(
        {"_id": f"task:{key}", "task_state.next_preempt_time": {"$exists": True}},
        {
            "$set": {
                "task_state.worker_states.$[run].ping_expire_time": past,
                "task_state.next_preempt_time": past,
            }
        },
        array_filters=[{"run.status": "RUNNING", **of_worker}],
    )


def make_due(store: SyncStore, key: str) -> None:
    """End all retry delays of an unfinished task."""
    past = server_now(store) - timedelta(minutes=1)
    changes = {"task_state.worker_states.$[run].retry_time": past, "task_state.next_preempt_time": past}
    store.tasks.update_one(
        {"_id": f"task:{key}", "task_state.next_preempt_time": {"$exists": True}},
        {"$set": changes},
        array_filters=[{"run.retry_time": {"$exists": True}}],
    )


def registration(worker_id: str, queues: list[str], names: list[str], **other: Any) -> Registration:
    """Return a worker's description of itself."""
    fields: dict[str, Any] = {
        "incarnation": f"incarnation-{worker_id}",
        "host": "host-1",
        "pid": 4711,
        "pid_scope": None,
        "concurrency": 10,
        "version": "1",
        "heartbeat_timeout": timedelta(minutes=10),
    }
    return Registration(worker_id=worker_id, queues=queues, names=names, **{**fields, **other})


def register(
    store: SyncStore,
    worker_id: str,
    names: list[str],
    *,
    queues: Sequence[str] = ("default",),
    running_cnt: int = 0,
    unserved_names: list[str] | None = None,
    **other: Any,
) -> None:
    """Insert a worker's document with a fresh heartbeat. No process belongs to it, so it claims no task."""
    me = registration(worker_id, [*queues], names, **other)
    store.run(workers.register(me))
    beat = Heartbeat(WorkerStatus.RUNNING, running_cnt, me.concurrency, unserved_names or [])
    store.run(workers.heartbeat(me, beat))
