"""Runs one worker in the test process. A test can act between the worker's steps."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from datetime import timedelta
from typing import Any, TypeVar, cast

import pytest
from pymongo.read_concern import ReadConcern

from mtask import App, AsyncClient, Encryption
from mtask.kernel.document.status import WorkerStatus
from mtask.kernel.driver.stores import AsyncStore, SyncStore
from mtask.kernel.worker.discovery import fetch, fetch_loop, inbox, stream
from mtask.parts import assembly
from mtask.parts.assembly import Worker
from mtask.parts.worker import WorkerOptions
from tests.clients import with_options
from tests.explaining import only
from tests.mongo import PATIENCE, Client, until

T = TypeVar("T")
Document = dict[str, Any]
Step = Callable[[], Awaitable[None]]
#: What the fixture `working` is: `async with working(app, worker_id="w1", concurrency=10, **options) as bench`.
Working = Callable[..., AbstractAsyncContextManager["Bench"]]


class Bench:
    """A database, a client, and the worker under test."""

    def __init__(self, uri: str, database: str, mongo: Client, client: AsyncClient, worker: Worker) -> None:
        self.uri = uri
        self.database = database
        self.mongo = mongo
        self.client = client
        self.worker = worker
        self.life: asyncio.Task[None]
        self.tasks = mongo[database]["tasks"]
        self.registry = mongo[database]["workers"]

    @property
    def store(self) -> AsyncStore:
        """The store in which all parts of the worker run their operations, but for its pinger."""
        return self.worker.parts.scope.store

    @property
    def pings(self) -> SyncStore:
        """The store of the worker's pinger."""
        return self.worker.parts.pinger._store

    @property
    def app_name(self) -> str:
        """The appName of the worker's connections."""
        return f"mtask-worker:{self.worker.worker_id}"

    def document(self, task_id: str) -> Document:
        """Return a task's document as it is stored."""
        found = self.tasks.find_one({"_id": task_id})
        assert found is not None, task_id
        return found

    def state(self, task_id: str) -> Document:
        """Return the state of a task."""
        state: Document = self.document(task_id)["task_state"]
        return state

    def count(self, status: str) -> int:
        """Return the number of tasks with this status."""
        return self.tasks.count_documents({"task_state.status": status})

    async def status(self, task_id: str, status: str, timeout: float = PATIENCE) -> Document:
        """Wait until the task has this status for a majority, as the clients read it; return its state."""
        end = time.monotonic() + timeout
        read = self.tasks.with_options(read_concern=ReadConcern("majority"))
        while (found := read.find_one({"_id": task_id}) or self.document(task_id))["task_state"]["status"] != status:
            assert time.monotonic() < end, f"{task_id} not {status} within {timeout:g} s: {found['task_state']}"
            assert not self.life.done(), f"the worker ended: {self.life}"
            await asyncio.sleep(0.01)
        state: Document = found["task_state"]
        return state

    async def heard(self, count: int) -> None:
        """Wait until the change stream has reported more events than this number."""
        await until(lambda: self.worker.parts.stream.event_cnt > count, message="an event")

    async def scanned(self) -> None:
        """Wait until the stream is open and the full scan after its opening is over. The next follows after seconds."""
        parts = self.worker.parts
        await until(lambda: self.life.done() or (parts.stream.is_open and not parts.scans._is_full_due))

    def others(self, name: str) -> tuple[str, ...]:
        """Return the ids of the other workers that the worker knows to take tasks of this name."""
        return self.worker.parts.ranks._peers._others.get(name, ())

    async def at_rest(self) -> None:
        """Wait until the worker is idle. Check that each slot was freed exactly once."""
        parts = self.worker.parts
        ledger, claimer, slots = parts.scope.ledger, parts.claimer, parts.slots

        def is_at_rest() -> bool:
            return claimer.is_at_rest and not (ledger.running or slots.running_cnt)

        await until(is_at_rest, message="at rest")
        assert (slots.running_cnt, ledger.claiming) == (0, set())

    def stop_stream(self) -> None:
        """From now on, the worker learns of tasks only by scans."""
        self.worker.parts.stream.take = lambda event: True  # type: ignore[method-assign]

    def resume_stream(self) -> None:
        """Undo `stop_stream`."""
        vars(self.worker.parts.stream).pop("take", None)

    def stop_scans(self) -> None:
        """From now on, the worker learns of tasks only by the change stream. A scan would hide a lost event."""
        scans: Any = self.worker.parts.scans

        async def nothing(*_: object, **__: object) -> None:
            scans._wake.clear()

        scans.scan = scans.upkeep = nothing

    @contextmanager
    def backed_up(self) -> Iterator[None]:
        """Let the worker claim nothing during the block, as if its finisher were behind."""
        claimer: Any = self.worker.parts.claimer
        is_backed_up = claimer.is_backed_up
        claimer.is_backed_up = lambda: True
        try:
            yield
        finally:
            claimer.is_backed_up = is_backed_up

    @contextmanager
    def failing(self, *commands: str, times: int, **what: Any) -> Iterator[None]:
        """Make the worker's next commands on tasks fail, by the server's `failCommand`."""
        self.fail_next(*commands, times=times, **what)
        try:
            yield
        finally:
            self.mongo.admin.command("configureFailPoint", "failCommand", mode="off")

    def fail_next(self, *commands: str, times: int, **what: Any) -> None:
        """Like `failing`, but the caller ends it."""
        where = {"failCommands": list(commands), "appName": self.app_name, "namespace": f"{self.database}.tasks"}
        self.mongo.admin.command("configureFailPoint", "failCommand", mode={"times": times}, data={**where, **what})


