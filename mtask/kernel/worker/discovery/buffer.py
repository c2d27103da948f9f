"""The preemption queue: orders the tasks that this worker may try to claim.

The entries are hints. If an entry is lost, a scan finds its task.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, islice
from typing import Protocol

from mtask.kernel.worker.discovery.ready import PREFERENCE, Entry, Lane, Lanes, Order, Parking, Ready, Source
from mtask.kernel.worker.process.state import Served

#: The difference below which two times count as equal, in seconds. Each reading of the server's clock moves times a
#: little.
_SAME_TIME = 0.002
#: If more items are here than twice the number of tasks plus this number, dropped items are removed.
_MAX_DROPPED = 1_000
#: The items are counted after each such number of pushes.
_COUNTED = 64


class IsolatedRoom(Protocol):
    """The room for isolated handlers: they run in executors, and a worker has few of these."""

    @property
    def is_shared(self) -> bool:
        """Whether the worker has other handlers, too."""

    def isolates(self, name: str) -> bool:
        """Whether tasks of this name run in executors."""

    def count(self) -> int:
        """Return the number of such tasks that the worker should claim now."""

    def count_idle(self) -> int:
        """Return the number of such tasks that could begin at once, and have an executor started if it is 0."""


class PreemptionQueue:
    """A priority queue of tasks. Its length is bounded: beyond the capacity, it drops the tasks that are due last."""

    def __init__(
        self,
        capacity: int,
        clock: Callable[[], float] = time.monotonic,
        *,
        parking: Parking | None = None,
        needs_gate: Callable[[Entry], bool] | None = None,
        served: Served | None = None,
        turns: Callable[[float], Lanes] | None = None,
        isolated: IsolatedRoom | None = None,
    ) -> None:
        """`needs_gate` tells whether a task may have to wait at the gate. Then it waits in `parking` when it is ready.

        `served` tells whether any task may, and in which queues tenants take turns; None: none, and in none. `turns`
        makes the lanes of such queues, from `PREFERENCE`.

        `isolated`: the room for isolated handlers, if the app has some. Their tasks stay here while there is no room.
        """
        self.capacity = capacity
        self._clock = clock
        self._needs_gate = needs_gate
        self._parking = parking
        if parking is not None:
            parking.dismiss = self._forget
        #: The number of ready tasks in `_parking`. While it is 0, the gate costs nothing.
        self._gated_cnt = 0
        #: Whether gated tasks are left out for now.
        self.puts_gated_off = False
        self._served = served or Served((), ())
        #: Whether tasks were dropped, or a scan was cut short. If so, a new scan is due once this queue has drained.
        self.has_more = False
        #: Whether more tasks of isolated handlers are due than this queue holds, as far as this worker knows. Used only
        #: beside other handlers.
        self.has_more_isolated = False
        self.is_being_filled = False  #: whether a scan is under way
        self._entries: dict[str, Entry] = {}
        self._waiting: list[tuple[float, int, Entry]] = []
        self._isolated = isolated
        self._room = 0
        self._idle = 0  #: the number of gated tasks of isolated handlers that may be claimed
        #: The ready tasks for which this worker ranks first, and all other ready tasks. If the app has isolated
        #: handlers, their tasks follow, in the same two kinds. `take` returns tasks of only one kind.
        self._ready: tuple[Ready, ...] = tuple(Ready() for _ in range(2 if isolated is None else 4))
        #: The ready tasks of queues with fair turns; and apart from them, those of isolated handlers.
        self._turns: tuple[Lanes, ...] = () if turns is None else tuple(turns(PREFERENCE) for _ in self._ready[::2])
        #: The number of ready tasks in `_turns`. While it is 0, turns cost nothing.
        self._turn_cnt = 0
        self._now = 0.0
        #: The number of tasks that were queued so far. It also numbers them: of equal tasks, the first goes first.
        self.queued_cnt = 0
        #: The number of ready tasks for which this worker ranks first, and the number of all other ready tasks. Two
        #: more such numbers follow for the tasks of isolated handlers.
        self._ready_cnt = [0, 0, 0, 0]
        self._is_shared = isolated is not None and isolated.is_shared

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, task_id: object) -> bool:
        return task_id in self._entries

    def knows_begun(self, task_id: str, moment: float, *, is_lapsed: bool) -> bool:
        """Whether the queue holds this begun task as it is stored: the same preemption time, the same open run or none.

        `moment`: the stored preemption time, in seconds.
        """
        entry = self._entries.get(task_id)
        return entry is not None and entry.is_begun and entry.moment == moment and entry.is_lapsed == is_lapsed

    @property
    def may_have_more(self) -> bool:
        """Whether more tasks may wait than this queue holds."""
        return self.has_more or self.has_more_isolated or self.is_being_filled

    def has_ready(self, now: float) -> bool:
        """Whether some task is ready. It may wait for an executor."""
        self._promote(now)
        return any(self._ready_cnt)

    def ready_count(self, now: float, *, own_only: bool = False) -> int:
        """Return the number of ready tasks; `own_only`: only those for which this worker ranks first.

        Beside other handlers, the tasks of isolated handlers are left out: they may wait long for an executor.
        """
        self._promote(now)
        counts = self._ready_cnt[:2] if self._is_shared else self._ready_cnt
        return sum(counts[::2]) if own_only else sum(counts)

    def isolated_count(self, now: float) -> int:
        """Return the number of ready tasks that `ready_count` leaves out."""
        self._promote(now)
        return sum(self._ready_cnt[2:]) if self._is_shared else 0

    def is_isolated(self, name: str) -> bool:
        """Whether tasks of this name run in executors."""
        return self._isolated is not None and self._isolated.isolates(name)

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
        tenant: str | None = None,
        limit_key: str | None = None,
        moment: float | None = None,
        is_lapsed: bool = False,
    ) -> None:
        """Add a task that is due at `due` (monotonic seconds). This replaces an earlier entry of the task.

        `moment`: the stored preemption time, in seconds, by which tasks are ordered. None: the same as `due`.
        """
        lane = (queue, tenant or "") if queue is not None and queue in self._served.fair_queues else None
        moment = due if moment is None else moment
        old = self._entries.get(task_id)
        if old is not None:
            is_same = (old.priority, old.rank, old.is_begun, old.queue) == (priority, rank, is_begun, queue)
            is_same = is_same and (old.tenant, old.lane, old.limit_key) == (tenant, lane, limit_key)
            if is_same and abs(old.due - due) < _SAME_TIME and old.moment == moment:
                return
            self._forget(old)
        kind = (rank > 0) + 2 * self.is_isolated(name)
        entry = Entry(task_id, name, priority, due, rank, is_begun, is_simple, queue, tenant, lane, kind)
        entry.limit_key, entry.moment, entry.is_lapsed = limit_key, moment, is_lapsed
        if queue is not None and self._served.is_limited and self._needs_gate is not None:
            entry.is_gated = self._needs_gate(entry)
        self._entries[task_id] = entry
        self.queued_cnt += 1
        ready_at = entry.ready_at
        if ready_at <= self._now:
            self._make_ready(entry, self.queued_cnt)
        else:
            heapq.heappush(self._waiting, (ready_at, self.queued_cnt, entry))
        if len(self._entries) > self.capacity + self.capacity // 4:
            self._shrink()
        elif not self.queued_cnt % _COUNTED and self._item_count() > 2 * len(self._entries) + _MAX_DROPPED:
            self._clear_dropped()

    def move(self, task_id: str, due: float, *, is_begun: bool | None = None, moment: float | None = None) -> bool:
        """Change the due time of a task to `due` (monotonic seconds). If `is_begun` is given, change it, too.

        Return whether the queue holds the task.
        """
        entry = self._entries.get(task_id)
        if entry is None:
            return False
        is_begun = entry.is_begun if is_begun is None else is_begun
        self.push(
            task_id,
            entry.name,
            entry.priority,
            due,
            entry.rank,
            is_begun=is_begun,
            queue=entry.queue,
            tenant=entry.tenant,
            limit_key=entry.limit_key,
            moment=moment,
        )
        return True

    def sort_anew(self) -> None:
        """Queue all tasks again. Call this when other tasks need the gate, or take turns."""
        entries = list(self._entries.values())
        for entry in entries:
            self._forget(entry)
        self._clear_dropped()
        for entry in entries:
            self._push_again(entry, entry.rank)

    def _push_again(self, entry: Entry, rank: int) -> None:
        self.push(
            entry.task_id,
            entry.name,
            entry.priority,
            entry.due,
            rank,
            is_begun=entry.is_begun,
            is_simple=entry.is_simple,
            queue=entry.queue,
            tenant=entry.tenant,
            limit_key=entry.limit_key,
            moment=entry.moment,
            is_lapsed=entry.is_lapsed,
        )

    def discard(self, task_id: str) -> None:
        """Drop a task, if it is queued."""
        entry = self._entries.get(task_id)
        if entry is not None:
            self._forget(entry)

    def drop_behind_own(self, *, with_isolated: bool = True) -> None:
        """Drop the new tasks of other workers that are ready, and that come after the next one of this worker's own.

        By the time this worker gets to them, most have been claimed. A scan of all tasks finds the others again.
        `with_isolated`: also those of isolated handlers.
        """
        kinds = self._ready if with_isolated else self._ready[:2]
        for own, others in zip(kinds[::2], kinds[1::2], strict=True):
            head = own.first()
            if head is None:
                continue
            for order, _, entry in others:
                if not entry.is_begun and order > head[0]:
                    self._forget(entry)
        self._clear_dropped()

    def take(self, limit: int, now: float) -> list[Entry]:
        """Remove and return at most `limit` ready tasks, the highest priority first.

        The returned tasks are all of one kind. They agree in three things: whether this worker ranks first for them,
        whether they are begun, and whether they are gated. So a task of another kind may have to wait, although it
        has the same priority and has been due for longer. In a queue with fair turns, they are of one tenant after the
        other.
        """
        self._promote(now)
        self._look_at_room()
        source, *others = self._by_head()
        first = source.head(now)
        rival = min(filter(None, (other.head(now) for other in others)), key=_order, default=None)
        taken: list[Entry] = []
        if first is None:
            return taken
        if first.is_isolated:
            limit = min(limit, self._idle if first.is_gated else self._room)
        kind = (first.is_begun, first.rank > 0, first.is_isolated) if not first.is_gated else first.is_begun
        while len(taken) < limit:
            entry = source.head(now)
            if entry is None:
                break
            its = (entry.is_begun, entry.rank > 0, entry.is_isolated) if not first.is_gated else entry.is_begun
            if its != kind or entry.is_isolated != first.is_isolated:
                break
            if rival is not None and rival.order[:2] < entry.order[:2]:
                break
            source.pop(entry)
            self._forget(entry)
            taken.append(entry)
        return taken

    def next_ready(self, now: float) -> float | None:
        """Return the seconds until the next task is ready; 0: a task is ready now; None: the queue is empty."""
        self._promote(now)
        self._look_at_room()
        if self._first() is not None:
            return 0.0
        return self.next_waiting(now)

    def next_waiting(self, now: float) -> float | None:
        """Return the seconds until a further task becomes ready; None: there is none."""
        self._promote(now)
        while self._waiting and self._waiting[0][2].is_dropped:
            heapq.heappop(self._waiting)
        return self._waiting[0][0] - now if self._waiting else None

    def overdue(self, since: float, limit: int) -> list[str]:
        """Return the ids of at most `limit` ready tasks that nobody has begun, and that were due at `since`."""
        found = (entry for entry in self._entries.values() if entry.is_ready and not entry.is_begun)
        return list(islice((entry.task_id for entry in found if entry.due <= since), limit))

    def next_priority(self, now: float) -> int | None:
        """Return the priority of the next task that is ready; None: no task is ready."""
        self._promote(now)
        entry = self._first()
        return None if entry is None else entry.priority

    def is_own_next(self, now: float, *, past_isolated: bool = False) -> bool:
        """Whether the next ready task is one for which this worker ranks first, and none waits for an executor.

        `past_isolated`: tasks may wait for an executor.
        """
        self._promote(now)
        self._look_at_room()
        if not self._room and self._has_isolated and not past_isolated:
            return False
        entry = self._first()
        return entry is not None and entry.rank == 0

    @property
    def is_gated_next(self) -> bool:
        """Whether the next task is gated. Read this only right after `next_ready` has returned 0."""
        entry = self._first()
        return entry is not None and entry.is_gated

    @property
    def is_rescue_next(self) -> bool:
        """Whether the next task was begun by a worker. Read this only right after `next_ready` has returned 0."""
        entry = self._first()
        return entry is not None and entry.is_begun

    def rerank(self, ranks: Iterable[tuple[str, int]]) -> None:
        """Change the ranks of these tasks, after workers came or went."""
        for task_id, rank in list(ranks):
            entry = self._entries.get(task_id)
            if entry is not None and entry.rank != rank:
                self._push_again(entry, rank)

    def names(self) -> list[tuple[str, str]]:
        """Return the id and the name of each task."""
        return [(entry.task_id, entry.name) for entry in self._entries.values()]

    def _promote(self, now: float) -> None:
        self._now = now
        while self._waiting and self._waiting[0][0] <= now:
            _, sequence, entry = heapq.heappop(self._waiting)
            if not entry.is_dropped:
                self._make_ready(entry, sequence)

    def _make_ready(self, entry: Entry, sequence: int) -> None:
        entry.is_ready = True
        kind = entry.kind
        if entry.is_gated and self._parking is not None:
            if self._parking.push(entry, sequence):
                self._gated_cnt += 1
            else:
                entry.is_dropped = True
                del self._entries[entry.task_id]
            return
        self._ready_cnt[kind] += 1
        if entry.lane is not None:
            self._turn_cnt += 1
            self._turns[kind // 2].push(entry, sequence)
        else:
            self._ready[kind].push(entry, sequence)

    def _first(self) -> Entry | None:
        """Return the ready task that `take` would return first, or None."""
        return self._by_head()[0].head(self._now)

    def _by_head(self) -> Sequence[Source]:
        """Return the sources of ready tasks: each kind, and the turns if any. The one with the next task comes first.

        The tasks of isolated handlers are left out while there is no room for them.
        """
        own, rest = self._ready[:2]
        if self._turn_cnt or self._gated_cnt:
            return self._of_all_sources()
        if self._room > 0:
            return sorted(self._ready, key=lambda ready: (0, item) if (item := ready.first()) is not None else (1,))
        first_own, first_rest = own.first(), rest.first()
        is_rest_first = first_rest is not None and (first_own is None or first_rest < first_own)
        return (rest, own) if is_rest_first else (own, rest)

    def _of_all_sources(self) -> Sequence[Source]:
        count = len(self._ready) if self._room > 0 else 2
        sources: list[Source] = [*self._ready[:count], *self._turns[: count // 2]]
        if self._parking is not None and not self.puts_gated_off:
            sources.append(self._parking)
        heads = [source.head(self._now) for source in sources]
        ranked = sorted(
            range(len(sources)), key=lambda index: (0, head.order) if (head := heads[index]) is not None else (1,)
        )
        return [sources[index] for index in ranked]

    def _look_at_room(self) -> None:
        """Note the room for isolated handlers, if some of their tasks are ready."""
        if self._isolated is None:
            return
        self._room = self._isolated.count() if self._has_isolated else 0
        if self._parking is not None and self._gated_cnt:
            # What has passed the gate must begin at once, and not wait for an executor.
            self._idle = self._isolated.count_idle() if self._parking.has_isolated else 0
            self._parking.leave_out_isolated(leaves_out=self._idle <= 0)

    @property
    def _has_isolated(self) -> bool:
        """Whether tasks of isolated handlers are ready."""
        sources: list[Source] = [*self._ready[2:], *self._turns[1:]]
        return any(source.head(self._now) is not None for source in sources)

    def _forget(self, entry: Entry) -> None:
        entry.is_dropped = True
        if entry.is_ready and entry.is_gated and self._parking is not None:
            self._gated_cnt -= 1
            self._parking.forget(entry)
        elif entry.is_ready:
            self._ready_cnt[entry.kind] -= 1
            self._turn_cnt -= entry.lane is not None
        del self._entries[entry.task_id]

    def _shrink(self) -> None:
        self._promote(self._clock())
        # Ready tasks are kept first, in their order. After them, the tasks that become due soonest are kept.
        ready = [item[2] for item in sorted(chain(*self._ready))]
        waiting = [item[2] for item in sorted(self._waiting) if not item[2].is_dropped]
        free = [entry for entry in waiting if not entry.is_gated]
        turning = self._in_turns(entry for entry in free if entry.lane is not None)
        plain = [*ready, *(entry for entry in free if entry.lane is None)]
        parked = [] if self._parking is None else in_equal_parts(sorted(self._parking.entries(), key=_order))
        gated = [*parked, *(entry for entry in waiting if entry.is_gated)]
        groups = [plain, turning, gated]
        if self._is_shared:
            groups = [[e for e in group if self._is_apart(e) == is_apart] for group in groups for is_apart in (0, 1)]
        # If there are many of each, each keeps an equal part of the room.
        room = self.capacity
        for place, group in enumerate(sorted(groups, key=len)):
            kept = min(len(group), room // (len(groups) - place))
            room -= kept
            for entry in group[kept:]:
                self.has_more_isolated |= self._is_apart(entry)
                if entry.is_gated and entry.is_ready and self._parking is not None:
                    self._parking.cut(entry)
                self._forget(entry)
        self.has_more = True
        self._clear_dropped()

    def _is_apart(self, entry: Entry) -> bool:
        """Whether the task is of an isolated handler beside others."""
        return self._is_shared and entry.kind > 1

    def _in_turns(self, waiting: Iterable[Entry]) -> list[Entry]:
        """Return the tasks of queues with fair turns in the order in which they are kept: equal parts of each tenant.

        So the hints of a tenant that floods its queue push out its own tasks, and no others.
        """
        ready = sorted(chain.from_iterable(turns.entries() for turns in self._turns), key=_order)
        return in_equal_parts([*ready, *waiting])

    def _item_count(self) -> int:
        parked = 0 if self._parking is None else self._parking.item_cnt
        in_turns = sum(turns.item_cnt for turns in self._turns)
        return len(self._waiting) + sum(map(len, self._ready)) + in_turns + parked

    def _clear_dropped(self) -> None:
        self._waiting = [item for item in self._waiting if not item[2].is_dropped]
        heapq.heapify(self._waiting)
        for ready in self._ready:
            ready.clear_dropped()
        for turns in self._turns:
            turns.clear_dropped()
        if self._parking is not None:
            self._parking.clear_dropped()


def in_equal_parts(entries: Iterable[Entry]) -> list[Entry]:
    """Return these tasks, which are in the order in which each tenant's are kept, so that each tenant keeps a part.

    The first of each tenant come first, then the second of each.
    """
    places: dict[Lane | None, int] = {}
    placed: list[tuple[int, int, Entry]] = []
    for index, entry in enumerate(entries):
        place = places.get(entry.lane, 0)
        places[entry.lane] = place + 1
        placed.append((place, index, entry))
    placed.sort(key=lambda item: item[:2])
    return [entry for _, _, entry in placed]


def _order(entry: Entry) -> Order:
    return entry.order
