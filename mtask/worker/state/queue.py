"""The preemption queue: which task to try next, and when. It holds hints; losing one costs a scan, not a task."""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

#: How long the worker that ranks second for a task lets the first go first, and the others these two, in seconds.
STAGGER = 0.02
MAX_STAGGER = 0.06
#: By how much longer a task must be due, in seconds, to go before one that this worker ranks first for. Age ends the
#: preference: what nobody ranks first for, or only a worker that is full, is not left behind.
PREFERENCE = 2.0
#: A time that differs by less, in seconds, is the same: each reading of the server's clock moves it a little.
_SAME_TIME = 0.002
#: The heaps are cleared of what was dropped when they hold this many items more than twice the tasks.
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
    #: Some worker has begun it: its lease has lapsed, or it wants further workers.
    is_begun: bool = False
    #: It wants one worker, whoever it is, and nobody has begun it, as far as is known.
    is_simple: bool = False
    queue: str | None = None  #: where it is known
    is_ready: bool = False  #: its time has come, and it is counted so
    is_dropped: bool = False

    @property
    def ready_at(self) -> float:
        """When this worker tries it."""
        # What was begun has been looked at, and later the more workers rank before this one: see `Hints`.
        if self.is_begun or self.rank == 0:
            return self.due
        return self.due + (STAGGER if self.rank == 1 else MAX_STAGGER)

    @property
    def order(self) -> tuple[int, bool, float]:
        """Highest priority first, then what was begun: a dead worker's tasks are rescued before new ones are taken up.
        Then the longest due; with a head start for those that this worker ranks first for."""
        return (-self.priority, not self.is_begun, self.due + (PREFERENCE if self.rank > 0 else 0.0))


def _is_never_limited(_: str | None) -> bool:
    return False


class PreemptionQueue:
    """A bounded priority queue of preemption times. Beyond its capacity it drops what is due last."""

    def __init__(
        self,
        capacity: int,
        clock: Callable[[], float] = time.monotonic,
        *,
        is_limited: Callable[[str | None], bool] = _is_never_limited,
    ) -> None:
        """`is_limited` tells whether a task of this queue may need a permit; None: of an unknown queue."""
        self.capacity = capacity
        self._clock = clock
        self._is_limited = is_limited
        #: Something was dropped, or a scan was cut short: scan again once this has drained.
        self.has_more = False
        self._entries: dict[str, Entry] = {}
        self._waiting: list[tuple[float, int, Entry]] = []
        #: What this worker ranks first for, and the rest. Where the two interleave, each still makes groups.
        self._ready: tuple[_Ready, _Ready] = ([], [])
        self._sequence = 0
        #: How many are ready: of what this worker ranks first for, and of the rest.
        self._ready_cnt = [0, 0]

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, task_id: object) -> bool:
        return task_id in self._entries

    def ready_count(self, now: float, *, own_only: bool = False) -> int:
        """Return of how many tasks the time has come; `own_only`: of those that this worker ranks first for."""
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
        """Add a task, or move the one that is there."""
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
        """Change when a task is due and, where given, whether it was begun; return whether it was there."""
        entry = self._entries.get(task_id)
        if entry is None:
            return False
        is_begun = entry.is_begun if is_begun is None else is_begun
        self.push(task_id, entry.name, entry.priority, due, entry.rank, is_begun=is_begun, queue=entry.queue)
        return True

    def discard(self, task_id: str) -> None:
        """Drop a task, if it is there."""
        entry = self._entries.get(task_id)
        if entry is not None:
            self._forget(entry)

    def take(self, limit: int, now: float) -> list[Entry]:
        """Remove and return at most `limit` tasks whose time has come, highest priority first.

        They are all alike: this worker ranks first for them or others do, some worker has begun them or none has, and
        their queues are limited or none is.
        Such a group may leave behind what has been due for longer, of the same priority and of the other kind.
        """
        self._promote(now)
        heap, other = self._by_head()
        first, rival = _head(heap), _head(other)
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
        """Return the seconds until a task's time comes: 0 if it has, None if the queue is empty."""
        self._promote(now)
        if _head(self._by_head()[0]) is not None:
            return 0.0
        while self._waiting and self._waiting[0][2].is_dropped:
            heapq.heappop(self._waiting)
        return max(0.0, self._waiting[0][0] - now) if self._waiting else None

    @property
    def is_limited_next(self) -> bool:
        """Whether the queue of the task to take next is limited; asked right after `next_ready` has said 0."""
        entry = _head(self._by_head()[0])
        return entry is not None and self._is_limited(entry.queue)

    @property
    def is_rescue_next(self) -> bool:
        """Whether the task to take next was begun by some worker; asked right after `next_ready` has said 0."""
        entry = _head(self._by_head()[0])
        return entry is not None and entry.is_begun

    def rerank(self, ranks: Iterable[tuple[str, int]]) -> None:
        """Take new ranks after workers came or went."""
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
        """Return id and name of every entry."""
        return [(entry.task_id, entry.name) for entry in self._entries.values()]

    def _promote(self, now: float) -> None:
        while self._waiting and self._waiting[0][0] <= now:
            _, sequence, entry = heapq.heappop(self._waiting)
            if not entry.is_dropped:
                entry.is_ready = True
                self._ready_cnt[entry.rank > 0] += 1
                heapq.heappush(self._ready[entry.rank > 0], (entry.order, sequence, entry))

    def _by_head(self) -> tuple[_Ready, _Ready]:
        """Return what is ready: first the heap with the task that comes first."""
        own, rest = self._ready
        is_rest_first = _head(rest) is not None and (_head(own) is None or rest[0] < own[0])
        return (rest, own) if is_rest_first else (own, rest)

    def _forget(self, entry: Entry) -> None:
        entry.is_dropped = True
        self._ready_cnt[entry.rank > 0] -= entry.is_ready
        del self._entries[entry.task_id]

    def _shrink(self) -> None:
        self._promote(self._clock())
        # Ready entries go by their order, and the others come after them, the soonest first.
        ready = [item[2] for item in sorted([*self._ready[0], *self._ready[1]]) if not item[2].is_dropped]
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


def _head(heap: _Ready) -> Entry | None:
    """Return the first task of a heap, after clearing away what was dropped."""
    while heap and heap[0][2].is_dropped:
        heapq.heappop(heap)
    return heap[0][2] if heap else None
