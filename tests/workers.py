"""Real worker processes for the acceptance tests. Each is ended after its test."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

from pymongo import MongoClient

import mtask
from mtask.local.ownership import is_stopped
from tests.acceptance.app import EVENTS_VARIABLE
from tests.forked import fork_worker
from tests.mongo import PATIENCE, Document, eventually
from tests.mongo import Client as Mongo
from tests.processes import kill_marked, marked
from tests.security import Accounts

ROOT = Path(__file__).parents[1]
APP = "tests.acceptance.app:app"
#: This variable marks a worker and all processes that it starts.
_MARK = "MTASK_TEST_WORKER"


@dataclass(frozen=True, slots=True)
class Event:
    """An event of a handler: "start", then "end", "cancelled" or "raised". A process that died records no end."""

    event: str
    task_id: str
    run_id: str
    attempt: int
    worker_id: str
    pid: int
    monotonic: float
    time: datetime  #: the same instant on this machine's wall clock, as this process reads it


class Events:
    """The file in which the handlers of one test record their events."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.touch()

    def all(self, event: str | None = None, *, task_id: str | None = None, worker_id: str | None = None) -> list[Event]:
        """Return the recorded events in the order of time: all, or those of one kind, task or worker."""
        epoch = _epoch()
        found = []
        for line in self.path.read_text().splitlines():
            entry = json.loads(line)
            if event not in (None, entry["event"]) or task_id not in (None, entry["task_id"]):
                continue
            if worker_id in (None, entry["worker_id"]):
                known = {name: entry[name] for name in Event.__slots__ if name != "time"}
                found.append(Event(**known, time=datetime.fromtimestamp(epoch + entry["monotonic"], UTC)))
        return sorted(found, key=lambda noted: noted.monotonic)

    def starts(self, task_id: str | None = None, worker_id: str | None = None) -> list[Event]:
        """Return the starts of handlers."""
        return self.all("start", task_id=task_id, worker_id=worker_id)

    def wait(
        self,
        event: str,
        count: int = 1,
        *,
        task_id: str | None = None,
        worker_id: str | None = None,
        timeout: float = PATIENCE,
    ) -> list[Event]:
        """Wait until so many of these events are recorded. Return them."""

        def found() -> list[Event]:
            events = self.all(event, task_id=task_id, worker_id=worker_id)
            return events if len(events) >= count else []

        return eventually(found, timeout, f"{count} times {event!r} of {task_id or 'any task'} on {worker_id or 'any'}")


