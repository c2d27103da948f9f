"""Scan targets: which queues a scan covers together, and which tasks it leaves out.

A queue with a limit or fair turns is scanned alone, also while it is full: what a worker knows of it is the beginning
of the server's order, and only a scan brings what has come into this beginning unheard. A scan leaves out the tasks of
a limit_key or a tenant without a free permit if enough of them wait here. Those of a higher priority it does not leave
out, as they would go before these.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import inf
from time import monotonic

from mtask.features.controls.fair_scans import TurnScans
from mtask.features.controls.worker import Controls
from mtask.features.limits.operations import PermitPool
from mtask.features.limits.pools import Lane, Pools
from mtask.features.limits.windows import SOON, Windows
from mtask.kernel.operations.find_due import Scan, place_of
from mtask.kernel.statements.filters import Filter, none_of
from mtask.kernel.worker.discovery.ready import ALL, Order
from mtask.kernel.worker.process.part import ScanTarget
from mtask.kernel.worker.process.state import Scope
from mtask.kernel.worker.process.time import seconds_of

#: The most conditions of a scan that leave tasks out. Those of more priorities are put together.
_MAX_CONDITIONS = 50
#: The most limit_keys that one condition names.
_MAX_KEYS = 5_000


class Targets:
    """Says which scans cover some queues, and notes in the windows what they bring."""

    def __init__(self, scope: Scope, controls: Controls, pools: Pools, windows: Windows) -> None:
        self._controls = controls
        self._pools = pools
        self._windows = windows
        self._turns = TurnScans(scope.worker_id, scope.store.run)

    def of(self, queues: Sequence[str]) -> list[ScanTarget]:
        """Return the scans that cover these queues."""
        controls = self._controls
        apart = [queue for queue in queues if queue in controls.limits or controls.served.is_fair(queue)]
        together = [queue for queue in queues if queue not in apart]
        # A malformed task may be of no queue: the common scan finds it, also if each queue is scanned alone.
        targets = self._of(together, is_apart=False)
        for queue in apart:
            targets += self._of([queue], is_apart=True)
        return targets

    def _of(self, queues: list[str], *, is_apart: bool) -> list[ScanTarget]:
        """Return the scan of these queues; and another one for the lanes of which too few tasks wait here, if any."""
        narrow = _Narrow(self._pools, self._windows, queues) if self._pools.is_any else None
        if narrow is None or not narrow.lanes:
            return [self._target(queues, is_apart=is_apart)]
        fat, thin = narrow.split()
        both = [*fat, *thin]
        left_out = narrow.lanes_of(both)
        targets = [self._target(queues, narrow.conditions(both), is_apart=is_apart, left_out=left_out)]
        if thin:
            lanes = narrow.lanes_of(thin)
            targets.append(self._target(queues, narrow.conditions(fat), is_apart=True, lanes=lanes))
        return targets

    def _target(
        self,
        queues: list[str],
        guards: Sequence[Filter] = (),
        *,
        is_apart: bool,
        lanes: frozenset[Lane] | None = None,
        left_out: frozenset[Lane] = frozenset(),
    ) -> ScanTarget:
        """Return a scan. `lanes`: those that it looks for. None: all but those of `left_out`."""
        is_fair = len(queues) == 1 and self._controls.served.is_fair(queues[0])
        # What waits for permits is scanned as its windows ask for it.
        is_on_demand = is_apart and not (is_fair and queues[0] not in self._controls.limits)
        note = partial(self._note_turns if is_fair else self._note, queues, lanes, left_out)
        return ScanTarget(queues, guards, self._turns if is_fair else None, is_apart, is_on_demand, note)

    def _note(self, queues: list[str], lanes: frozenset[Lane] | None, left_out: frozenset[Lane], found: Scan) -> None:
        """Note up to which task the windows of these queues hold all that wait."""
        if not self._pools.is_any:
            return
        bound = ALL
        if not found.is_complete:
            places = filter(None, map(place_of, found.documents))
            bound = max(((True, -priority, seconds_of(moment)) for priority, moment in places), default=ALL)
        self._windows.found(queues, bound, lanes=lanes, left_out=left_out)

    def _note_turns(
        self, queues: list[str], lanes: frozenset[Lane] | None, left_out: frozenset[Lane], found: Scan
    ) -> None:
        """Note how far the windows of a limited queue hold the tasks of these tenants: the last one's may be cut."""
        if not found.documents or not self._pools.is_any:
            return
        (queue,) = queues
        bounds: dict[str | None, Order] = {}
        for document in found.documents:
            place, tenant = place_of(document), document.get("tenant")
            if place is not None and (tenant is None or type(tenant) is str):
                bounds[tenant] = (True, -place[0], seconds_of(place[1]))
        is_cut = not found.is_complete
        last = found.documents[-1].get("tenant")
        bounds = {tenant: bound if is_cut and tenant == last else ALL for tenant, bound in bounds.items()}
        self._windows.found_of_tenants(queue, bounds, is_cut=is_cut, lanes=lanes, left_out=left_out)


