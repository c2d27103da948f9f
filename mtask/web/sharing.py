"""Answers of the database that all callers of the server share: the counts of all tasks, for example."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Generic, TypeVar

from mtask.client import AsyncClient
from mtask.client.views import StatRow
from mtask.search.by_queue import QueueCounts
from mtask.search.counts import MOST

T = TypeVar("T")
#: A read that takes more than this time, in seconds, is slow. The second one is the least time, in seconds, for which a
#: slow answer is given out while the next one is read.
_SLOW, _USABLE = 0.1, 60.0
#: A read that has not ended after this time, in seconds, never will: each call of the database has a shorter limit.
_HUNG = 60.0


@dataclass(frozen=True, slots=True)
class _Known(Generic[T]):
    """An answer, and until when it is given out, by the monotonic clock."""

    value: T
    fresh_until: float
    #: Until then, callers get the answer while the next one is read.
    usable_until: float


class Shared(Generic[T]):
    """An answer of the database that costs much, so that all callers share one that is fresh enough.

    An answer is fresh for `times` the time that it took, and for `fresh` seconds at least and `most` seconds at most.
    So the answers of a small database are live, and those of a large one take a small part of its time.

    Where a read is slow, callers need not wait for it: they get the former answer while the next one is read, for a
    minute at least and for as long again as the answer was fresh. Later, after `forget`, and after a read that failed,
    they wait.
    """

    def __init__(
        self, read: Callable[[], Awaitable[T]], *, fresh: float = 5.0, times: float = 20.0, most: float = math.inf
    ) -> None:
        self._read = read
        self._fresh, self._times, self._most = fresh, times, most
        self._known: _Known[T] | None = None
        self._reading: asyncio.Task[T] | None = None
        self._began = -math.inf  #: when the read that is under way began, by the monotonic clock
        self._tasks: set[asyncio.Task[T]] = set()

    def begin(self) -> None:
        """Read nothing yet: the first caller does."""

    async def get(self) -> T:
        """Return the answer."""
        now = time.monotonic()
        if self._known is not None and now < self._known.fresh_until:
            return self._known.value
        reading = self._begun()
        if self._known is not None and now < self._known.usable_until:
            return self._known.value
        # A caller that gives up leaves the read to the others.
        return await asyncio.shield(reading)

    def forget(self) -> None:
        """Read anew at the next call: something was changed here. A read that has begun may not know of the change."""
        self._known = self._reading = None

    async def end(self) -> None:
        """End the reads that have begun."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    def _begun(self) -> asyncio.Task[T]:
        """Return the read that is under way. If there is none, or it hangs, begin one."""
        now = time.monotonic()
        # A read that hangs is left alone: a caller may still wait for it, and `end` cancels it.
        if self._reading is None or self._reading.done() or now - self._began > _HUNG:
            self._began = now
            self._reading = asyncio.create_task(self._read_anew())
            self._tasks.add(self._reading)
            self._reading.add_done_callback(self._has_ended)
        return self._reading

    def _has_ended(self, task: asyncio.Task[T]) -> None:
        self._tasks.discard(task)
        if self._reading is task and (task.cancelled() or task.exception() is not None):
            self._known = None  # so the next caller meets the error, too

    async def _read_anew(self) -> T:
        began = time.monotonic()
        found = await self._read()
        ended = time.monotonic()
        lasts = min(self._most, max(self._fresh, self._times * (ended - began)))
        if self._reading is asyncio.current_task():  # else it was forgotten meanwhile
            usable = max(_USABLE, lasts) if ended - began > _SLOW else 0.0
            self._known = _Known(found, ended + lasts, ended + lasts + usable)
        return found


# --- counts ----------------------------------------------------------------------------------------------

# The counts of all tasks by queue, name and status, which the API, the page and the metrics share.

#: The most tasks of a status that the statistics count: these tasks are read, not only counted in an index.
STATISTICS = 2_000
#: How long a count is fresh: in seconds at least, as a multiple of the time that it took, and in seconds at most.
_FRESH: Mapping[str, float] = {"fresh": 0.3, "times": 50, "most": 120}


@dataclass(frozen=True, slots=True)
class CountedQueues:
    """The counts of all queues, and the server's time at which they were made."""

    queues: Sequence[QueueCounts]
    time: datetime


@dataclass(frozen=True, slots=True, eq=False)
class Statistics:
    """The counts by queue, name and status. Each count is another one, whatever it has found."""

    rows: Sequence[StatRow]


class Counts:
    """The counts. A small database is counted as often as somebody asks, a large one for a fiftieth of the time."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client
        self.queues: Shared[CountedQueues] = Shared(self._count_queues, **_FRESH)
        self.stats: Shared[Statistics] = Shared(self._count_stats, **_FRESH)

    async def _count_queues(self) -> CountedQueues:
        now = await self._client.server_time()
        return CountedQueues(await self._client.queues(most=MOST), now)

    async def _count_stats(self) -> Statistics:
        return Statistics(await self._client.stats(most=STATISTICS))

    async def end(self) -> None:
        """End the counts that have begun."""
        await self.queues.end()
        await self.stats.end()
