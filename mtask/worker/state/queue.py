"""The preemption queue: orders the tasks that this worker may try to claim.

The entries are hints. If an entry is lost, a scan finds its task.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Protocol

#: `STAGGER`: the delay of the worker that ranks second for a task, in seconds. `MAX_STAGGER`: the delay of workers that
#: rank lower. The first worker that claims gets the task. The change stream tells the other workers.
STAGGER = 0.02
MAX_STAGGER = 0.06
#: A task for which another worker ranks first is sorted as if it became due later by this time, in seconds. So such a
#: task still gets its turn if the other worker is full.
PREFERENCE = 2.0
#: The difference below which two times count as equal, in seconds. Each reading of the server's clock moves times a
#: little.
_SAME_TIME = 0.002
#: If the heaps hold more items than twice the number of tasks plus this number, dropped items are removed from the
#: heaps.
_MAX_DROPPED = 1_000


_Ready = list[tuple[tuple[int, bool, float], int, "Entry"]]


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
    is_ready: bool = False  #: `ready_at` has passed, and `_ready_cnt` counts this entry
    is_dropped: bool = False

    @property
    def ready_at(self) -> float:
        """The time at which this worker tries to claim the task (monotonic seconds)."""
        # A begun task gets no delay here, because `Inbox` has already delayed the lookup of the task by its rank.
        if self.is_begun or self.rank == 0:
            return self.due
        return self.due + (STAGGER if self.rank == 1 else MAX_STAGGER)

    @property
    def order(self) -> tuple[int, bool, float]:
        """The sort key: the highest priority first, then begun tasks, then the task that has been due longest.

        Begun tasks go before new tasks, so that the tasks of a dead worker are rescued before new tasks start.
        """
        return (-self.priority, not self.is_begun, self.due + (PREFERENCE if self.rank > 0 else 0.0))


class IsolatedRoom(Protocol):
    """The room for isolated handlers: they run in executors, and a worker has few of these."""

    def isolates(self, name: str) -> bool:
        """Whether tasks of this name run in executors."""

    def count(self) -> int:
        """Return the number of such tasks that the worker should claim now."""


def _is_never_limited(_: str | None) -> bool:
    return False


class PreemptionQueue:
    """A priority queue of tasks. Its length is bounded: beyond the capacity, it drops the tasks that are due last."""

    def __init__(
        self,
        capacity: int,
        clock: Callable[[], float] = time.monotonic,
        *,
        is_limited: Callable[[str | None], bool] = _is_never_limited,
        isolated: IsolatedRoom | None = None,
    ) -> None:
        """`is_limited` tells whether a task of a queue may need a permit. Its argument is None for an unknown queue.

        `isolated`: the room for isolated handlers, if the app has some. Their tasks stay here while there is no room.
        """
        self.capacity = capacity
        self._clock = clock
        self._is_limited = is_limited
        #: Whether tasks were dropped, or a scan was cut short. If so, a new scan is due once this queue has drained.
        self.has_more = False
        self._entries: dict[str, Entry] = {}
        self._waiting: list[tuple[float, int, Entry]] = []
        self._isolated = isolated
        self._room = 0
        #: Two heaps: the ready tasks for which this worker ranks first, and all other ready tasks. Two more such heaps
        #: follow if the app has isolated handlers, for their tasks. `take` returns tasks from only one heap.
        self._ready: tuple[_Ready, ...] = ([], []) if isolated is None else ([], [], [], [])
        self._sequence = 0
        #: The number of ready tasks for which this worker ranks first, and the number of all other ready tasks.
        self._ready_cnt = [0, 0]

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, task_id: object) -> bool:
        return task_id in self._entries

    def ready_count(self, now: float, *, own_only: bool = False) -> int:
        """Return the number of ready tasks; `own_only`: only those for which this worker ranks first."""
        self._promote(now)
        return self._ready_cnt[0] if own_only else sum(self._ready_cnt)

    def push(
        self,
        task_id: str,
        name: str,
        priority: int,
        due: float,
        rank: int,
        *,
        is_begun: bool = False,
        is_simple: bool = False,
        queue: str | None = None,
    ) -> None:
        """Add a task that is due at `due` (monotonic seconds). This replaces an earlier entry of the task."""
        old = self._entries.get(task_id)
        if old is not None:
            is_same = (old.priority, old.rank, old.is_begun, old.queue) == (priority, rank, is_begun, queue)
            if is_same and abs(old.due - due) < _SAME_TIME:
                return
            self._forget(old)
        entry = Entry(task_id, name, priority, due, rank, is_begun, is_simple, queue)
        self._entries[task_id] = entry
        self._sequence += 1
        heapq.heappush(self._waiting, (entry.ready_at, self._sequence, entry))
        if len(self._entries) > self.capacity + self.capacity // 4:
            self._shrink()
        elif self._item_count() > 2 * len(self._entries) + _MAX_DROPPED:
            self._clear_dropped()

    def move(self, task_id: str, due: float, *, is_begun: bool | None = None) -> bool:
        """Change the due time of a task to `due` (monotonic seconds). If `is_begun` is given, change it, too.

        Return whether the queue holds the task.
        """
        entry = self._entries.get(task_id)
        if entry is None:
            return False
        is_begun = entry.is_begun if is_begun is None else is_begun
        self.push(task_id, entry.name, entry.priority, due, entry.rank, is_begun=is_begun, queue=entry.queue)
        return True

    def discard(self, task_id: str) -> None:
        """Drop a task, if it is queued."""
        entry = self._entries.get(task_id)
        if entry is not None:
            self._forget(entry)

    def take(self, limit: int, now: float) -> list[Entry]:
        """Remove and return at most `limit` ready tasks, the highest priority first.

        The returned tasks are all of one kind. They agree in three things: whether this worker ranks first for them,
        whether they are begun, and whether their queues are limited. So a task of another kind may have to wait,
        although it has the same priority and has been due for longer.
        """
        self._promote(now)
        self._look_at_room()
        heap, *others = self._by_head()
        first = _head(heap)
        rival = min(filter(None, map(_head, others)), key=_order, default=None)
        if self._isolated is not None and first is not None and self._isolated.isolates(first.name):
            limit = min(limit, self._room)
        taken: list[Entry] = []
        while first is not None and len(taken) < limit:
            entry = _head(heap)
            if entry is None or entry.is_begun != first.is_begun:
                break
            if rival is not None and rival.order[:2] < entry.order[:2]:
                break
            if self._is_limited(entry.queue) != self._is_limited(first.queue):
                break
            heapq.heappop(heap)
            self._forget(entry)
            taken.append(entry)
        return taken

    def next_ready(self, now: float) -> float | None:
        """Return the seconds until the next task is ready; 0: a task is ready now; None: the queue is empty."""
        self._promote(now)
        self._look_at_room()
        if _head(self._by_head()[0]) is not None:
            return 0.0
        while self._waiting and self._waiting[0][2].is_dropped:
            heapq.heappop(self._waiting)
        return max(0.0, self._waiting[0][0] - now) if self._waiting else None

    @property
    def is_limited_next(self) -> bool:
        """Whether the queue of the next task is limited. Read this only right after `next_ready` has returned 0."""
        entry = _head(self._by_head()[0])
        return entry is not None and self._is_limited(entry.queue)

    @property
    def is_rescue_next(self) -> bool:
        """Whether the next task was begun by a worker. Read this only right after `next_ready` has returned 0."""
        entry = _head(self._by_head()[0])
        return entry is not None and entry.is_begun

    def rerank(self, ranks: Iterable[tuple[str, int]]) -> None:
        """Change the ranks of these tasks, after workers came or went."""
        for task_id, rank in list(ranks):
            entry = self._entries.get(task_id)
            if entry is not None and entry.rank != rank:
                self.push(
                    task_id,
                    entry.name,
                    entry.priority,
                    entry.due,
                    rank,
                    is_begun=entry.is_begun,
                    is_simple=entry.is_simple,
                    queue=entry.queue,
                )

    def names(self) -> list[tuple[str, str]]:
        """Return the id and the name of each task."""
        return [(entry.task_id, entry.name) for entry in self._entries.values()]

    def _promote(self, now: float) -> None:
        while self._waiting and self._waiting[0][0] <= now:
            _, sequence, entry = heapq.heappop(self._waiting)
            if not entry.is_dropped:
                entry.is_ready = True
                self._ready_cnt[entry.rank > 0] += 1
                heapq.heappush(self._ready[self._heap_of(entry)], (entry.order, sequence, entry))

    def _heap_of(self, entry: Entry) -> int:
        is_isolated = self._isolated is not None and self._isolated.isolates(entry.name)
        return (entry.rank > 0) + 2 * is_isolated

    def _by_head(self) -> Sequence[_Ready]:
        """Return the heaps of ready tasks. The heap that holds the next task comes first.

        The tasks of isolated handlers are left out while there is no room for them.
        """
        own, rest = self._ready[:2]
        if self._room > 0:
            return sorted(self._ready, key=lambda heap: (0, heap[0]) if _head(heap) is not None else (1,))
        is_rest_first = _head(rest) is not None and (_head(own) is None or rest[0] < own[0])
        return (rest, own) if is_rest_first else (own, rest)

    def _look_at_room(self) -> None:
        """Note the room for isolated handlers, if some of their tasks are ready."""
        if self._isolated is not None:
            is_wanted = any(_head(heap) is not None for heap in self._ready[2:])
            self._room = self._isolated.count() if is_wanted else 0

    def _forget(self, entry: Entry) -> None:
        entry.is_dropped = True
        self._ready_cnt[entry.rank > 0] -= entry.is_ready
        del self._entries[entry.task_id]

    def _shrink(self) -> None:
        self._promote(self._clock())
        # Ready tasks are kept first, in their order. After them, the tasks that become due soonest are kept.
        ready = [item[2] for item in sorted(chain(*self._ready)) if not item[2].is_dropped]
        waiting = [item[2] for item in sorted(self._waiting) if not item[2].is_dropped]
        for entry in [*ready, *waiting][self.capacity :]:
            self._forget(entry)
        self.has_more = True
        self._clear_dropped()

    def _item_count(self) -> int:
        return len(self._waiting) + sum(map(len, self._ready))

    def _clear_dropped(self) -> None:
        self._waiting = [item for item in self._waiting if not item[2].is_dropped]
        heapq.heapify(self._waiting)
        for heap in self._ready:
            heap[:] = [item for item in heap if not item[2].is_dropped]
            heapq.heapify(heap)


def _order(entry: Entry) -> tuple[int, bool, float]:
    return entry.order


def _head(heap: _Ready) -> Entry | None:
    """Return the first task of a heap, or None. Dropped items before it are removed."""
    while heap and heap[0][2].is_dropped:
        heapq.heappop(heap)
    return heap[0][2] if heap else None
