"""Windows: the ready tasks of limited queues, in the order of their ranks. They wait here for permits.

A window is the beginning of the order that the server keeps: a scan has brought it, and the change stream tells of what
is new. Behind its bound, this worker does not know all tasks, so it offers none of them. A limit changes when a task
begins, but not in which order: a task that waits for a permit of its limit_key hides no other one.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from math import inf
from time import monotonic
from typing import NamedTuple

from mtask.features.limits.operations import PermitPool
from mtask.features.limits.pools import KEPT, Lane, Pools
from mtask.kernel.worker.discovery.ready import ALL, Entry, Order

#: The order: interrupted tasks first; then, in a fair queue, the place among the tenant's tasks, and its last turn;
#: then the priority and the time. Of equals, the task_id decides, as on the server.
_Key = tuple[bool, int, int, int, float, str]
#: A task in a row: its order, its task_id, a number, and its entry.
_Item = tuple[Order, str, int, Entry]
#: If fewer tasks than this number wait here in a queue, and more wait in the database, a scan is wanted. It is less
#: where few permits can be free at once.
LOW = 250
#: The most tasks that wait here for permits of limit_keys and tenants, but at least one of each.
_MOST_CLOSED = 1_000
#: The most tenants of which each has a task that asks, if only one permit may be free.
_MOST_TURNS = 10
#: If a pool has no permit before this time, in seconds, no task waits here for it.
SOON = 10.0


class NarrowLane(NamedTuple):
    """A lane that a pool of a limit_key or a tenant keeps waiting."""

    lane: Lane
    pool: PermitPool
    known_cnt: int  #: the number of its tasks that wait here
    priority: int  #: the priority up to which more of its tasks may wait
    is_cut: bool  #: whether more of its tasks wait than are here


@dataclass(slots=True)
class _Row:
    """The ready tasks of one lane."""

    lane: Lane
    is_isolated: bool
    heap: list[_Item] = field(default_factory=list)
    count: int = 0  #: the tasks that were not dropped
    bound: Order = ALL
    #: The number of tasks after the last scan for them; None: nobody has looked since.
    brought: int | None = None
    #: The key by which the row is in `heads` of its window. None: it is not there.
    key: _Key | None = None
    #: The pool that is known to keep these tasks waiting. None: they are offered, or the row is empty.
    closed_by: PermitPool | None = None
    #: The priority up to which more tasks than those here are known to wait.
    level: int | None = None

    def first(self) -> Entry | None:
        while self.heap and self.heap[0][3].is_dropped:
            heapq.heappop(self.heap)
        return self.heap[0][3] if self.heap else None

    def live(self) -> list[_Item]:
        return [item for item in self.heap if not item[3].is_dropped]


@dataclass(slots=True)
class _Window:
    """The rows of one queue."""

    queue: str
    rows: dict[tuple[Lane, bool], _Row] = field(default_factory=dict)
    #: The key of the first task of each row that may be offered. A row has one item whose key is that of the row; its
    #: other items are left over.
    heads: list[tuple[_Key, int, _Row]] = field(default_factory=list)
    bound: Order = ALL
    #: The bounds of those tenants of a fair queue of which scans have brought a part of the tasks.
    bounds: Mapping[str | None, Order] = field(default_factory=dict)
    #: Whether more tasks of the queue wait than scans have brought.
    is_cut: bool = False
    #: The number of tasks that no narrow pool kept waiting after the last scan; None: nobody has looked since.
    brought: int | None = None


class Windows:
    """The ready tasks of limited queues. `PreemptionQueue` holds their entries, and takes what is offered here."""

    def __init__(self, pools: Pools) -> None:
        self._pools = pools
        self._windows: dict[str, _Window] = {}
        self._closed: dict[PermitPool, list[_Row]] = {}
        #: Drops a task. The queue sets it.
        self.dismiss: Callable[[Entry], None] = self.forget
        #: Tasks with a lapsed run. Their own permits serve them again, so they ask also while their pools are full.
        self._lapsed: deque[Entry] = deque()
        self._sequence = 0
        #: Whether tasks of isolated handlers are left out, as no executor is free.
        self._skips_isolated = False
        self._skipped: list[_Row] = []
        self.item_cnt = 0  #: the number of tasks, with those that were dropped and are still here

    # --- as a source of the preemption queue ----------------------------------------------------------------

    def push(self, entry: Entry, sequence: int) -> bool:
        """Add a ready task. Return False if it lies behind the bound: a later scan brings it."""
        assert entry.queue is not None
        window = self._window(entry.queue)
        lane = lane_of(entry)
        row = window.rows.get((lane, entry.is_isolated))
        if row is None:
            bound = window.bounds.get(lane.tenant, window.bound)
            row = window.rows[lane, entry.is_isolated] = _Row(lane, entry.is_isolated, bound=bound)
        if not entry.is_begun and (entry.order > row.bound or self._is_beyond_need(row, entry)):
            row.bound = min(row.bound, entry.order)
            return False
        heapq.heappush(row.heap, (entry.order, entry.task_id, sequence, entry))
        row.count += 1
        self.item_cnt += 1
        if entry.is_lapsed:
            self._lapsed.append(entry)
        if row.heap[0][3] is entry:
            self._offer(window, row)
        self._pools.arrived(lane, entry.task_id, entry.order)
        return True

    def _is_beyond_need(self, row: _Row, entry: Entry) -> bool:
        """Whether enough better tasks wait for permits of a limit_key or a tenant. A flood of these takes no room."""
        kept = self._kept(row)
        if row.count < 2 * kept or (kept and entry.order < max(row.live())[0]):
            return False
        row.level = entry.priority if row.level is None else max(entry.priority, row.level)
        return True

    def _kept(self, row: _Row) -> float:
        """Return the number of waiting tasks of a row that are kept. All are kept while no narrow pool is closed."""
        pool = row.closed_by
        if pool is None or pool == PermitPool(row.lane.queue):
            return inf
        if self._pools.retry_at(pool) > monotonic() + SOON:
            return 0
        return max(1, min(self._pools.kept(pool), _MOST_CLOSED // len(self._closed)))

    def _trim(self, row: _Row) -> None:
        """Drop waiting tasks of a row that has no permits: a scan brings them again when there may be some."""
        kept = self._kept(row)
        if row.count <= 2 * kept:
            return
        gone = sorted(row.live())[int(kept) :]
        row.bound, row.level = min(row.bound, gone[0][0]), max(item[3].priority for item in gone)
        for item in gone:
            self.dismiss(item[3])

    def head(self, _: float) -> Entry | None:
        """Return the first task that may ask for its permits, or None."""
        while self._lapsed and self._lapsed[0].is_dropped:
            self._lapsed.popleft()
        if self._lapsed and not (self._skips_isolated and self._lapsed[0].is_isolated):
            return self._lapsed[0]
        return min(filter(None, map(self._first_of, self._windows.values())), key=_order, default=None)

    def pop(self, entry: Entry) -> None:
        """Remove the task that `head` has returned. It asks for its permits next."""
        assert entry.queue is not None
        window, lane = self._windows[entry.queue], lane_of(entry)
        row = window.rows[lane, entry.is_isolated]
        if self._lapsed and self._lapsed[0] is entry:
            self._lapsed.popleft()  # its item in the heap counts as dropped from now on
        else:
            heapq.heappop(row.heap)
            self.item_cnt -= 1
        self._pools.pick(lane, entry.order)
        if self._pools.is_fair(lane.queue):
            self._pools.count_turn(lane.queue, lane.tenant)
        # The item of the row moves back when it is looked at: no key has become smaller.

    def forget(self, entry: Entry) -> None:
        """Count a ready task less. It is dropped, or was popped."""
        assert entry.queue is not None
        window, place = self._windows[entry.queue], (lane_of(entry), entry.is_isolated)
        row = window.rows[place]
        row.count -= 1
        if not row.count and row.closed_by is None and row.bound == window.bound:
            del window.rows[place]

    def entries(self) -> Iterator[Entry]:
        """Yield all ready tasks."""
        for window in self._windows.values():
            for row in window.rows.values():
                yield from (item[3] for item in row.live())

    def cut(self, entry: Entry) -> None:
        """Note that a ready task was dropped for lack of room: a scan must bring it again."""
        assert entry.queue is not None
        row = self._windows[entry.queue].rows[lane_of(entry), entry.is_isolated]
        row.bound = min(row.bound, entry.order)

    def clear_dropped(self) -> None:
        """Remove what was dropped."""
        self.item_cnt = 0
        for window in self._windows.values():
            for row in window.rows.values():
                row.heap = row.live()
                heapq.heapify(row.heap)
                self.item_cnt += len(row.heap)
        self._offer_all()

    def leave_out_isolated(self, *, leaves_out: bool) -> None:
        """Offer no tasks of isolated handlers, or offer them again."""
        if leaves_out == self._skips_isolated:
            return
        self._skips_isolated = leaves_out
        if not leaves_out:
            rows, self._skipped = self._skipped, []
            for row in rows:
                self._offer(self._window(row.lane.queue), row)

    @property
    def has_isolated(self) -> bool:
        """Whether tasks of isolated handlers may ask for their permits."""
        return any(
            row.is_isolated and row.count and self._pools.closed(row.lane) is None
            for window in self._windows.values()
            for row in window.rows.values()
        )

    def _window(self, queue: str) -> _Window:
        return self._windows.setdefault(queue, _Window(queue))

    def _first_of(self, window: _Window) -> Entry | None:
        """Return the task that this queue offers, or None."""
        wide = PermitPool(window.queue)
        while window.heads:
            key, _, row = window.heads[0]
            if key != row.key:
                heapq.heappop(window.heads)
                continue
            first = row.first()
            if first is None or (first.order > row.bound and not first.is_begun):
                _take_out(window, row)
                continue
            if self._skips_isolated and row.is_isolated:
                _take_out(window, row)
                self._skipped.append(row)
                continue
            closed_by = self._pools.closed(row.lane, first.order)
            if closed_by == wide:
                return None  # it goes before all others, and they need a permit of this pool, too
            if closed_by is not None:
                _take_out(window, row)
                row.closed_by = closed_by
                self._closed.setdefault(closed_by, []).append(row)
                self._trim(row)
                continue
            now = self._key(row, first)
            if now == key:
                return first
            row.key = now
            heapq.heapreplace(window.heads, (now, self._next(), row))
        return None

    def _offer(self, window: _Window, row: _Row) -> None:
        first = row.first()
        if first is None:
            return
        if row.closed_by is not None:
            if not self._pools.is_news(row.closed_by, row.lane.tenant, first.order):
                return
            self._closed[row.closed_by].remove(row)
            row.closed_by = None
        key = self._key(row, first)
        if row.key is None or key < row.key:
            row.key = key
            heapq.heappush(window.heads, (key, self._next(), row))

    def _offer_all(self) -> None:
        self._closed.clear()
        self._skipped.clear()
        for window in self._windows.values():
            for row in window.rows.values():
                row.closed_by = None
            self._offer_window(window)

    def _key(self, row: _Row, first: Entry) -> _Key:
        begins, priority, moment = first.order
        lane = row.lane
        turn = self._pools.turn_of(lane.queue, lane.tenant) if self._pools.is_fair(lane.queue) else 0
        return begins, 0, turn, priority, moment, first.task_id

    def _next(self) -> int:
        self._sequence += 1
        return self._sequence

    # --- permits --------------------------------------------------------------------------------------------

    def reopen(self, pools: Iterable[PermitPool]) -> None:
        """Offer the tasks again that wait for permits of these pools."""
        opened = set(pools)
        for pool in opened:
            for row in self._closed.pop(pool, ()):
                row.closed_by = None
                self._offer(self._window(row.lane.queue), row)
        # The pool of a tenant lists no task that another pool keeps waiting: some may be news to it now.
        for pool, rows in [*self._closed.items()] if opened else ():
            if pool.key is None:
                for row in [row for row in rows if not opened.isdisjoint(self._pools.of(row.lane))]:
                    self._offer(self._window(row.lane.queue), row)

    def advance(self, queue: str, tenants: Collection[str]) -> None:
        """Offer the tasks of these tenants again, whose turns come earlier than was known."""
        window = self._window(queue)
        for row in window.rows.values() if tenants else ():
            if (row.lane.tenant or "") in tenants:
                self._offer(window, row)

    def sort_anew(self) -> None:
        """Offer all tasks again. Call this when the limits have changed."""
        self._offer_all()

    def least_asked(self, pool: PermitPool) -> int:
        """Return how many tasks should ask at once. Where tenants take turns, one of each: the server chooses."""
        if not self._pools.takes_turns(pool) or (window := self._windows.get(pool.queue or "")) is None:
            return 0
        return min(_MOST_TURNS, len(window.rows))

    def waits_for(self, pool: PermitPool) -> bool:
        """Whether tasks wait that need a permit of this pool."""
        return any(row.count or row.bound != ALL for row in self._rows_of(pool))

    def best(self, pool: PermitPool, count: int, free: Collection[PermitPool] = ()) -> list[Entry]:
        """Return the first waiting tasks that need a permit of this pool, and that no other pool keeps waiting.

        `free`: pools that keep none waiting. Where tenants take turns, each of them has one at least, whatever `count`:
        this worker may not know yet whose turn it is.
        """
        open_rows = [
            row
            for row in self._rows_of(pool)
            if row.count
            and all(each == pool or each in free or self._pools.has_room(each) for each in self._pools.of(row.lane))
        ]
        if len(open_rows) == 1 and not self._pools.is_fair(open_rows[0].lane.queue):
            return [
                item[3] for item in heapq.nsmallest(count, open_rows[0].live()) if self._is_known(open_rows[0], item)
            ]
        if self._pools.takes_turns(pool):
            count = max(count, len(open_rows))
        found: list[tuple[_Key, int, Entry]] = []
        for row in open_rows:
            known = [item for item in row.live() if self._is_known(row, item)]
            is_fair = self._pools.is_fair(row.lane.queue)
            turn = self._pools.turn_of(row.lane.queue, row.lane.tenant) if is_fair else 0
            for index, (order, task_id, sequence, entry) in enumerate(heapq.nsmallest(count, known)):
                found.append(((order[0], index if is_fair else 0, turn, *order[1:], task_id), sequence, entry))
        return [entry for _, _, entry in heapq.nsmallest(count, found)]

    @staticmethod
    def _is_known(row: _Row, item: _Item) -> bool:
        return item[0] <= row.bound or item[3].is_begun

    def _rows_of(self, pool: PermitPool) -> Iterator[_Row]:
        windows = self._windows.values() if pool.queue is None else filter(None, [self._windows.get(pool.queue)])
        for window in windows:
            yield from (row for row in window.rows.values() if pool in self._pools.of(row.lane))

    # --- scans ----------------------------------------------------------------------------------------------

    def wants_more(self, queue: str) -> bool:
        """Whether a scan should find more tasks of this queue: few are left here, and more wait."""
        window = self._windows.get(queue)
        if window is None:
            return False
        wide = PermitPool(queue)
        rows = window.rows.values()
        count = sum(row.count for row in rows if row.closed_by in (None, wide))
        if window.brought is None:
            window.brought = count
        low = float(min(LOW, self._pools.kept(wide)))
        if self._pools.is_fair(queue):
            low = min(low, _half(window.brought))  # a scan brings a part of each tenant's tasks
        if window.is_cut and count < low:
            return True
        are_low = [self._runs_low(row) for row in rows if row.bound < window.bound]  # each notes what it was brought
        return any(are_low)

    def _runs_low(self, row: _Row) -> bool:
        """Whether few tasks of a row are left, and its pools may soon have permits for more.

        What is not here is not listed in the pools, so worse tasks of other workers would get the permits. But if a
        scan has just brought few, the next one would bring no more.
        """
        if row.brought is None:
            row.brought = max(row.count, 1)  # its bound tells that some were brought, also if all were dropped since
        kept = self._kept(row)
        return row.count < min((KEPT if kept == inf else kept) / 2, _half(row.brought))

    def narrow_lanes(self, queue: str) -> Iterator[NarrowLane]:
        """Yield the lanes of a queue that a pool of a limit_key or a tenant keeps waiting."""
        window = self._windows.get(queue)
        for row in list(window.rows.values()) if window is not None else ():
            closed_by = self._pools.closed(row.lane)
            if closed_by is None or closed_by == PermitPool(queue):
                continue
            known = row.level if row.level is not None else -max(row.live())[0][1] if row.count else None
            if known is not None:
                yield NarrowLane(row.lane, closed_by, row.count, known, row.bound != ALL)

    def found(
        self, queues: Iterable[str], bound: Order, *, lanes: frozenset[Lane] | None, left_out: frozenset[Lane]
    ) -> None:
        """Note that a scan brings all tasks of these queues up to this bound. Call this before they are queued.

        `lanes`: the scan was for these lanes only. None: for all but those of `left_out`.
        """
        for queue in queues:
            window = self._window(queue)
            if lanes is None:
                window.bound, window.is_cut, window.brought, window.bounds = bound, bound != ALL, None, {}
            for place, row in list(window.rows.items()):
                if row.lane in lanes if lanes is not None else row.lane not in left_out:
                    row.bound, row.level, row.brought = bound, None, None
                    if not row.count and row.closed_by is None and bound == window.bound:
                        del window.rows[place]
            self._offer_window(window)

    def found_of_tenants(
        self,
        queue: str,
        bounds: Mapping[str | None, Order],
        *,
        is_cut: bool,
        lanes: frozenset[Lane] | None,
        left_out: frozenset[Lane],
    ) -> None:
        """Do as `found` does for a scan that brings the tasks of these tenants of a fair queue, each up to a bound."""
        window = self._window(queue)
        window.is_cut, window.brought = is_cut, None
        if lanes is None:  # a scan is of some tenants only
            known = {**window.bounds, **bounds}
            window.bounds = {tenant: bound for tenant, bound in known.items() if bound != ALL}
        for row in window.rows.values():
            if row.lane in lanes if lanes is not None else row.lane not in left_out:
                row.bound, row.brought = bounds.get(row.lane.tenant, row.bound), None
        self._offer_window(window)

    def _offer_window(self, window: _Window) -> None:
        window.heads.clear()
        for row in window.rows.values():
            row.key = None
            self._offer(window, row)


def _half(brought: int) -> float:
    """Return the number below which a scan is wanted, where the last one has brought so many."""
    return brought / 2 + 0.5 if brought else 0.0


def _take_out(window: _Window, row: _Row) -> None:
    """Offer no task of the first row."""
    heapq.heappop(window.heads)
    row.key = None


def lane_of(entry: Entry) -> Lane:
    """Return the lane of a task whose queue is known."""
    assert entry.queue is not None
    return Lane(entry.queue, entry.limit_key, entry.tenant)


def _order(entry: Entry) -> Order:
    return entry.order