class WorkerProcess:
    """One `mtask-worker` process, or with `--processes` a supervisor and its children."""

    def __init__(
        self,
        uri: str,
        database: str,
        worker_id: str | None,
        *flags: str,
        folder: Path,
        environment: Mapping[str, str] | None = None,
        app: str = APP,
    ) -> None:
        self.worker_id = worker_id
        self._mark = uuid.uuid4().hex
        self.log_path = folder / f"worker-{worker_id or 'unnamed'}-{self._mark[:6]}.log"
        given = ["--worker-id", worker_id] if worker_id is not None else []
        arguments = [app, "--database", database, *given, *flags]
        variables = {**os.environ, "MTASK_URI": uri, **(environment or {}), _MARK: self._mark}
        self.log_path.touch()
        self._process = fork_worker(arguments, variables, self.log_path)

    @property
    def pid(self) -> int:
        """The id of the process."""
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        """Whether the process lives."""
        return self._process.poll() is None

    @property
    def log(self) -> str:
        """The log of the process up to now."""
        return self.log_path.read_text(errors="replace")

    def send(self, number: int) -> None:
        """Send a signal to the process."""
        self._process.send_signal(number)

    def kill(self) -> None:
        """Kill the process like `kill -9`. Wait for its end. The server may still execute its last statements."""
        self._process.kill()
        self._process.wait(PATIENCE)

    def pause(self) -> None:
        """Stop the process with SIGSTOP, and wait until it is stopped."""
        self.send(signal.SIGSTOP)
        eventually(lambda: is_stopped(self.pid), PATIENCE, "frozen", interval=0.002)
        assert self.is_alive

    def resume(self) -> None:
        """Let the stopped process go on."""
        self.send(signal.SIGCONT)

    def terminate(self) -> None:
        """Send SIGTERM: the worker stops gracefully. After a second one, it stops at once."""
        self.send(signal.SIGTERM)

    def wait(self, timeout: float = PATIENCE) -> int:
        """Wait for the end of the process. Return the exit code. At the timeout, fail with the log."""
        try:
            return self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self.worker_id} did not end within {timeout:g} s:\n{self.log}") from None

    def pids(self) -> list[int]:
        """Return the ids of the process and, if it is a supervisor, of its children."""
        own = [self.pid] if self.is_alive else []
        return list({*own, *marked(_MARK, self._mark)})

    def reap(self) -> None:
        """Kill the process and all processes that it started, also stopped ones."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait(PATIENCE)
        kill_marked(_MARK, self._mark)
        eventually(lambda: not self.pids(), PATIENCE, f"no process left of {self.worker_id}: {self.pids()}")


class Stage:
    """The database, the client, the handlers' events and the workers of one test."""

    def __init__(self, uri: str, database: str, mongo: Mongo, folder: Path, users: Accounts | None = None) -> None:
        #: The URIs of the services, of the workers, and of the one who sets up the database.
        self.uri = uri if users is None else users.service
        self.worker_uri = uri if users is None else users.worker
        self.admin_uri = uri
        self.database = database
        self.folder = folder
        self.mongo = mongo
        self.client = mtask.Client(self.uri, database=database)
        self.events = Events(folder / "events.jsonl")
        self.started: list[WorkerProcess] = []

    # --- workers ------------------------------------------------------------------------------------------

    def launch(
        self, worker_id: str | None, *flags: str, environment: Mapping[str, str] | None = None, app: str = APP
    ) -> WorkerProcess:
        """Start a worker process without waiting for it. `environment` is added to the environment of the tests."""
        worker = WorkerProcess(
            self.worker_uri,
            self.database,
            worker_id,
            *flags,
            folder=self.folder,
            environment={EVENTS_VARIABLE: str(self.events.path), **(environment or {})},
            app=app,
        )
        self.started.append(worker)
        return worker

    def start(self, worker_id: str, *flags: str, environment: Mapping[str, str] | None = None) -> WorkerProcess:
        """Start a worker process and wait until it works."""
        worker = self.launch(worker_id, *flags, environment=environment)
        self.wait_running(worker)
        return worker

    def start_all(self, worker_ids: Sequence[str], *flags: str) -> list[WorkerProcess]:
        """Start several at once and wait until they all work."""
        started = [self.launch(worker_id, *flags) for worker_id in worker_ids]
        for worker in started:
            self.wait_running(worker)
        return started

    def wait_running(self, worker: WorkerProcess, timeout: float = PATIENCE) -> Document:
        """Wait until the worker's document says that it works. Return the document."""

        def document() -> Document | None:
            assert worker.is_alive, f"{worker.worker_id} ended with {worker.wait()}:\n{worker.log}"
            found = self.worker_document(worker.worker_id or "")
            return found if found and found["pid"] == worker.pid and found["status"] == "running" else None

        found = eventually(document, timeout, f"{worker.worker_id} running")
        assert found is not None
        return found

    def kill(self, worker: WorkerProcess) -> None:
        """Kill a worker. Wait until the server has executed its last statements and closed its connections."""
        worker.kill()
        every: list[Document] = [{"$currentOp": {"allUsers": True, "idleConnections": True}}]
        own = [*every, {"$match": {"appName": f"mtask-worker:{worker.worker_id}"}}]
        eventually(lambda: not list(self.mongo.admin.aggregate(own)), PATIENCE, f"{worker.worker_id} is forgotten")

    def worker_document(self, worker_id: str) -> Document | None:
        """Return this worker's document."""
        return self.mongo[self.database]["workers"].find_one({"_id": worker_id})

    def wait_heard(self, worker_id: str) -> None:
        """Wait until the worker's change stream has reported all changes before this call.

        Something that it need not act on is asked of it, along the same stream; it answers with a heartbeat. Twice,
        as the first heartbeat seen may be one that was due.
        """
        registry = self.mongo[self.database]["workers"]
        for _ in range(2):
            before = registry.find_one_and_update({"_id": worker_id}, {"$inc": {"control.asked_by_test": 1}})
            assert before is not None, worker_id
            answered = {"_id": worker_id, "heartbeat_time": {"$gt": before["heartbeat_time"]}}
            eventually(partial(registry.count_documents, answered), PATIENCE, f"{worker_id} answers")

    # --- tasks --------------------------------------------------------------------------------------------

    def set_up(self) -> None:
        """Make the collections, as `mtask init` does."""
        with mtask.Client(self.admin_uri, database=self.database) as deployer:
            deployer.init()

    def document(self, task_id: str) -> Document:
        """Return the task's document as it is stored."""
        found = self.mongo[self.database]["tasks"].find_one({"_id": task_id})
        assert found is not None, task_id
        return found

    def wait_document(
        self, task_id: str, condition: Callable[[Document], Any], what: str, timeout: float = PATIENCE
    ) -> Document:
        """Wait until the condition holds for the task's document. Return the document."""

        def found() -> Document | None:
            document = self.mongo[self.database]["tasks"].find_one({"_id": task_id})
            return document if document is not None and condition(document) else None

        try:
            document = eventually(found, timeout)
        except AssertionError:
            raise AssertionError(f"{task_id}: {what} not within {timeout:g} s: {self.document(task_id)}") from None
        assert document is not None
        return document

    def wait_status(self, task_id: str, status: str, timeout: float = PATIENCE) -> Document:
        """Wait until the task has this status. Return its document."""
        return self.wait_document(task_id, lambda found: found["task_state"]["status"] == status, status, timeout)

    def wait_returns(self, task_id: str, timeout: float = PATIENCE) -> Document:
        """Wait until the task is SUCCESS and holds the returns of its newest run. Return its document.

        A handler's transaction commits the SUCCESS, and what the handler returns after it is added to that.
        """

        def has_returned(found: Document) -> bool:
            return found["task_state"]["status"] == "SUCCESS" and runs_of(found)[-1].get("returns") is not None

        return self.wait_document(task_id, has_returned, "SUCCESS, with what was returned", timeout)

    def wait_run(self, task_id: str, worker_id: str | None = None, timeout: float = PATIENCE) -> Document:
        """Wait until the handler of a run of this task has started. `worker_id`: only a run of this worker."""

        def running() -> Document | None:
            for run in runs_of(self.document(task_id)):
                if run["status"] == "RUNNING" and worker_id in (None, run["worker_id"]):
                    return run if any(e.run_id == run["run_id"] for e in self.events.starts(task_id)) else None
            return None

        run = eventually(running, timeout, f"{task_id} runs on {worker_id or 'some worker'}")
        assert run is not None
        return run

    def gate(self, name: str = "gate") -> str:
        """Return the path of a closed gate for the handler `hold`."""
        return str(self.folder / name)

    def open_gate(self, name: str = "gate") -> None:
        """Let the handlers that wait at this gate go on."""
        (self.folder / name).touch()

    def server_now(self) -> datetime:
        """Return the server's clock."""
        return self.client.server_time()

    def wait_server_time(self, moment: datetime) -> datetime:
        """Wait until the server's clock has passed this instant. Return the server's time."""

        def reached() -> datetime | None:
            now = self.server_now()
            return now if now > moment else None

        found = eventually(reached, PATIENCE, f"server time {moment}")
        assert found is not None
        return found

    def close(self) -> None:
        """End the workers, and print their logs. Pytest shows these if the test failed."""
        try:
            for worker in self.started:
                worker.reap()
        finally:
            for worker in self.started:
                print(f"--- {worker.log_path.name}\n{worker.log}")
            print(f"--- events\n{self.events.path.read_text()}")
            self.client.close()


@contextmanager
def open_stage(uri: str, database: str, folder: Path, users: Accounts | None = None) -> Iterator[Stage]:
    """Make a stage on any server. With `users`, the services and workers connect as these."""
    mongo: Mongo = MongoClient(uri, tz_aware=True)
    with mongo:
        stage = Stage(uri, database, mongo, folder, users)
        try:
            yield stage
        finally:
            stage.close()


def _epoch() -> float:
    """Return the wall clock's time at the zero of the monotonic clock, exact to the ms on a busy machine, too."""
    while True:
        before, now, after = time.monotonic(), time.time(), time.monotonic()
        if after - before < 0.001:
            return now - before


def runs_of(document: Document) -> list[Document]:
    """Return the task's runs, the oldest first."""
    runs: list[Document] = document["task_state"]["worker_states"]
    return runs


def end_of(run: Document) -> datetime:
    """Return when a closed run ended, by the server's clock."""
    end: datetime = run.get("success_time") or run["fail_time"]
    return end


def milliseconds(duration: timedelta) -> float:
    """Return a duration in ms, for the report."""
    return round(duration / timedelta(milliseconds=1), 1)
