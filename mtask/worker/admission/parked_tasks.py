"""Parked tasks: the tasks that wait in this worker for permits of one pool."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from math import inf
from operator import itemgetter
from time import monotonic

#: If a blocked pool is tried again only after this time, in seconds, no scan looks for more of its tasks now.
_SOON = 2.0
#: The order of parked tasks: higher priority first. Among equal priorities, the task that became due first comes first.
Rank = tuple[int, float]


@dataclass(slots=True)
class ParkedTasks:
    """The tasks that wait for permits of one pool.

    The tasks wait because the pool had no free permit, or because more urgent tasks are requesting permits now.
    """

    width: int  #: the most permits of the pool that can be free at once
    keep: int  #: the number of the most urgent tasks that are kept when others are dropped
    #: Whether the pool had run out of permits. Then tasks are parked without a request. The next requests are those of
    #: the parked tasks that try again.
    is_blocked: bool = True
    #: The latest time at which some parked tasks try again (monotonic seconds). A report of a free permit lets them try
    #: earlier.
    retry_at: float = inf
    #: The time of the next search for dead runs that hold permits (monotonic seconds); None: no search is needed.
    reclaim_at: float | None = None
    #: The number of requests in a row that found no free permit.
    refusals: int = 0
    #: The rank of each parked task. The key is the task's id.
    tasks: dict[str, Rank] = field(default_factory=dict)
    #: Whether more tasks of the pool wait in the database than this worker knows.
    has_more: bool = False

    @property
    def wants_scan(self) -> bool:
        """Whether a scan should find more tasks of the pool: soon more permits may be free than tasks are known."""
        is_soon = not self.is_blocked or self.retry_at < monotonic() + _SOON
        return self.has_more and is_soon and len(self.tasks) < self.width

    def park(self, task_id: str, rank: Rank) -> None:
        """Park a task. If too many tasks are parked, keep only the most urgent."""
        self.tasks[task_id] = rank
        if len(self.tasks) > 2 * self.keep:
            self.tasks = dict(self._most_urgent(self.keep))
            self.has_more = True

    def take_most_urgent(self) -> list[str]:
        """Remove and return the most urgent tasks: one more than the pool has permits.

        If the other tasks take all permits, the additional task is refused. The refusal blocks the pool again.
        """
        gone = [task_id for task_id, _ in self._most_urgent(self.width + 1)]
        for task_id in gone:
            del self.tasks[task_id]
        return gone

    def _most_urgent(self, count: int) -> list[tuple[str, Rank]]:
        return heapq.nsmallest(count, self.tasks.items(), key=itemgetter(1))
