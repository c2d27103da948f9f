"""The counts of all tasks by queue, name and status, which the API, the page and the metrics share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from mtask.client import AsyncClient
from mtask.client.views import StatRow
from mtask.search.by_queue import QueueCounts
from mtask.search.counts import MOST
from mtask.web.sharing import Shared

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
