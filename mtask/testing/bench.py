"""The bench: an app, a database, a client, and a worker that runs in this process while tasks are due."""

from __future__ import annotations

import asyncio
import atexit
import json
import os
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from datetime import datetime, timedelta
from typing import Any

from mtask import local
from mtask.app.app import App
from mtask.client.sync import Client
from mtask.errors import MtaskError
from mtask.features.callbacks.allowed import CallbackOptions, read_options
from mtask.features.callbacks.rules import DEFAULT_SECRET, DELIVERY
from mtask.features.callbacks.testing import CallbackReceiver
from mtask.features.isolation.options import ExecutorOptions
from mtask.features.registry import operations as registry
from mtask.features.registry.rules import declared_by
from mtask.features.schedules import client as scheduling
from mtask.features.schedules.client import Definition
from mtask.kernel.document.status import FINAL, TaskStatus, WorkerStatus
from mtask.kernel.document.task import Task
from mtask.kernel.driver.operation import Operation, command, server_time, tasks
from mtask.kernel.operations import publish as publishing
from mtask.kernel.operations.publish import Policy
from mtask.kernel.statements import expressions as x
from mtask.kernel.statements import outbox
from mtask.kernel.statements.filters import NEXT, RUNS
from mtask.parts.assembly import Worker
from mtask.parts.worker import WorkerOptions
from mtask.search.findings import Reason

#: The environment variable that names a server for tests. Without it, tests use the embedded server.
URI_VARIABLE = "MTASK_TEST_URI"
_POLL = 0.01
_PATIENCE = timedelta(seconds=30)
_servers = ExitStack()
_lock = threading.Lock()
_uri: str | None = None


class Stuck(MtaskError, AssertionError):
    """Tasks are due and do not end. `reasons` maps each task to the reasons why the task waits."""

    def __init__(self, patience: timedelta, reasons: dict[str, list[Reason]]) -> None:
        waits = [f"{task_id}: {'; '.join(r.message for r in found) or 'runs'}" for task_id, found in reasons.items()]
        super().__init__(f"not idle after {patience.total_seconds():g} s: {', '.join(waits[:10]) or 'nothing is due'}")
        self.reasons = reasons


class Bench:
    """An app with a database of its own. The app's tasks run only during `run`, `advance` and `fire`."""

    def __init__(self, app: App, uri: str, database: str) -> None:
        self.app = app
        self.uri = uri
        self.database = database
        self.client = Client(uri, database=database)
        self.client.init(repair=False)
        self._store = self.client._store
        # What a worker does soon after its start. Here, tasks by name know from the first one on what is declared.
        self._store.run(registry.store({handler.name: declared_by(handler) for handler in app}))
        #: By schedule id: the last firing that `fire` has published.
        self._fired: dict[str, datetime] = {}

    def close(self) -> None:
        """Close the client and drop the database."""
        self._store.run(drop())
        self.client.close()

    def run(
        self,
        *,
        timeout: timedelta | float = _PATIENCE,
        concurrency: int = 100,
        callbacks: CallbackReceiver | None = None,
    ) -> list[Task]:
        """Run all tasks that are due or become due meanwhile. Return the tasks that finished, sorted by finish time.

        Handlers run as in a worker process: async handlers on a loop in a thread of its own, sync handlers in threads.
        Tasks that wait for their start_time or for a retry do not run: see `advance`. With `callbacks`, the worker
        tells the ends of tasks to this receiver. Raises Stuck after `timeout`.
        """
        limit = timeout if isinstance(timeout, timedelta) else timedelta(seconds=timeout)
        begun = self.client.server_time()
        options = WorkerOptions(
            self.uri,
            self.database,
            worker_id=f"bench-{uuid.uuid4().hex[:8]}",
            concurrency=concurrency,
            scheduler=False,
            features=[] if callbacks is None else [_deliveries_to(callbacks)],
            hands_on=False,  # no worker of another version comes
            executors=ExecutorOptions(is_off=True),  # a test can see into handlers of this process
        )
        with _working(Worker(self.app, options)) as life:
            life.begin()
            end = time.monotonic() + limit.total_seconds()
            while not self._store.run(is_idle(with_callbacks=callbacks is not None)):
                life.check()
                if time.monotonic() > end:
                    raise Stuck(limit, self._reasons(with_callbacks=callbacks is not None))
                time.sleep(_POLL)
        return self._finished_since(begun)

    def advance(
        self,
        by: timedelta | None = None,
        *,
        timeout: timedelta | float = _PATIENCE,
        concurrency: int = 100,
        callbacks: CallbackReceiver | None = None,
    ) -> list[Task]:
        """Let time pass for all waiting tasks, and run the tasks that are due then. Return the tasks that finished.

        If `by` is None, time passes until the next delayed task is due. Schedules do not fire: see `fire`. Raises Stuck
        like `run`.
        """
        step = self._store.run(until_next()) if by is None else by
        if step is not None and step > timedelta(0):
            self._store.run(bring_nearer(step))
        return self.run(timeout=timeout, concurrency=concurrency, callbacks=callbacks)

    def fire(self, schedule_id: str, *, timeout: timedelta | float = _PATIENCE) -> list[Task]:
        """Publish the task of a schedule's next firing now, and run it. Return the tasks that finished.

        The app declares the schedule, or `client.add_schedule` has stored it. The schedule is not changed. Raises
        ScheduleNotFound.
        """
        declared = {made.schedule_id: made for made in self.app.schedules}
        self._fired[schedule_id] = self._store.run(_firing(schedule_id, declared, self._fired.get(schedule_id)))
        return self.run(timeout=timeout)

    def _finished_since(self, begun: datetime) -> list[Task]:
        final = ("SUCCESS", "FAIL", "CANCELED")
        found = [(task.task_state.finish_time, task) for task in self.client.find(status=final, limit=0)]
        return [task for when, task in sorted(found, key=lambda f: str(f[0])) if when is not None and when >= begun]

    def _reasons(self, *, with_callbacks: bool) -> dict[str, list[Reason]]:
        found = self._store.run(due(with_callbacks=with_callbacks))
        return {task_id: self.client.inspect(task_id).reasons for task_id in found}


