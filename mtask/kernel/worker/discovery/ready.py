"""The tasks in the preemption queue, and what holds those of them that are ready.

Ready tasks of one kind are in their order: interrupted ones first, then by priority, then by time.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from math import inf
from typing import Protocol

#: `STAGGER`: the delay of the worker that ranks second for a task, in seconds. `MAX_STAGGER`: the delay of workers that
#: rank lower. The first worker that claims gets the task. The change stream tells the other workers.
STAGGER = 0.02
MAX_STAGGER = 0.06
#: A task for which another worker ranks first is sorted as if it became due later by this time, in seconds. So such a
#: task still gets its turn if the other worker is full.
PREFERENCE = 2.0
#: The same for a task for which this worker ranks third or lower, as a multiple. When the first worker is slow, those
#: that help it thus begin with different tasks.
_LESS_PREFERRED = 1.5

#: The order of tasks: whether it was not interrupted, its priority, negated, and its time.
Order = tuple[bool, int, float]
#: A bound behind all tasks.
ALL: Order = (True, 2**63, inf)
#: A queue whose tenants take turns, and a tenant of it. The tasks of no tenant count as those of one more tenant, whose
#: name is empty.
Lane = tuple[str, str]


@dataclass(slots=True)
class Entry:
    """A task that may be due at `due` (monotonic seconds)."""

    task_id: str
    name: str
    priority: int
    due: float
    rank: int
    #: Whether a worker has begun the task. When such a task is due, a lease has lapsed, or the task wants further
    #: workers.
    is_begun: bool = False
    #: Whether the task wants one worker, names no worker and was never begun, as far as this worker knows.
    is_simple: bool = False
    queue: str | None = None  #: None: unknown
    tenant: str | None = None  #: None: of no tenant, or unknown
    lane: Lane | None = None  #: if the tenants of the queue take turns
    kind: int = 0  #: the number of its place in `_ready`, and of the count, once it is ready
    is_ready: bool = False  #: `ready_at` has passed, and `_ready_cnt` counts this entry
    is_dropped: bool = False
    limit_key: str | None = None
    moment: float = 0.0  #: the stored next_preempt_time, in seconds; it orders the tasks
    is_gated: bool = False  #: whether the task may have to wait at the gate
    is_lapsed: bool = False  #: whether a run of the task has lapsed, and is not closed yet

    @property
    def is_isolated(self) -> bool:
        """Whether the task runs in an executor."""
        return self.kind > 1

    @property
    def ready_at(self) -> float:
        """The time at which this worker tries to claim the task (monotonic seconds)."""
        # A begun task gets no delay here, because `Inbox` has already delayed the lookup of the task by its rank.
        if self.is_begun or self.rank == 0:
            return self.due
        return self.due + (STAGGER if self.rank == 1 else MAX_STAGGER)

    @property
    def order(self) -> Order:
        """The sort key: interrupted tasks first, then the highest priority, then the earliest preemption time.

        Interrupted tasks go before new tasks, so that the tasks of a dead worker are rescued before new tasks start.
        The order of gated tasks is the same in all workers.
        """
        if self.rank == 0 or self.is_gated:
            return (not self.is_begun, -self.priority, self.moment)
        later = PREFERENCE if self.rank == 1 else PREFERENCE * _LESS_PREFERRED
        return (not self.is_begun, -self.priority, self.moment + later)


class Source(Protocol):
    """A source of ready tasks: those of one kind, the tenants that take turns, or those that wait at the gate."""

    def head(self, now: float, /) -> Entry | None:
        """Return the task that it offers next, or None."""

    def pop(self, entry: Entry, /) -> None:
        """Remove the task that `head` has returned."""


class Parking(Source, Protocol):
    """The ready tasks that wait at the gate. It offers those that may pass now."""

    item_cnt: int
    dismiss: Callable[[Entry], None]  #: the queue sets it

    def push(self, entry: Entry, sequence: int, /) -> bool:
        """Add a ready task. Return False if it is not kept."""

    def forget(self, entry: Entry, /) -> None:
        """Note that a ready task is gone."""

    def cut(self, entry: Entry, /) -> None:
        """Note that a ready task was dropped for lack of room."""

    def entries(self) -> Iterator[Entry]:
        """Yield all ready tasks."""

    def clear_dropped(self) -> None:
        """Remove what was dropped."""

    def leave_out_isolated(self, *, leaves_out: bool) -> None:
        """Offer no tasks of isolated handlers, or offer them again."""

    @property
    def has_isolated(self) -> bool:
        """Whether tasks of isolated handlers may pass now."""


class Lanes(Source, Protocol):
    """The ready tasks of queues whose tenants take turns."""

    item_cnt: int

    def push(self, entry: Entry, sequence: int, /) -> None:
        """Add a ready task of a lane."""

    def entries(self) -> Iterator[Entry]:
        """Yield all ready tasks."""

    def clear_dropped(self) -> None:
        """Remove what was dropped."""


#: The order, the number of the push, and the entry. No two items have the same number, so entries are not compared.
Item = tuple[Order, int, Entry]


class Ready:
    """Ready tasks in their order.

    A scan brings its tasks in this order already. So a task that comes after all others is added to the end of a row,
    and only the others are put into a heap. To take the first of a row costs a fraction of what a heap costs.
    """

    def __init__(self) -> None:
        self._row: deque[Item] = deque()
        self._heap: list[Item] = []

    def __len__(self) -> int:
        """Return the number of tasks, with those that were dropped and are still here."""
        return len(self._row) + len(self._heap)

    def __iter__(self) -> Iterator[Item]:
        """Yield the items of tasks that were not dropped, in no order."""
        return (item for item in chain(self._row, self._heap) if not item[2].is_dropped)

    def push(self, entry: Entry, sequence: int) -> None:
        """Add a task. `sequence` decides between tasks of equal order: the smaller one goes first."""
        item = (entry.order, sequence, entry)
        row = self._row
        if not row or row[-1] < item:
            row.append(item)
        else:
            heapq.heappush(self._heap, item)

    def first(self) -> Item | None:
        """Return the first item, or None. Dropped items before it are removed."""
        row, heap = self._row, self._heap
        while row and row[0][2].is_dropped:
            row.popleft()
        while heap and heap[0][2].is_dropped:
            heapq.heappop(heap)
        if heap and (not row or heap[0] < row[0]):
            return heap[0]
        return row[0] if row else None

    def head(self, _: float) -> Entry | None:
        """Return the first task, or None. The time plays no part: see `Turns.head`."""
        item = self.first()
        return None if item is None else item[2]

    def pop(self, entry: Entry) -> None:
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
