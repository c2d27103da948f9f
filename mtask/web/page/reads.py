"""What the views read of the database, all through the client. How a list is searched is decided here alone."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Generic, TypeVar

from mtask.client import AsyncClient
from mtask.client.diagnosis.explain import Inspected, limits_of
from mtask.client.diagnosis.position import Position
from mtask.client.reading.partial import TaskFields
from mtask.client.reading.views import StatRow
from mtask.errors import DatabaseUnavailable, TaskNotFound
from mtask.model.controls import Control
from mtask.model.documents import WorkerDocument
from mtask.model.publishing.identity import check_key, check_name, task_id_of
from mtask.model.status import TaskStatus, WorkerStatus
from mtask.web.access import Caller
from mtask.web.problems import Forbidden

T = TypeVar("T")
#: The longest time that a view waits for the database, in seconds.
PATIENCE = 5.0
#: The tasks of one page of the list, the tasks that one read asks for, and the most that one page looks at.
PAGE, _CHUNK, MOST_LOOKED_AT = 50, 500, 2_000
#: The most new tasks that a list counts.
MOST_NEW = 50
#: A text that sorts behind all ids.
_BEHIND_ALL = "\U0010ffff"
_LISTED = (
    "status",
    "queue",
    "task_state.create_time",
    "task_state.next_preempt_time",
    "task_state.finish_time",
    "task_state.failed_cnt",
    "task_state.cancel_requested",
    "fail_reason",
    "flow.key",
)


class Fresh(Generic[T]):
    """A read that all viewers share. A read that takes long is repeated the more seldom: it takes a tenth of the time.

    So the statistics of a small database are live, and those of a large one do not burden it.
    """

    LEAST, MOST, _PART = 0.3, 30.0, 9

    def __init__(self, read: Callable[[], Awaitable[T]]) -> None:
        self._read = read
        self._lock = asyncio.Lock()
        self._kept: T
        self._until = 0.0

    async def get(self) -> T:
        """Return what was read last, or read anew."""
        async with self._lock:
            if time.monotonic() >= self._until:
                begun = time.monotonic()
                self._kept = await self._read()
                took = time.monotonic() - begun
                self._until = time.monotonic() + min(self.MOST, max(self.LEAST, self._PART * took))
            return self._kept

    def forget(self) -> None:
        """Read anew at the next call: something was changed here."""
        self._until = 0.0


@dataclass(slots=True)
class Queue:
    """A queue, with the numbers of its tasks and its control."""

    name: str
    counts: dict[str, int] = field(default_factory=dict)
    names: dict[str, dict[str, int]] = field(default_factory=dict)
    oldest: datetime | None = None
    stuck: dict[str, str] = field(default_factory=dict)  #: reasons by task name
    control: Control | None = None
    limits: Sequence[str] = ()

    @property
    def waiting(self) -> int:
        """The number of tasks that wait for a worker, a retry or other tasks."""
        return self.counts.get("INIT", 0) + self.counts.get("WAITING", 0)

    @property
    def is_paused(self) -> bool:
        """Whether workers claim nothing from it."""
        return self.control is not None and self.control.paused

    def oldest_due(self, now: datetime) -> datetime | None:
        """Return since when the longest waiting task has been due; None: nothing is due."""
        return self.oldest if self.oldest is not None and self.oldest <= now else None


@dataclass(frozen=True, slots=True)
class State:
    """The state of the whole database."""

    now: datetime
    queues: Mapping[str, Queue]
    workers: Sequence[WorkerDocument]  #: live ones first
    names: Sequence[Control]  #: the controls of task names

    @property
    def live(self) -> list[WorkerDocument]:
        """The live workers."""
        return [worker for worker in self.workers if worker.is_live(self.now)]

    @property
    def silent(self) -> list[WorkerDocument]:
        """The workers that neither stopped nor beat."""
        return [w for w in self.workers if not w.is_live(self.now) and w.status is not WorkerStatus.STOPPED]

    def total(self, *statuses: str) -> int:
        """Return the number of tasks with these statuses."""
        return sum(queue.counts.get(status, 0) for queue in self.queues.values() for status in statuses)

    @property
    def oldest_due(self) -> datetime | None:
        """Since when the longest waiting task has been due."""
        return min((due for q in self.queues.values() if (due := q.oldest_due(self.now)) is not None), default=None)


@dataclass(frozen=True, slots=True)
class Search:
    """What a list of tasks shows. `params`: values by path below params. `since` and `until`: when they were made."""

    status: Sequence[str] = ()
    name: Sequence[str] = ()
    queue: Sequence[str] = ()
    key: Sequence[str] = ()
    worker_id: Sequence[str] = ()
    lookup: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    params: Mapping[str, Any] = field(default_factory=dict)
    since: datetime | None = None
    until: datetime | None = None


@dataclass(frozen=True, slots=True)
class Found:
    """One page of a list of tasks. `after`: the last task that was looked at, if there may be more behind it."""

    tasks: Sequence[TaskFields]
    after: TaskFields | None
    now: datetime
    #: Whether the page is short only because it has looked at enough tasks.
    is_cut: bool = False


class Reads:
    """The reads of all views."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client
        self._state = Fresh(self._read_state)

    async def within(self, reading: Awaitable[T]) -> T:
        """Wait for a read, but not for long: a page says soon that the database is away."""
        try:
            async with asyncio.timeout(PATIENCE):
                return await reading
        except TimeoutError:
            raise DatabaseUnavailable("it did not answer in time") from None

    async def now(self) -> datetime:
        """Return the server's time."""
        return await self.within(self._client.server_time())

    async def state(self) -> State:
        """Return the state of the whole database, as it was a moment ago at the earliest."""
        return await self.within(self._state.get())

    def forget(self) -> None:
        """Read the state anew at the next call."""
        self._state.forget()

    async def _read_state(self) -> State:
        now = await self._client.server_time()
        workers = await self._client.workers(live_only=False)
        queues = queues_of(await self._client.stats(), await self._client.controls(), workers, now)
        names = [control for control in await self._client.controls() if control.kind == "name"]
        workers.sort(key=lambda worker: (not worker.is_live(now), worker.worker_id))
        return State(now, queues, workers, names)

    async def tasks(self, wanted: Search, caller: Caller, after: TaskFields | None = None, most: int = PAGE) -> Found:
        """Return a page of tasks, the newest first. It looks at a bounded number of tasks."""
        check_tenant(wanted, caller)
        return await self.within(self._search(wanted, caller, after, most))

    async def _search(self, wanted: Search, caller: Caller, after: TaskFields | None, most: int) -> Found:
        now = await self._client.server_time()
        if after is None and wanted.until is not None:
            after = TaskFields(_BEHIND_ALL, wanted.until, {})
        fields = [*_LISTED, *(f"params.{path}" for path in wanted.params)]
        chosen: list[TaskFields] = []
        looked = 0
        chunk = _CHUNK if wanted.params else most + 1
        while True:
            rows = await self._client.find(
                status=list(wanted.status) or None,
                name=list(wanted.name) or None,
                queue=list(wanted.queue) or None,
                key=[caller.stored_key(key) for key in wanted.key] or None,
                worker_id=list(wanted.worker_id) or None,
                lookup={name: list(values) for name, values in wanted.lookup.items()} or None,
                fields=fields,
                limit=chunk,
                after=after,
            )
            for row in rows:
                is_too_old = wanted.since is not None and row.create_time is not None and row.create_time < wanted.since
                if is_too_old:
                    return Found(chosen, None, now)
                if len(chosen) == most:
                    return Found(chosen, after, now)
                after, looked = row, looked + 1
                if all(_same(row[f"params.{path}"], value) for path, value in wanted.params.items()):
                    chosen.append(row)
            if len(rows) < chunk or after is None or after.create_time is None:
                return Found(chosen, None, now)
            if looked >= MOST_LOOKED_AT:
                return Found(chosen, after, now, is_cut=True)

    async def rows(self, task_ids: Sequence[str]) -> tuple[Mapping[str, TaskFields], datetime]:
        """Return the tasks of a list that is shown already, by id."""

        async def read() -> tuple[Mapping[str, TaskFields], datetime]:
            found = await self._client.get_many(task_ids, fields=_LISTED)
            return found.tasks, await self._client.server_time()

        return await self.within(read())

    async def task(self, name: str, key: str, caller: Caller) -> tuple[Inspected, Position | None]:
        """Return a task, with why it waits and, if it waits for a worker, where it stands. Raises TaskNotFound."""

        async def read() -> tuple[Inspected, Position | None]:
            stored = caller.stored_key(key)
            found = await self._client.inspect(task_id_of(check_name(name), check_key(stored)))
            if found.task is None or found.task.status is not TaskStatus.INIT:
                return found, None
            try:
                return found, await self._client.position(name, stored)
            except TaskNotFound:
                return found, None

        return await self.within(read())


