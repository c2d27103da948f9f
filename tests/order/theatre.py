"""A stage that remembers what the model needs to know: when each worker worked, and which limits held when."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from pymongo import MongoClient

from mtask import TaskSpec
from mtask.features.controls.rules import Control
from mtask.features.controls.rules import Limit as StoredLimit
from mtask.kernel.document.status import TaskStatus
from mtask.kernel.document.task import StoredTask
from mtask.local import ReplicaSet
from tests.mongo import PATIENCE, Document, eventually
from tests.order.app import ISOLATED, OTHER, WORK, gate_beside
from tests.order.history import Change, History, Limit, Settings, Trouble, Up, Worker
from tests.order.reading import read_task
from tests.security import accounts, is_secure
from tests.workers import Stage, WorkerProcess, open_stage

#: A lease that outlasts any pause of a slow machine, and one so short that a rescue does not take long.
_LEASE: dict[str, Any] = {"ping_interval": 2, "worker_timeout": 30, "retry_delay": 0}
SHORT: dict[str, Any] = {"ping_interval": 0.3, "worker_timeout": 1}
#: After the death of a worker, a permit of a claim that never came may be held for so long, in seconds.
_UNSURE = 11.0
#: After the death of a worker, nobody else may claim the tasks that it was about to claim for so long, in seconds.
_CLAIMING = 2.5
_OPEN = {"task_state.status": {"$nin": [status.value for status in TaskStatus if status.is_final]}}


class Theatre:
    """Workers of two apps, and tasks in queues that they share."""

    def __init__(self, stage: Stage, queues: Sequence[str]) -> None:
        self.stage = stage
        self.client = stage.client
        self.tasks = stage.mongo[stage.database]["tasks"]
        self.processes: dict[str, WorkerProcess] = {}
        self._queues = list(queues)
        self._workers: dict[str, Worker] = {}
        self._launched: dict[str, tuple[str, tuple[str, ...]]] = {}
        self._changes: list[Change] = []
        self._deaths: list[float] = []
        self._starting: set[str] = set()
        stage.set_up()

    # --- workers ------------------------------------------------------------------------------------------------

    def launch(self, worker_id: str, app: str, slots: int, *flags: str) -> None:
        """Start a worker of the app "first" or "second"; `wait_running` waits until it works."""
        name = {"first": WORK, "second": OTHER}[app]
        names = frozenset({name}) if app == "second" else frozenset({name, ISOLATED})
        self._workers.setdefault(worker_id, Worker(worker_id, slots, frozenset(self._queues), names, []))
        self._launched[worker_id] = (app, ("--concurrency", str(slots), *flags))
        self._start(worker_id)

    def _start(self, worker_id: str) -> None:
        app, flags = self._launched[worker_id]
        queues = ("--queues", ",".join(self._queues))
        self._starting.add(worker_id)
        self.processes[worker_id] = self.stage.launch(worker_id, *queues, *flags, app=f"tests.order.app:{app}")

    def wait_running(self) -> None:
        """Wait until all workers work that were started."""
        for worker_id in sorted(self._starting):
            self.stage.wait_running(self.processes[worker_id])
            self._move(worker_id, [*self._workers[worker_id].ups, Up(time.time())])
        self._starting.clear()

    def kill(self, worker_id: str) -> None:
        """Kill a worker like `kill -9`, and start it again without waiting for it."""
        self.wait_running()
        self._ends(worker_id)
        self._deaths.append(time.time())
        self.processes[worker_id].kill()
        self._start(worker_id)

    def wait_judged(self) -> None:
        """Wait until starts are judged again after the last death of a worker."""
        over = max(self._deaths, default=0.0) + _CLAIMING
        eventually(lambda: time.time() > over, PATIENCE, "starts are judged again")

    def terminate(self, worker_id: str) -> None:
        """End a worker by SIGTERM, and start it again without waiting for it."""
        self.wait_running()
        self._ends(worker_id)
        self.processes[worker_id].terminate()
        self.processes[worker_id].wait()
        self._start(worker_id)

    def _ends(self, worker_id: str) -> None:
        *earlier, last = self._workers[worker_id].ups
        self._move(worker_id, [*earlier, Up(last.since, time.time())])

    def _move(self, worker_id: str, ups: list[Up]) -> None:
        self._workers[worker_id] = replace(self._workers[worker_id], ups=ups)

    # --- limits -------------------------------------------------------------------------------------------------

    def limit(self, queue: str | None = None, **limits: Any) -> None:
        """Limit a queue or a tenant, by the arguments of `client.limit`."""
        asked = time.time()
        self._changed(asked, self.client.limit(queue, **limits))

    def fair(self, queue: str, *, is_fair: bool = True) -> None:
        """Let the tenants of a queue take turns, or no longer."""
        asked = time.time()
        self._changed(asked, self.client.set_fair(queue, is_fair))

    def _changed(self, asked: float, control: Control) -> None:
        settings = Settings(
            _limit(control.limit), _limit(control.key_limit), _limit(control.tenant_limit), control.fair
        )
        self._changes.append(Change(control.id, asked, time.time(), settings))

    # --- tasks --------------------------------------------------------------------------------------------------

    def publish(self, *specs: TaskSpec) -> None:
        """Publish these tasks in one call."""
        self.client.publish_many(specs)

    def wait_done(self, queues: Sequence[str]) -> None:
        """Wait until all tasks of these queues have ended."""
        while left := self._count_open(queues):
            eventually(partial(self._is_less, left, queues), PATIENCE, f"one of {left} tasks ends")

    def _is_less(self, left: int, queues: Sequence[str]) -> bool:
        return self._count_open(queues) < left

    def _count_open(self, queues: Sequence[str]) -> int:
        return self.tasks.count_documents({"queue": {"$in": list(queues)}, **_OPEN})

    def wait_ended(self, queue: str, key: str) -> None:
        """Wait until a task has succeeded."""
        ended = {"_id": {"$regex": f"{queue}/{key}$"}, "task_state.status": TaskStatus.SUCCESS.value}
        eventually(lambda: self.tasks.count_documents(ended), PATIENCE, f"{key} of {queue} ends")

    def open(self, gate: str) -> None:
        """Let the handlers go on that wait at this gate."""
        gate_beside(self.stage.events.path, gate).touch()

    def wait_held(self, queue: str, gate: str, count: int) -> dict[str, str]:
        """Wait until so many handlers of a queue wait at a gate. Return their workers by task_id."""
        return eventually(partial(self._held, queue, gate, count), PATIENCE, f"{count} of {queue} wait at {gate}")

    def _held(self, queue: str, gate: str, count: int) -> dict[str, str]:
        running = {"queue": queue, "params.gate": gate, "task_state.status": TaskStatus.RUNNING.value}
        noted = {event.task_id: event.worker_id for event in self.stage.events.starts()}
        found = [task["_id"] for task in self.tasks.find(running, {"_id": 1}) if task["_id"] in noted]
        return {task_id: noted[task_id] for task_id in found} if len(found) >= count else {}

    # --- what happened ------------------------------------------------------------------------------------------

    def history(self, *queues: str) -> History:
        """Return what happened in these queues."""
        starts = {event.run_id: event.time.timestamp() for event in self.stage.events.starts()}
        found = self.tasks.find({"queue": {"$in": list(queues)}})
        return History(
            [read_task(StoredTask.model_validate(document), starts) for document in found],
            list(self._workers.values()),
            self._changes,
            [Trouble(death, death + _CLAIMING) for death in self._deaths],
            unsure=[Up(death, death + _UNSURE) for death in self._deaths],
        )


@contextmanager
def open_theatre(server: ReplicaSet, folder: Path, queues: Sequence[str]) -> Iterator[Theatre]:
    """Open a theatre with a database of its own, whose workers serve these queues."""
    database = f"test_{uuid.uuid4().hex}"
    users = accounts(server, database) if is_secure() else None
    with open_stage(server.uri, database, folder, users) as stage:
        yield Theatre(stage, queues)
    with MongoClient[Document](server.uri) as mongo:
        mongo.drop_database(database)


def spec(
    queue: str, key: str, seconds: float = 0.0, *, name: str = WORK, tenant: str | None = None, **rest: Any
) -> TaskSpec:
    """Return a task of a queue. `fails`, `gate`: params of its handler; the rest are options."""
    params: Document = {param: rest.pop(param) for param in ("fails", "gate") if param in rest}
    if name != ISOLATED:
        params["seconds"] = seconds
    return TaskSpec(name, params, key=f"{queue}/{key}", queue=queue, tenant=tenant, **{**_LEASE, **rest})


def _limit(limit: StoredLimit | None) -> Limit | None:
    return None if limit is None else Limit(limit.concurrency, limit.starts, (limit.window_ms or 0) / 1000)
