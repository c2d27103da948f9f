"""Parked tasks: the tasks that wait in this worker for permits of one pool."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from math import inf
from operator import itemgetter
from time import monotonic

#: For a blocked pool, a scan for further tasks is worth it only if the pool will be tried again within this time, in
#: seconds.
_SOON = 2.0
#: The order of parked tasks: the highest priority first, then the longest due.
Rank = tuple[int, float]


@dataclass(slots=True)
class ParkedTasks:
    """The tasks that wait for permits of one pool.

    The pool had no free permit, or more urgent tasks are requesting permits now.
    """

    width: int  #: the largest number of permits that can be free
    keep: int  #: the number of the most urgent tasks that are kept at least
    #: The pool had no free permit. No task requests one until some parked tasks try again.
    is_blocked: bool = True
    #: The time at which some tasks try again, if no free permit is reported before (monotonic seconds).
    retry_at: float = inf
    #: The time to look for dead runs that hold permits (monotonic seconds); None: the pool was not found crowded.
    reclaim_at: float | None = None
    #: The number of requests in a row that found no free permit.
    refusals: int = 0
    #: The tasks and their order.
    tasks: dict[str, Rank] = field(default_factory=dict)
    #: More tasks wait in the database than this worker knows.
    has_more: bool = False

    @property
    def wants_scan(self) -> bool:
        """Whether a scan should find more tasks of the pool: the known tasks may soon be fewer than free permits."""
        is_soon = not self.is_blocked or self.retry_at < monotonic() + _SOON
        return self.has_more and is_soon and len(self.tasks) < self.width

    def park(self, task_id: str, rank: Rank) -> None:
        """Park a task. If there are too many, only the most urgent are kept."""
        self.tasks[task_id] = rank
        if len(self.tasks) > 2 * self.keep:
            self.tasks = dict(self._most_urgent(self.keep))
            self.has_more = True

    def take_most_urgent(self) -> list[str]:
        """Remove and return the most urgent tasks: one more than the pool has permits.

        If the others take all permits, the last task is refused, and its refusal blocks the pool again.
        """
        gone = [task_id for task_id, _ in self._most_urgent(self.width + 1)]
        for task_id in gone:
            del self.tasks[task_id]
        return gone

    def _most_urgent(self, count: int) -> list[tuple[str, Rank]]:
        return heapq.nsmallest(count, self.tasks.items(), key=itemgetter(1))
