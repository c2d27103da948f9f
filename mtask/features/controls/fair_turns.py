"""Turns: the ready tasks of queues with fair turns. The tenants of a queue take turns, one task at each turn.

Within one tenant, the highest priority goes first, as in every other queue. Between tenants, neither the priority nor
the age of a task counts: a tenant with a hundred thousand waiting tasks gets as many turns as a tenant with ten.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterator
from itertools import chain

from mtask.kernel.worker.discovery.ready import Entry, Lane, Order

_Heap = list[tuple[Order, int, Entry]]
#: The lanes of one kind, the one whose turn comes first is the first.
_Ring = OrderedDict[Lane, _Heap]


class Turns:
    """The ready tasks of queues with fair turns.

    There are two rings of tenants: one with the tasks for which this worker ranks first, and one with the others. A
    claim takes tasks of one kind only.
    """

    def __init__(self, preference: float) -> None:
        """`preference`: after this time, in seconds, a task of the second ring has its turn like one of the first."""
        self._preference = preference
        self._own: _Ring = OrderedDict()
        self._rest: _Ring = OrderedDict()
        #: The number of the last turn of each lane that is in a ring.
        self._served: dict[Lane, int] = {}
        self._turn = 0
        #: The number of tasks, with those that were dropped and are still here.
        self.item_cnt = 0

    def push(self, entry: Entry, sequence: int) -> None:
        """Add a ready task of a lane."""
        lane = entry.lane
        assert lane is not None
        ring = self._ring_of(entry)
        if lane not in ring:
            ring[lane] = []
            # A tenant that is new here comes after those that wait for their turn.
            self._served.setdefault(lane, self._turn)
        heapq.heappush(ring[lane], (entry.order, sequence, entry))
        self.item_cnt += 1

    def head(self, now: float) -> Entry | None:
        """Return the task whose turn it is, or None."""
        own, rest = self._first(self._own), self._first(self._rest)
        if own is None or rest is None:
            return own if rest is None else rest
        is_late = rest.due + self._preference <= now
        return rest if is_late and self._last_turn(rest) < self._last_turn(own) else own

    def pop(self, entry: Entry) -> None:
        """Remove the task that `head` has returned. The turn passes to the next tenant."""
        lane = entry.lane
        assert lane is not None
        heapq.heappop(self._ring_of(entry)[lane])
        self.item_cnt -= 1
        self._turn += 1
        self._served[lane] = self._turn
        for ring in (self._own, self._rest):
            if lane in ring:
                ring.move_to_end(lane)

    def entries(self) -> Iterator[Entry]:
        """Yield the tasks of all tenants."""
        for heap in chain(self._own.values(), self._rest.values()):
            yield from (item[2] for item in heap if not item[2].is_dropped)

    def clear_dropped(self) -> None:
        """Remove what was dropped."""
        for ring in (self._own, self._rest):
            for lane, heap in list(ring.items()):
                heap[:] = [item for item in heap if not item[2].is_dropped]
                heapq.heapify(heap)
                if not heap:
                    self._leave(ring, lane)
        self.item_cnt = sum(map(len, chain(self._own.values(), self._rest.values())))

    def _ring_of(self, entry: Entry) -> _Ring:
        return self._rest if entry.rank > 0 else self._own

    def _first(self, ring: _Ring) -> Entry | None:
        """Return the first task of the lane whose turn it is in a ring. Lanes without tasks leave the ring."""
        while ring:
            lane, heap = next(iter(ring.items()))
            while heap and heap[0][2].is_dropped:
                heapq.heappop(heap)
                self.item_cnt -= 1
            if heap:
                return heap[0][2]
            self._leave(ring, lane)
        return None

    def _leave(self, ring: _Ring, lane: Lane) -> None:
        del ring[lane]
        if lane not in self._own and lane not in self._rest:
            del self._served[lane]

    def _last_turn(self, entry: Entry) -> int:
        return 0 if entry.lane is None else self._served[entry.lane]
