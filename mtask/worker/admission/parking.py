"""What waits in a worker for one place of a limit."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from math import inf
from operator import itemgetter
from time import monotonic

#: What waits for a place that opens within this, in seconds, is looked for if little of it is known.
_SOON = 2.0
#: What tasks are ordered by: the highest priority first, then what has been due longest.
Rank = tuple[int, float]


@dataclass(slots=True)
class Waiting:
    """What waits here for a place: because it had none free when asked, or behind others that ask for one now."""

    width: int  #: no more than so many places can be free
    most: int  #: so many are kept at least
    is_blocked: bool = True
    #: When some are let go, if nothing was heard of the place before (monotonic seconds).
    until: float = inf
    #: When the dead are to be looked for among those that take it up; None: nobody found it crowded.
    dead_at: float | None = None
    #: How often in a row it had none free.
    refusals: int = 0
    #: Tasks, with what they are ordered by.
    parked: dict[str, Rank] = field(default_factory=dict)
    #: More wait than are known here.
    has_more: bool = False

    @property
    def is_hungry(self) -> bool:
        """Whether a scan should look for more of them, since those that are known may soon be too few."""
        is_soon = not self.is_blocked or self.until < monotonic() + _SOON
        return self.has_more and is_soon and len(self.parked) < self.width

    def park(self, task_id: str, rank: Rank) -> None:
        """Have a task wait; of too many the most urgent are kept."""
        self.parked[task_id] = rank
        if len(self.parked) > 2 * self.most:
            self.parked = dict(self._most_urgent(self.most))
            self.has_more = True

    def let_go(self) -> list[str]:
        """Return the most urgent, and keep them no longer: one more than there can be places, so that it is seen when
        all are taken.
        """
        gone = [task_id for task_id, _ in self._most_urgent(self.width + 1)]
        for task_id in gone:
            del self.parked[task_id]
        return gone

    def _most_urgent(self, count: int) -> list[tuple[str, Rank]]:
        return heapq.nsmallest(count, self.parked.items(), key=itemgetter(1))