def check_tenant(wanted: Search, caller: Caller) -> None:
    """Raise Forbidden if a tenant's list does not name its tasks: no index finds the keys of one tenant."""
    if caller.tenant is not None and not (wanted.name and wanted.key):
        raise Forbidden("A tenant's list names its tasks: give name and key.")


def queues_of(
    rows: Iterable[StatRow], controls: Iterable[Control], workers: Iterable[WorkerDocument], now: datetime
) -> dict[str, Queue]:
    """Return the queues that have tasks, a control, or a worker, by name."""
    found: dict[str, Queue] = {}
    for row in rows:
        queue = found.setdefault(row.queue, Queue(row.queue))
        queue.counts[row.status] = queue.counts.get(row.status, 0) + row.count
        queue.names.setdefault(row.name, {})[row.status] = row.count
        if row.status == "INIT" and row.oldest_preempt_time is not None:
            queue.oldest = min(queue.oldest or row.oldest_preempt_time, row.oldest_preempt_time)
        if row.stuck is not None:
            queue.stuck[row.name] = row.stuck
    every = list(controls)
    for control in every:
        if control.kind == "queue":
            queue = found.setdefault(control.target, Queue(control.target))
            queue.control, queue.limits = control, limits_of(control.target, every)
    for worker in workers:
        for name in worker.queues if worker.is_live(now) else ():
            found.setdefault(name, Queue(name))
    return dict(sorted(found.items()))


def _same(stored: Any, wanted: Any) -> bool:
    """Whether a stored value is the wanted one, or holds it. Text finds the numbers and words that it spells."""
    if isinstance(stored, list):
        return any(_same(one, wanted) for one in stored)
    if isinstance(stored, bool) or isinstance(wanted, bool):
        return stored is wanted
    return bool(stored == wanted)
