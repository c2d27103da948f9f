"""Scan targets: which queues a scan covers together, and which tasks it leaves out.

A queue with a limit or fair turns is scanned alone, also while it is full: what a worker knows of it is the beginning
of the server's order, and only a scan brings what has come into this beginning unheard. A scan leaves out the tasks of
a limit_key or a tenant without a free permit if enough of them wait here. Those of a higher priority it does not leave
out, as they would go before these.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from time import monotonic

from mtask.features.controls.worker import Controls
from mtask.features.limits.operations import PermitPool
from mtask.features.limits.pools import Lane
from mtask.features.limits.windows import SOON
from mtask.features.limits.worker import Limits
from mtask.kernel.statements.filters import Filter, none_of

#: The most conditions of a scan that leave tasks out. Those of more priorities are put together.
_MAX_CONDITIONS = 50
#: The most limit_keys that one condition names.
_MAX_KEYS = 5_000


@dataclass(frozen=True, slots=True)
class ScanTarget:
    """The queues that one scan covers, and the tasks that it leaves out."""

    queues: list[str]
    #: The conditions that leave tasks out.
    guards: Sequence[Filter] = ()
    #: The paused tenants, by queue; None: in all queues.
    paused_tenants: Mapping[str | None, Collection[str]] = field(default_factory=dict)
    #: Whether the scan covers a single queue, whose tenants take turns.
    is_fair: bool = False
    #: Whether the scan covers a single queue with a limit or fair turns.
    is_apart: bool = False
    #: The lanes that the scan looks for. None: all but those of `left_out`.
    lanes: frozenset[Lane] | None = None
    left_out: frozenset[Lane] = frozenset()
    #: Whether the scan looks for some of this worker's names only. So it does not tell what else waits.
    is_of_some_names: bool = False


def scan_targets(queues: Sequence[str], controls: Controls, limits: Limits) -> list[ScanTarget]:
    """Return the scans that cover these queues."""
    paused: dict[str | None, Collection[str]] = {}
    if controls.served.paused_tenants:
        paused[None] = controls.served.paused_tenants
    apart = [queue for queue in queues if queue in controls.limits or controls.served.is_fair(queue)]
    together = [queue for queue in queues if queue not in apart]
    targets: list[ScanTarget] = []
    # A malformed task may be of no queue: the common scan finds it, also if each queue is scanned alone.
    targets += _targets_of(together, limits, paused, is_fair=False, is_apart=False)
    for queue in apart:
        targets += _targets_of([queue], limits, paused, is_fair=controls.served.is_fair(queue), is_apart=True)
    return targets


def _targets_of(
    queues: list[str],
    limits: Limits,
    paused: Mapping[str | None, Collection[str]],
    *,
    is_fair: bool,
    is_apart: bool,
) -> list[ScanTarget]:
    """Return the scan of these queues; and another one for the lanes of which too few tasks wait here, if any."""
    narrow = _Narrow(limits, queues) if limits.is_any else None
    if narrow is None or not narrow.lanes:
        return [ScanTarget(queues, (), paused, is_fair, is_apart)]
    fat, thin = narrow.split()
    first = ScanTarget(
        queues, narrow.conditions([*fat, *thin]), paused, is_fair, is_apart, left_out=narrow.lanes_of([*fat, *thin])
    )
    if not thin:
        return [first]
    second = ScanTarget(queues, narrow.conditions(fat), paused, is_fair, is_apart=True, lanes=narrow.lanes_of(thin))
    return [first, second]


class _Narrow:
    """The lanes that a pool of a limit_key or a tenant keeps waiting, by pool."""

    def __init__(self, limits: Limits, queues: Sequence[str]) -> None:
        self.lanes: dict[PermitPool, list[Lane]] = {}
        self._counts: dict[PermitPool, int] = {}
        self._last: dict[PermitPool, float] = {}
        #: The pools that may soon have permits for more tasks than wait here.
        self._wanted: set[PermitPool] = set()
        self._limits = limits
        for queue in queues:
            for lane, pool, count, priority, is_cut in limits.windows.narrow_lanes(queue):
                self.lanes.setdefault(pool, []).append(lane)
                self._counts[pool] = self._counts.get(pool, 0) + count
                self._last[pool] = min(self._last.get(pool, inf), priority)
                if is_cut and limits.pools.retry_at(pool) < monotonic() + SOON:
                    self._wanted.add(pool)

    def split(self) -> tuple[list[PermitPool], list[PermitPool]]:
        """Return the pools for which enough tasks wait here, and the others."""
        fat: list[PermitPool] = []
        thin: list[PermitPool] = []
        for pool in self.lanes:
            has_enough = pool not in self._wanted or self._counts[pool] >= self._limits.pools.kept(pool)
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