def _deliveries_to(receiver: CallbackReceiver) -> CallbackOptions:
    secrets = {DEFAULT_SECRET: receiver.secret}
    return read_options(receiver.host, "127.0.0.0/8", json.dumps(secrets))


def _firing(schedule_id: str, declared: Mapping[str, Definition], fired: datetime | None) -> Operation[datetime]:
    now = yield from server_time()
    if schedule_id in declared:
        schedule = scheduling.schedule_of(declared[schedule_id].document(now, "app"))
    else:
        schedule = yield from scheduling.get(schedule_id)
    # Each firing has its own key, so that the schedule can be fired again.
    firing = schedule.next_firing(fired) if fired is not None else schedule.first_firing(now)
    firing = firing or now
    yield from publishing.publish(scheduling.new_task(schedule, firing, now), Policy())
    return firing


class _Life:
    """A worker in a thread of its own."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="mtask-bench", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            asyncio.run(self._worker.run())
        except BaseException as error:
            self._error = error

    def begin(self) -> None:
        """Wait until the worker claims tasks. A worker that cannot start raises its error."""
        while self._worker.status is WorkerStatus.READY:
            self.check()
            time.sleep(_POLL)

    def check(self) -> None:
        """Raise the error that ended the worker."""
        if self._error is not None:
            raise self._error

    def end(self) -> None:
        """Stop the worker and its runs, and wait until the worker has ended."""
        self._worker.stop()
        self._worker.stop()
        self._thread.join()
        self.check()


@contextmanager
def _working(worker: Worker) -> Iterator[_Life]:
    life = _Life(worker)
    try:
        yield life
    finally:
        life.end()


def server_uri() -> str:
    """Return the URI of the server for tests.

    Without MTASK_TEST_URI, the first call starts an embedded server, which ends with this process.
    """
    global _uri
    with _lock:
        if _uri is None:
            _uri = os.environ.get(URI_VARIABLE)
        if _uri is None:
            _uri = _servers.enter_context(local.temporary()).uri
            atexit.register(_servers.close)
        return _uri


@contextmanager
def bench(app: App, *, uri: str | None = None) -> Iterator[Bench]:
    """Make a bench: the app with a new database. The database is dropped at the end of the block."""
    made = Bench(app, uri or server_uri(), f"mtask_test_{uuid.uuid4().hex}")
    try:
        yield made
    finally:
        made.close()


# --- workbench -------------------------------------------------------------------------------------------

# Operations that users need to test their apps: find due tasks, let time pass for tasks, drop the database.

_MILLISECOND = timedelta(milliseconds=1)
_OPEN = {"task_state.status": {"$nin": FINAL}}
_DUE = {NEXT: {"$exists": True}, "$expr": {"$lte": [f"${NEXT}", x.NOW]}}
_UNDER_WAY = {"task_state.status": TaskStatus.RUNNING.value}
#: Other tasks of a flow must be told of a change. Then they may be due.
_OWED = {"owed_since": {"$exists": True}}
_EXAMPLES = 20
_DROP_TIMEOUT = timedelta(seconds=60)
_NO_DELIVERY: dict[str, Any] = {"name": {"$ne": DELIVERY}}


def is_idle(*, with_callbacks: bool = False) -> Operation[bool]:
    """Whether no task is due or running. Without `with_callbacks`, no worker delivers callbacks: they do not count."""
    told = [outbox.owing_ends()] if with_callbacks else []
    matched = {"$or": [_DUE, _UNDER_WAY, _OWED, *told], **({} if with_callbacks else _NO_DELIVERY)}
    return (yield tasks("find_one", matched, {"_id": 1})) is None


def due(*, with_callbacks: bool = False) -> Operation[list[str]]:
    """Return the ids of some tasks that are due or running."""
    matched = {"$or": [_DUE, _UNDER_WAY], **({} if with_callbacks else _NO_DELIVERY)}
    found = yield tasks("find", matched, {"_id": 1}, limit=_EXAMPLES)
    return [str(document["_id"]) for document in found]


def until_next() -> Operation[timedelta | None]:
    """Return the time until the next task is due; None if no task waits."""
    found = yield tasks(
        "find", {**_OPEN, NEXT: {"$exists": True}}, {"next": f"${NEXT}", "now": x.NOW}, sort=[(NEXT, 1)], limit=1
    )
    if not found or not isinstance(found[0]["next"], datetime):
        return None
    left: timedelta = found[0]["next"] - found[0]["now"] + _MILLISECOND
    return left


def bring_nearer(by: timedelta) -> Operation[None]:
    """Let time pass for waiting tasks: make every instant that they wait for earlier by `by`."""
    earlier = by // _MILLISECOND

    def moved(path: str) -> x.Expression:
        is_date = {"$eq": [{"$type": path}, "date"]}
        return {"$cond": [is_date, {"$subtract": [path, earlier]}, "$$REMOVE"]}

    runs = {
        "$map": {
            "input": f"${RUNS}",
            "as": "run",
            "in": {"$mergeObjects": ["$$run", {"$cond": [_waits("$$run"), _nearer("$$run", earlier), {}]}]},
        }
    }
    change: dict[str, Any] = {
        "task_state.create_time": {"$subtract": [f"{x.STATE}.create_time", earlier]},
        "task_state.start_time": moved(f"{x.STATE}.start_time"),
        "task_state.not_after": moved(f"{x.STATE}.not_after"),
        NEXT: moved(f"${NEXT}"),
        RUNS: runs,
    }
    # Of calls that gather, only those of this round count.
    gather = {
        "first_time": {"$subtract": ["$gather.first_time", earlier]},
        "newest": {
            "$mergeObjects": ["$gather.newest", {"asked_time": {"$subtract": ["$gather.newest.asked_time", earlier]}}]
        },
    }
    change["gather"] = {"$cond": ["$gather.first_time", {"$mergeObjects": ["$gather", gather]}, "$gather"]}
    yield tasks("update_many", {**_OPEN, NEXT: {"$exists": True}}, [{"$set": change}])
    # The window of a publish counts from the end of a task.
    ended = {"task_state.finish_time": {"$subtract": [f"{x.STATE}.finish_time", earlier]}}
    yield tasks("update_many", {"task_state.status": TaskStatus.SUCCESS.value}, [{"$set": ended}])


def drop() -> Operation[None]:
    """Drop the database."""
    yield command("dropDatabase", writeConcern={"w": "majority"}).within(_DROP_TIMEOUT)


def _waits(run: str) -> x.Expression:
    return {"$eq": [{"$type": f"{run}.retry_time"}, "date"]}


def _nearer(run: str, earlier: int) -> x.Expression:
    return {"retry_time": {"$subtract": [f"{run}.retry_time", earlier]}}