class _Narrow:
    """The lanes that a pool of a limit_key or a tenant keeps waiting, by pool."""

    def __init__(self, pools: Pools, windows: Windows, queues: Sequence[str]) -> None:
        self.lanes: dict[PermitPool, list[Lane]] = {}
        self._counts: dict[PermitPool, int] = {}
        self._last: dict[PermitPool, float] = {}
        #: The pools that may soon have permits for more tasks than wait here.
        self._wanted: set[PermitPool] = set()
        self._pools = pools
        for queue in queues:
            for lane, pool, count, priority, is_cut in windows.narrow_lanes(queue):
                self.lanes.setdefault(pool, []).append(lane)
                self._counts[pool] = self._counts.get(pool, 0) + count
                self._last[pool] = min(self._last.get(pool, inf), priority)
                if is_cut and pools.retry_at(pool) < monotonic() + SOON:
                    self._wanted.add(pool)

    def split(self) -> tuple[list[PermitPool], list[PermitPool]]:
        """Return the pools for which enough tasks wait here, and the others."""
        fat: list[PermitPool] = []
        thin: list[PermitPool] = []
        for pool in self.lanes:
            has_enough = pool not in self._wanted or self._counts[pool] >= self._pools.kept(pool)
            (fat if has_enough else thin).append(pool)
        return fat, thin

    def lanes_of(self, pools: Sequence[PermitPool]) -> frozenset[Lane]:
        return frozenset(lane for pool in pools for lane in self.lanes[pool])

    def conditions(self, pools: Sequence[PermitPool]) -> list[Filter]:
        """Return the condition that leaves out what waits for these pools, but for tasks of a higher priority."""
        levels = sorted({self._last[pool] for pool in pools})
        floor = levels[0] if len(levels) > _MAX_CONDITIONS else None
        keys: dict[tuple[str | None, str | None, float], list[str]] = {}
        tenants: dict[tuple[str | None, float], list[str]] = {}
        for pool in pools:
            level = self._last[pool] if floor is None else floor
            if pool.key is not None:
                keys.setdefault((pool.queue, pool.tenant, level), []).append(pool.key)
            elif pool.tenant is not None:
                tenants.setdefault((pool.queue, level), []).append(pool.tenant)
        clauses: list[Filter] = []
        for (queue, tenant, level), names in keys.items():
            clause = {"queue": queue, "tenant": tenant, "task_option.limit_key": {"$in": sorted(names)[:_MAX_KEYS]}}
            clauses.append({**clause, "task_option.priority": {"$lte": int(level)}})
        for (queue, level), names in tenants.items():
            of_queue: Filter = {} if queue is None else {"queue": queue}
            clauses.append({**of_queue, "tenant": {"$in": sorted(names)}, "task_option.priority": {"$lte": int(level)}})
        return none_of(clauses)
