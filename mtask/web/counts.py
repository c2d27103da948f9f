"""The counts of all tasks by queue, name and status, which the API, the page and the metrics share."""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Generic, TypeVar

from mtask.client import AsyncClient
from mtask.client.reading.views import StatRow
from mtask.store.tasks.counting import MOST, QueueCounts
from mtask.web.sharing import Shared

T = TypeVar("T")
#: The most tasks of a status that the statistics count: these tasks are read, not only counted in an index.
STATISTICS = 2_000
#: How long the counts are fresh, in seconds: at least, and at most.
_FRESH, _MOST_FRESH = 0.3, 120.0


@dataclass(frozen=True, slots=True)
class Counted(Generic[T]):
    """What was counted, and at which time of the server."""

    value: T
    time: datetime


class Counts:
    """The counts. A small database is counted as often as somebody asks, a large one for a twentieth of the time."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client
        self.queues: Shared[Counted[Sequence[QueueCounts]]] = Shared(
            lambda: self._counted(client.queues(most=MOST)), fresh=_FRESH, most=_MOST_FRESH
        )
        self.stats: Shared[Counted[Sequence[StatRow]]] = Shared(
            lambda: self._counted(client.stats(most=STATISTICS)), fresh=_FRESH, most=_MOST_FRESH
        )

    async def _counted(self, reading: Awaitable[T]) -> Counted[T]:
        now = await self._client.server_time()
        return Counted(await reading, now)

    async def end(self) -> None:
        """End the counts that have begun."""
        await self.queues.end()
        await self.stats.end()
