"""The pools of permits as this worker knows them: how many permits may be free, whose turn it is, when to ask again.

The server's answer to a request decides. What is here only keeps the worker from requests that would be in vain.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from time import monotonic
from typing import NamedTuple

from mtask.features.controls.rules import Limit
from mtask.features.controls.worker import Controls
from mtask.features.limits.operations import PermitPool
from mtask.kernel.document.task import StoredTask
from mtask.kernel.worker.discovery.ready import ALL, Order

#: The least number of waiting tasks of one limit_key or tenant that are kept. Scans leave the others out.
KEPT = 50
#: The time within which a pool lists a new task that goes before others of its worker, in seconds.
_LISTED_WITHIN = 0.2
#: The most lanes whose pools are remembered. There may be as many limit_keys as tasks.
_MAX_LANES = 10_000


class Lane(NamedTuple):
    """The tasks that need the same permits: those of a queue, and of a limit_key and a tenant in it."""

    queue: str
    key: str | None
    tenant: str | None


@dataclass(slots=True)
class PoolState:
    """A pool that tasks are asking, that has refused a permit, or that lists waiting tasks of this worker."""

    #: The number of tasks that may ask for a permit now.
    budget: float = inf
    #: The time of the next request (monotonic seconds). A permit that this worker returns, or a call, comes earlier.
    retry_at: float = inf
    #: The number of permits that may be had at `retry_at`; 0: not known.
    coming: int = 0
    #: The time of the next search for dead runs that hold permits (monotonic seconds); None: no search is needed.
    reclaim_at: float | None = None
    #: The time at which the waiting tasks are withdrawn, unless the worker asks before (monotonic seconds).
    withdraw_at: float = inf
    late_cnt: int = 0  #: the number of times that this was put off
    #: Whether the pool lists tasks that wait in this worker.
    is_listed: bool = False
    #: The number of requests in a row that found no free permit.
    refusals: int = 0
    #: How often permits came free. What comes while a request is under way may be later than its answer.
    news: int = 0
    came: int = 0  #: the number of tasks that came and are to be listed
    asks: int = 0  #: the number of requests
    #: The order of the first task of this worker that the pool lists; where tenants take turns, of each tenant. A task
    #: that goes before it asks at once, so that it is listed. None: nothing is listed, because no other worker waits.
    shown: dict[str, Order] | None = None
    #: The ids of these tasks. A task that comes later, and goes before the last of them, is to be listed soon.
    listed: frozenset[str] = frozenset()
    last: Order = ALL


@dataclass(slots=True)
class _Turns:
    """The turns of the tenants of a fair queue."""

    count: int = 0  #: the number of turns so far
    last: dict[str, int] = field(default_factory=dict)  #: the number of each tenant's last turn


class Pools:
    """The pools from which the tasks of this worker need permits."""

    def __init__(self, controls: Controls, wake: Callable[[], None]) -> None:
        """`wake` is called when a pool is to be asked earlier than was known."""
        self._controls = controls
        self._wake = wake
        self._of: dict[Lane, tuple[PermitPool, ...]] = {}
        self._limits: dict[Lane, Sequence[tuple[PermitPool | None, Limit | None]]] = {}
        self.states: dict[PermitPool, PoolState] = {}
        self._turns: dict[str, _Turns] = {}

    @property
    def is_any(self) -> bool:
        """Whether any queue of this worker, or any tenant, has a limit."""
        return self._controls.served.is_limited

    def forget(self) -> None:
        """Forget all. Call this when the limits have changed: each pool may have permits again."""
        self._of.clear()
        self._limits.clear()
        self._turns.clear()
        for pool, state in list(self.states.items()):
            self.states[pool] = PoolState(is_listed=state.is_listed)

    def of(self, lane: Lane) -> tuple[PermitPool, ...]:
        """Return the pools from which a task of this lane needs a permit, the narrowest first."""
        pools = self._of.get(lane)
        if pools is None:
            pools = self._of[lane] = tuple(pool for pool, limit in self.limits(lane) if pool and limit is not None)
        return pools

    def wider(self, lane: Lane, pool: PermitPool) -> tuple[PermitPool, ...]:
        """Return the pools that a task of this lane asks after this one."""
        pools = self.of(lane)
        return pools[pools.index(pool) + 1 :] if pool in pools else ()

    def limits(self, lane: Lane) -> Sequence[tuple[PermitPool | None, Limit | None]]:
        """Return the pool of each kind for a task of this lane, with its limit. None: there is no such limit."""
        limits = self._limits.get(lane)
        if limits is None:
            if len(self._limits) >= _MAX_LANES:
                self._of.clear()
                self._limits.clear()
            pools = PermitPool.of_task(*lane)
            limits = self._limits[lane] = [(pool, None if pool is None else self.limit_of(pool)) for pool in pools]
        return limits

    def limit_of(self, pool: PermitPool) -> Limit | None:
        """Return the limit of a pool; None: there is none any more."""
        if pool.queue is None:
            return self._controls.tenant_limits.get(pool.tenant or "")
        limit: Limit | None = getattr(self._controls.limits.get(pool.queue), pool.limited_by, None)
        return limit

    def width(self, pool: PermitPool) -> int:
        """Return the most permits of a pool that can be free at once. 0: it has no limit any more."""
        limit = self.limit_of(pool)
        return 0 if limit is None else width_of(limit)

    def window(self, pool: PermitPool) -> float:
        """Return the window in which the starts of a pool are limited, in seconds. 0: they are not limited any more."""
        limit = self.limit_of(pool)
        return 0.0 if limit is None else (limit.window_ms or 0) / 1000

    def rate(self, pool: PermitPool) -> float:
        """Return the most starts of a pool in a second, on average."""
        limit, window = self.limit_of(pool), self.window(pool)
        return (limit.starts or 0) / window if limit is not None and window else 0.0

    def kept(self, pool: PermitPool) -> int:
        """Return the number of a lane's tasks that are enough to keep while this pool has no permit for them."""
        return max(KEPT, 2 * self.width(pool))

    def state(self, pool: PermitPool) -> PoolState:
        """Return what is known of a pool, to be changed."""
        return self.states.setdefault(pool, PoolState())

    def retry_at(self, pool: PermitPool) -> float:
        """Return the time of the next request to a pool (monotonic seconds). 0: tasks may ask now, or are asking."""
        state = self.states.get(pool)
        return 0.0 if state is None or state.budget >= 1 or state.retry_at == inf else state.retry_at

    def has_room(self, pool: PermitPool) -> bool:
        """Whether a task may ask this pool for a permit now."""
        state = self.states.get(pool)
        return state is None or state.budget >= 1

    def closed(self, lane: Lane, order: Order | None = None) -> PermitPool | None:
        """Return the pool that keeps the tasks of this lane waiting; None: they may ask now.

        `order`: that of the task that would ask. It may ask if it is news to the pools that have no room.
        """
        closed = (pool for pool in self.of(lane) if not self.has_room(pool))
        return next((pool for pool in closed if order is None or not self.is_news(pool, lane.tenant, order)), None)

    def is_news(self, pool: PermitPool, tenant: str | None, order: Order) -> bool:
        """Whether a task of this order goes before those of this worker that a pool without room lists."""
        state = self.states.get(pool)
        if state is None or state.shown is None:
            return False
        shown = state.shown.get(self._turn_in(pool, tenant))
        return shown is None or order < shown

    def show(self, pool: PermitPool, tasks: Mapping[str, tuple[str | None, Order]], *, are_all: bool) -> None:
        """Note the tasks that a pool lists, each with its tenant and its order. `are_all`: no others wait here."""
        shown: dict[str, Order] = {}
        for tenant, order in tasks.values():
            turn = self._turn_in(pool, tenant)
            shown[turn] = min(order, shown.get(turn, order))
        state = self.state(pool)
        state.shown, state.listed = shown, frozenset(tasks)
        state.last = ALL if are_all else max((order for _, order in tasks.values()), default=ALL)

    def arrived(self, lane: Lane, task_id: str, order: Order) -> None:
        """Have a pool asked soon that keeps a new task waiting, if it is to list the task."""
        pool = self.closed(lane, order)
        state = None if pool is None else self.states.get(pool)
        if state is None or task_id in state.listed or order >= state.last:
            return
        state.came += 1
        if state.shown is not None:
            self.list_soon(state)

    def list_soon(self, state: PoolState) -> None:
        """Ask a pool soon, so that it lists what has come."""
        soon = monotonic() + _LISTED_WITHIN
        if soon < state.retry_at:
            state.retry_at = soon
            self._wake()

    def _turn_in(self, pool: PermitPool, tenant: str | None) -> str:
        return tenant or "" if self.takes_turns(pool) else ""

    def pick(self, lane: Lane, order: Order) -> None:
        """Count a task that is about to ask for its permits. No more tasks ask at once than can get a permit."""
        for pool in self.of(lane):
            state = self.states.get(pool)
            if state is None:
                state = self.states[pool] = PoolState(budget=self.width(pool))
            state.budget -= 1
            if state.shown is not None and self.is_news(pool, lane.tenant, order):
                state.shown[self._turn_in(pool, lane.tenant)] = order

    def give(self, pools: Iterable[PermitPool], count: float = 1) -> None:
        """Let more tasks ask each of these pools."""
        for pool in pools:
            if (state := self.states.get(pool)) is not None:
                state.budget = max(0.0, state.budget) + count

    # --- turns ----------------------------------------------------------------------------------------------

    def is_fair(self, queue: str) -> bool:
        """Whether the tenants of this queue take turns."""
        return self._controls.served.is_fair(queue)

    def takes_turns(self, pool: PermitPool) -> bool:
        """Whether this is the pool of a queue whose tenants take turns."""
        return pool.queue is not None and pool == PermitPool(pool.queue) and self.is_fair(pool.queue)

    def turn_of(self, queue: str, tenant: str | None) -> int:
        """Return the number of this tenant's last turn. The tenant with the smallest number is next."""
        turns = self._turns.get(queue)
        return 0 if turns is None else turns.last.get(tenant or "", 0)

    def count_turn(self, queue: str, tenant: str | None) -> None:
        """Count a turn of this tenant, until the server tells the turns."""
        turns = self._turns.setdefault(queue, _Turns())
        turns.count += 1
        turns.last[tenant or ""] = turns.count

    def note_turns(self, queue: str, count: int, last: Mapping[str, int]) -> set[str]:
        """Note the turns as the server tells them; return the tenants whose next turn comes earlier than was known."""
        known = self._turns.get(queue, _Turns()).last
        self._turns[queue] = _Turns(count, dict(last))
        return {tenant for tenant, turn in known.items() if last.get(tenant, 0) < turn}


def width_of(limit: Limit) -> int:
    """Return the most permits that can be free at once."""
    return max(filter(None, (limit.concurrency, limit.starts)))


def lane_of_task(task: StoredTask) -> Lane:
    """Return the lane of a task."""
    return Lane(task.queue, task.task_option.limit_key, task.tenant)
