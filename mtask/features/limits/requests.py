"""Requests: what a worker asks the pools of permits for its tasks, and which tasks it lets them list as waiting."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime

from mtask.features.limits.operations import MAX_WAITING, HeldPermit, PermitPool, PermitRequest, Wanted
from mtask.features.limits.pools import Pools, lane_of_task
from mtask.features.limits.windows import Windows, lane_of
from mtask.kernel.document import rules
from mtask.kernel.document.rules import Rank
from mtask.kernel.document.task import StoredTask
from mtask.kernel.worker.discovery.ready import Entry, Order
from mtask.kernel.worker.process.state import Scope
from mtask.kernel.worker.process.time import seconds_of

#: How many more tasks of this worker a pool lists than it can begin at once. Other workers know some of them, too, and
#: what they take is listed no longer.
_MORE = 10


class Requests:
    """Makes the requests for permits."""

    def __init__(
        self,
        scope: Scope,
        pools: Pools,
        windows: Windows,
        picked: Mapping[str, Entry],
        held: Mapping[tuple[str, str], Sequence[HeldPermit]],
    ) -> None:
        """`picked`: the tasks that were taken from the windows and have no answer yet. `held`: the permits of runs."""
        self._ledger = scope.ledger
        self._vitals = scope.vitals
        self._clock = scope.clock
        self._pools = pools
        self._windows = windows
        self._picked = picked
        self._held = held

    @property
    def room(self) -> int:
        """The number of tasks that this worker can still ask for now."""
        return max(0, self._vitals.concurrency - len(self._ledger.claiming) - len(self._ledger.held))

    def of(self, tasks: Iterable[StoredTask], kind: int, now: datetime) -> list[PermitRequest]:
        """Return the requests for the permits of one kind. `kind`: its number, the narrowest kind is 0.

        `now`: the server's time at which the tasks were read.
        """
        found: dict[PermitPool, list[tuple[Rank, StoredTask]]] = {}
        limits = {}
        for task in tasks:
            pool, limit = self._pools.limits(lane_of_task(task))[kind]
            if pool is not None and limit is not None:
                limits[pool] = limit
                found.setdefault(pool, []).append((rules.rank(task, now), task))
        has_peers = self._ledger.has_peers
        requests = []
        for pool, ranked in found.items():
            is_fair = self._pools.takes_turns(pool)
            # A worker alone need not say how urgent its tasks are.
            wanted = [
                _wanted(task, rank if has_peers or is_fair else None)
                for rank, task in sorted(ranked, key=lambda each: (each[0], each[1].id))
            ]
            requests.append(PermitRequest(pool, limits[pool], wanted, does_wait=has_peers, is_fair=is_fair))
        return requests

    def with_waiting(self, request: PermitRequest) -> PermitRequest:
        """Return the request with what waits in this worker now. Call this when the request is sent."""
        waiting = self._waiting(request) if request.does_wait else []
        return replace(request, waiting=waiting, at_hand=self.room)

    def _ahead(self, pool: PermitPool, asked: Collection[str]) -> list[Wanted]:
        """Return the tasks that another request of this worker asks a permit of this pool for, or is about to."""
        picked = [
            entry
            for entry in self._picked.values()
            if entry.task_id not in asked and pool in self._pools.of(lane_of(entry))
        ]
        return [self._hinted(entry) for entry in sorted(picked, key=_order)]

    def _waiting(self, request: PermitRequest) -> list[Wanted]:
        """Return the first tasks that wait here for a permit of this pool, beside those that ask now."""
        pool = request.pool
        if pool not in self._pools.states and request.limit.starts is None:
            return []  # the pool was not full at the last answer
        ahead = self._ahead(pool, {task.task_id for task in request.wanted})
        best = self._windows.best(pool, self.most_waiting(pool), self._shared(pool))
        return [*ahead, *map(self._hinted, best)][:MAX_WAITING]

    def most_waiting(self, pool: PermitPool) -> int:
        """Return the most tasks that a pool lists for this worker, beside those that ask now."""
        return min(MAX_WAITING, min(self._pools.width(pool), self._vitals.concurrency) + _MORE)

    def _shared(self, pool: PermitPool) -> set[PermitPool]:
        """Return the pools of which this worker has permits, or is asking for them, together with one of this pool.

        A run returns its permits together. So a task that needs both can go when this one has ended.
        """
        used = [self._pools.of(lane_of(entry)) for entry in self._picked.values()]
        used += [tuple(permit.pool for permit in permits) for permits in self._held.values()]
        return {each for pools in used if pool in pools for each in pools}

    def _hinted(self, entry: Entry) -> Wanted:
        begins, priority, moment = entry.order
        return Wanted(entry.task_id, (int(begins), priority, self._clock.instant_of(moment)), entry.tenant or "")


def _wanted(task: StoredTask, rank: Rank | None) -> Wanted:
    return Wanted(task.id, rank, task.tenant or "", is_single=task.task_option.concurrent_worker_cnt == 1)


def order_of(rank: Rank) -> Order:
    """Return the order of a task in this worker."""
    begins, priority, time = rank
    return (bool(begins), priority, seconds_of(time))


def _order(entry: Entry) -> tuple[Order, str]:
    return entry.order, entry.task_id
