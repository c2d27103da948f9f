"""What the views read of the database, all through the client. How a list is searched is decided here alone."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import partial
from typing import Any, TypeVar

from mtask.client import AsyncClient
from mtask.client.views import StatRow
from mtask.doctor.explain import Inspected, limits_of
from mtask.doctor.position import Position
from mtask.errors import DatabaseUnavailable, TaskNotFound
from mtask.features.controls.client import Control
from mtask.features.limits.doctor import PermitUse
from mtask.kernel.document.identity import check_key, check_name, prefix_of, stored_key, task_id_of
from mtask.kernel.document.status import TaskStatus, WorkerStatus
from mtask.kernel.document.task import WorkerDocument
from mtask.search.by_queue import QueueCounts
from mtask.search.pages import TaskPage
from mtask.search.partial import TaskFields
from mtask.web.access import Caller, client_of
from mtask.web.sharing import Counts, Shared

T = TypeVar("T")
#: The longest time that a view waits for the database, in seconds.
PATIENCE = 5.0
#: The tasks of one page of the list.
PAGE = 50
#: The most searches whose first page is kept for a moment.
_MOST_KEPT = 64
#: How long a shared read is fresh: in seconds, as a multiple of the time that it took, and in seconds at most.
_FRESH: Mapping[str, float] = {"fresh": 0.3, "times": 9, "most": 30}
_OLD = timedelta(seconds=10)
#: The time after which the server's clock is read anew, in seconds.
_CLOCK_FRESH = 5.0
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


@dataclass(slots=True)
class Queue:
    """A queue, with the numbers of its tasks and its control."""

    name: str
    counts: dict[str, int] = field(default_factory=dict)
    more: set[str] = field(default_factory=set)  #: the statuses that have more tasks than were counted
    names: dict[str, dict[str, int]] = field(default_factory=dict)
    names_more: set[str] = field(default_factory=set)  #: the same, of the counts by name
    oldest: datetime | None = None
    stuck: dict[str, str] = field(default_factory=dict)  #: reasons by task name
    control: Control | None = None
    limits: Sequence[str] = ()

    def shown(self, *statuses: str) -> str:
        """Return the number of tasks with these statuses for readers: "10,000+" where the count has stopped."""
        return _shown([self], statuses)

    def shown_of(self, name: str, *statuses: str) -> str:
        """Return the number of tasks with this name and these statuses for readers."""
        total = sum(self.names[name].get(status, 0) for status in statuses)
        return f"{total:,}{'+' * bool(self.names_more.intersection(statuses))}"

    @property
    def is_paused(self) -> bool:
        """Whether workers claim nothing from it."""
        return self.control is not None and self.control.is_held

    @property
    def held(self) -> str:
        """Why workers claim nothing from it, in words."""
        return "" if self.control is None else self.control.said

    def oldest_due(self, now: datetime) -> datetime | None:
        """Return since when the longest waiting task has been due; None: nothing is due."""
        return self.oldest if self.oldest is not None and self.oldest <= now else None


@dataclass(frozen=True, slots=True, eq=False)
class State:
    """The state of the whole database. Each reading of it is another one, whatever it holds."""

    now: datetime
    queues: Mapping[str, Queue]
    workers: Sequence[WorkerDocument]  #: live ones first
    names: Sequence[Control]  #: the controls of task names
    counted: datetime  #: the time at which the tasks were counted

    @property
    def is_old(self) -> bool:
        """Whether the counts are so old that a reader should know it."""
        return self.now - self.counted > _OLD

    @property
    def live(self) -> list[WorkerDocument]:
        """The live workers."""
        return [worker for worker in self.workers if worker.is_live(self.now)]

    @property
    def silent(self) -> list[WorkerDocument]:
        """The workers that neither stopped nor beat."""
        return [w for w in self.workers if not w.is_live(self.now) and w.status is not WorkerStatus.STOPPED]

    def shown(self, *statuses: str) -> str:
        """Return the number of tasks with these statuses for readers."""
        return _shown(self.queues.values(), statuses)

    @property
    def oldest_due(self) -> datetime | None:
        """Since when the longest waiting task has been due."""
        return min((due for q in self.queues.values() if (due := q.oldest_due(self.now)) is not None), default=None)


def _shown(queues: Iterable[Queue], statuses: Sequence[str]) -> str:
    total, is_more = 0, False
    for queue in queues:
        total += sum(queue.counts.get(status, 0) for status in statuses)
        is_more |= bool(queue.more.intersection(statuses))
    return f"{total:,}{'+' * is_more}"


@dataclass(frozen=True, slots=True)
class Search:
    """What a list of tasks shows. `params`: values by path below params.

    `since` and `until` bound the instant by which the list is sorted.
    """

    status: Sequence[str] = ()
    name: Sequence[str] = ()
    queue: Sequence[str] = ()
    key: Sequence[str] = ()
    worker_id: Sequence[str] = ()
    #: Whose tasks the list shows; only for a caller of no tenant.
    tenant: str | None = None
    lookup: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    params: Mapping[str, Any] = field(default_factory=dict)
    since: datetime | None = None
    until: datetime | None = None

    def criteria(self, caller: Caller) -> dict[str, Any]:
        """Return the criteria for the client, but for the times and the beginning of the keys."""
        tenant = self.tenant if caller.tenant is None else caller.tenant
        given: dict[str, Any] = {
            "status": list(self.status),
            "name": list(self.name),
            "queue": list(self.queue),
            "key": [stored_key(tenant, key) for key in self.key],
            "worker_id": list(self.worker_id),
            "lookup": {name: list(values) for name, values in self.lookup.items()},
            "params": dict(self.params),
        }
        if tenant is not None and caller.tenant is None:
            given["key_prefix"] = prefix_of(tenant)
        return {name: value or None for name, value in given.items()}


@dataclass(frozen=True, slots=True)
class Found:
    """One page of a list of tasks."""

    page: TaskPage[TaskFields]
    now: datetime


class Reads:
    """The reads of all views."""

    def __init__(self, client: AsyncClient, counts: Counts) -> None:
        self._client = client
        self._counts = counts
        self._state = Shared(self._read_state, **_FRESH)
        self._read_clock: Shared[tuple[datetime, float]] = Shared(self._read_both_clocks, fresh=_CLOCK_FRESH)
        self._firsts: OrderedDict[str, Shared[Found]] = OrderedDict()

    async def within(self, reading: Awaitable[T]) -> T:
        """Wait for a read, but not for long: a page says soon that the database is away."""
        try:
            async with asyncio.timeout(PATIENCE):
                return await reading
        except TimeoutError:
            raise DatabaseUnavailable("it did not answer in time") from None

    async def now(self) -> datetime:
        """Return the server's time, by this process's clock since the last reading."""
        read, at = await self.within(self._read_clock.get())
        return read + timedelta(seconds=time.monotonic() - at)

    async def _read_both_clocks(self) -> tuple[datetime, float]:
        return await self._client.server_time(), time.monotonic()

    async def state(self) -> State:
        """Return the state of the whole database, as it was a moment ago at the earliest."""
        return await self.within(self._state.get())

    def forget(self) -> None:
        """Read the state anew at the next call, with the counts that are known."""
        self._state.forget()

    async def end(self) -> None:
        """End the reads that all viewers share."""
        await self._state.end()
        await self._read_clock.end()
        for first in self._firsts.values():
            await first.end()

    async def _read_state(self) -> State:
        # Counts may take their time. That the database is away is known soon, so that no former state hides it.
        now = await self.within(self._client.server_time())
        workers = await self._client.workers(live_only=False)
        controls = await self._client.controls()
        counted = await self._counts.queues.get()
        rows = (await self._counts.stats.get()).rows
        queues = queues_of(counted.queues, rows, controls, workers, now)
        names = [control.at(now) for control in controls if control.kind == "name"]
        workers.sort(key=lambda worker: (not worker.is_live(now), worker.worker_id))
        return State(now, queues, workers, names, counted.time)

    async def tasks(self, wanted: Search, caller: Caller, cursor: str | None = None) -> Found:
        """Return a page of tasks. At most 2,000 tasks are examined for it."""
        return await self.within(self._search(wanted, caller, cursor))

    async def first(self, wanted: Search, caller: Caller) -> Found:
        """Return the first page of a list, as it was a moment ago at the earliest."""
        known = f"{caller.tenant!r} {wanted!r}"
        if known not in self._firsts:
            self._firsts[known] = Shared(partial(self._search, wanted, caller, None), **_FRESH)
            if len(self._firsts) > _MOST_KEPT:
                self._firsts.popitem(last=False)
        self._firsts.move_to_end(known)
        return await self.within(self._firsts[known].get())

    async def _search(self, wanted: Search, caller: Caller, cursor: str | None) -> Found:
        page = await client_of(self._client, caller).find_page(
            **{"key_prefix": caller.stored_prefix(None), **wanted.criteria(caller)},
            since=wanted.since,
            until=wanted.until,
            fields=_LISTED,
            limit=PAGE,
            cursor=cursor,
        )
        return Found(page, await self.now())

    async def rows(self, task_ids: Sequence[str], caller: Caller) -> tuple[Mapping[str, TaskFields], datetime]:
        """Return the tasks of a list that is shown already, by id."""

        async def read() -> tuple[Mapping[str, TaskFields], datetime]:
            found = await client_of(self._client, caller).get_many(task_ids, fields=_LISTED)
            return found.tasks, await self.now()

        return await self.within(read())

    async def task(self, name: str, key: str, caller: Caller) -> tuple[Inspected, Position | None]:
        """Return a task, with why it waits and, if it waits for a worker, where it stands. Raises TaskNotFound."""

        async def read() -> tuple[Inspected, Position | None]:
            client = client_of(self._client, caller)
            found = await client.inspect(task_id_of(check_name(name), check_key(caller.stored_key(key))))
            if found.task is None or found.task.status is not TaskStatus.INIT:
                return found, None
            try:
                return found, await client.position(name, caller.stored_key(key))
            except TaskNotFound:
                return found, None

        return await self.within(read())

    async def permits(self, queue: Queue) -> list[PermitUse]:
        """Return how many permits of each limit of a queue are in use."""
        return await self.within(self._client.permits(queue.name)) if queue.limits else []


def queues_of(
    counts: Iterable[QueueCounts],
    rows: Iterable[StatRow],
    controls: Iterable[Control],
    workers: Iterable[WorkerDocument],
    now: datetime,
) -> dict[str, Queue]:
    """Return the queues that have tasks, a control, or a worker, by name."""
    found: dict[str, Queue] = {}
    for counted in counts:
        queue = found.setdefault(counted.queue, Queue(counted.queue))
        queue.counts = {status.value: count.count for status, count in counted.counts.items()}
        queue.more = {status.value for status, count in counted.counts.items() if count.is_more}
        queue.oldest = counted.oldest_preempt_time
    for row in rows:
        queue = found.setdefault(row.queue, Queue(row.queue))
        queue.names.setdefault(row.name, {})[row.status] = row.count
        if row.is_more:
            queue.names_more.add(row.status)
        if row.status == "INIT" and row.oldest_preempt_time is not None:
            # The queue's own instant leaves out the tasks that only named workers may take.
            queue.oldest = min(queue.oldest or row.oldest_preempt_time, row.oldest_preempt_time)
        if row.stuck is not None:
            queue.stuck[row.name] = row.stuck
    every = [control.at(now) for control in controls]
    for control in every:
        if control.kind == "queue":
            queue = found.setdefault(control.target, Queue(control.target))
            queue.control, queue.limits = control, limits_of(control.target, every)
    for worker in workers:
        for name in worker.queues if worker.is_live(now) else ():
            found.setdefault(name, Queue(name))
    return dict(sorted(found.items()))