@asynccontextmanager
async def working_on(
    uri: str,
    database: str,
    mongo: Client,
    app: App,
    worker_id: str = "w1",
    concurrency: int = 10,
    encryption: Encryption | None = None,
    **options: Any,
) -> AsyncIterator[Bench]:
    """Run a worker on this database. At the end of the block, stop it at once, if it still runs.

    The fixture `working` is this for the test's own database.
    """
    given: dict[str, Any] = {"shutdown_timeout": timedelta(seconds=1), **options}
    if encryption is not None:
        given["encryption"] = encryption
    # A fail point's error makes the driver believe that the server has changed. It asks again after this time.
    own_uri = with_options(uri, "heartbeatFrequencyMS=500")
    worker = Worker(app, WorkerOptions(own_uri, database, worker_id=worker_id, concurrency=concurrency, **given))
    async with AsyncClient(uri, database=database) as client:
        bench = Bench(uri, database, mongo, client, worker)
        bench.life = asyncio.create_task(worker.run())
        try:
            await until(lambda: worker.status is WorkerStatus.RUNNING or bench.life.done(), message="running")
            await bench.scanned()
            yield bench
        finally:
            worker.stop()
            worker.stop()
            await asyncio.wait((bench.life,))
        await bench.life


class Between:
    """Takes a test's steps before an operation of a store, after its first answer, or on its result.

    `only` is asked with the arguments of the operation.
    """

    def __init__(
        self, store: AsyncStore, operation: str, *, before: Step | None = None, amid: Step | None = None,
        after: Step | None = None, only: Callable[[Document], bool] = lambda given: True,
    ) -> None:  # fmt: skip
        self._store = store
        self._run = store.run
        self._operation = operation
        self._before, self._amid, self._after = before, amid, after
        self._only = only
        self.seen_cnt = 0

    async def run(self, operation: Generator[Any, Any, T], *rest: Any) -> T:
        if getattr(operation, "__name__", "") != self._operation or not self._only(
            inspect.getgeneratorlocals(operation)
        ):
            return await self._run(operation, *rest)
        self.seen_cnt += 1
        if self._before is not None:
            await self._before()
        if self._amid is None:
            result = await self._run(operation, *rest)
        else:
            result = await self._run_in_parts(operation)
        if self._after is not None:
            await self._after()
        return result

    def act_amid(self, step: Step) -> None:
        """Take this step after the first answer of the next operation."""
        self._amid = step

    def end(self) -> None:
        """Take no more steps."""
        vars(self._store)["run"] = self._run

    async def _run_in_parts(self, operation: Generator[Any, Any, T]) -> T:
        """Run the operation call by call. Act after the first answer."""
        call = next(operation)
        while True:
            answer = await self._run(only(call))
            if self._amid is not None:
                amid, self._amid = self._amid, None
                await amid()
            try:
                call = operation.send(answer)
            except StopIteration as stop:
                return cast(T, stop.value)


def between(store: AsyncStore, operation: str, **steps: Any) -> Between:
    """Insert a test's steps into the operations of this name: see `Between`."""
    vars(store)["run"] = (made := Between(store, operation, **steps)).run
    return made


# --- the bounds of workers that a test makes small ----------------------------------------------------------------


def set_queue_capacity(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """Let a worker that is built from now on hold so many due tasks."""
    monkeypatch.setattr(assembly, "QUEUE_CAPACITY", count)


def set_horizon(monkeypatch: pytest.MonkeyPatch, horizon: timedelta) -> None:
    """Let workers look for tasks that are due within this time, by scans and by the stream, and scan twice in it."""
    for module in (fetch_loop, fetch, stream, inbox):
        monkeypatch.setattr(module, "HORIZON", horizon)
