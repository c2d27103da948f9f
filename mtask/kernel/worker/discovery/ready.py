"""Ready tasks of one kind, in their order: interrupted ones first, then by priority, then by time."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator
from itertools import chain
from typing import Generic, Protocol, TypeVar

_Order = tuple[bool, int, float]


class Ordered(Protocol):
    """The part of an entry of the preemption queue that its order needs."""

    is_dropped: bool

    @property
    def order(self) -> _Order:
        """The sort key."""


E = TypeVar("E", bound=Ordered)
#: The order, the number of the push, and the entry. No two items have the same number, so entries are not compared.
Item = tuple[_Order, int, E]


class Ready(Generic[E]):
    """Ready tasks in their order.

    A scan brings its tasks in this order already. So a task that comes after all others is added to the end of a row,
    and only the others are put into a heap. To take the first of a row costs a fraction of what a heap costs.
    """

    def __init__(self) -> None:
        self._row: deque[Item[E]] = deque()
        self._heap: list[Item[E]] = []

    def __len__(self) -> int:
        """Return the number of tasks, with those that were dropped and are still here."""
        return len(self._row) + len(self._heap)

    def __iter__(self) -> Iterator[Item[E]]:
        """Yield the items of tasks that were not dropped, in no order."""
        return (item for item in chain(self._row, self._heap) if not item[2].is_dropped)

    def push(self, entry: E, sequence: int) -> None:
        """Add a task. `sequence` decides between tasks of equal order: the smaller one goes first."""
        item = (entry.order, sequence, entry)
        row = self._row
        if not row or row[-1] < item:
            row.append(item)
        else:
            heapq.heappush(self._heap, item)

    def first(self) -> Item[E] | None:
        """Return the first item, or None. Dropped items before it are removed."""
        row, heap = self._row, self._heap
        while row and row[0][2].is_dropped:
            row.popleft()
        while heap and heap[0][2].is_dropped:
            heapq.heappop(heap)
        if heap and (not row or heap[0] < row[0]):
            return heap[0]
        return row[0] if row else None

    def head(self, _: float) -> E | None:
        """Return the first task, or None. The time plays no part: see `Turns.head`."""
        item = self.first()
        return None if item is None else item[2]

    def pop(self, entry: E) -> None:
        """Remove the task that `head` has returned."""
        if self._row and self._row[0][2] is entry:
            self._row.popleft()
        else:
            heapq.heappop(self._heap)

    def clear_dropped(self) -> None:
        """Remove what was dropped."""
        self._row = deque(item for item in self._row if not item[2].is_dropped)
        self._heap = [item for item in self._heap if not item[2].is_dropped]
        heapq.heapify(self._heap)
