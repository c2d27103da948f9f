"""Scans of queues with fair turns: each takes equal parts from some tenants, and the next scan goes on behind them.

A scan in the order of age would find only tasks of the tenant with the longest backlog. The tenants form a ring, sorted
by their names. A worker begins at a random one.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from time import monotonic

from mtask.errors import DatabaseUnavailable
from mtask.kernel.document.identity import between
from mtask.kernel.driver.operation import Operation
from mtask.kernel.operations import find_due as finding
from mtask.kernel.operations.find_due import Document, Scan
from mtask.kernel.statements.filters import Filter
from mtask.kernel.worker.process.part import ScanTarget, TakeScan

#: The most tenants from which a scan takes equal parts. If there are fewer, the parts are larger.
TENANTS = 16
#: The time limit of a scan for the tasks of no tenant, and the pause after it, as a multiple of its duration. No index
#: leads to these tasks alone: such a scan may read many tasks of tenants.
_TIMEOUT, _TIMES = timedelta(seconds=1), 20


@dataclass(slots=True)
class _Ring:
    """What a worker knows about the tenants of a queue."""

    #: The tenant behind which the next scan begins. None: at a random one.
    after: str | None = None
    width: int = TENANTS  #: the number of tenants that the last scan met
    next_of_none: float = 0.0  #: the time of the next scan for the tasks of no tenant (monotonic seconds)


@dataclass(slots=True)
class _Round:
    """What one scan has found so far."""

    documents: list[Document] = field(default_factory=list)
    tenants: int = 0
    is_cut: bool = False  #: whether some tenant has more tasks
    has_future: bool = False

    def take(self, found: Scan, limit: int) -> str | None:
        """Take the whole parts of a batch; return the last tenant. None: the batch holds all that is left."""
        documents = found.documents
        names = [document.get("tenant") for document in documents]
        if len(documents) == limit and names[0] != names[-1]:
            # The part of the last tenant may be cut: it is read again with the next batch.
            documents = documents[: names.index(names[-1])]
        elif len(documents) == limit:
            self.is_cut = True
        self.documents += documents
        self.tenants += len({document.get("tenant") for document in documents})
        self.has_future |= found.has_future
        return str(documents[-1].get("tenant")) if len(found.documents) == limit else None


Ends = tuple[str, str] | None


class TurnScans:
    """Scans queues with fair turns."""

    def __init__(self, worker_id: str, run: Callable[[Operation[Ends]], Awaitable[Ends]]) -> None:
        """`run` runs an operation."""
        self._worker_id = worker_id
        self._run = run
        #: By the queue and the names that are looked for.
        self._rings: dict[tuple[str, tuple[str, ...]], _Ring] = {}

    async def scan(
        self,
        take: TakeScan,
        target: ScanTarget,
        names: Sequence[str],
        horizon_ms: int,
        capacity: int,
        also: list[Filter],
        without: Collection[str],
    ) -> Scan:
        """Take equal parts from the next tenants of the target's queue, and tasks of no tenant beside them."""
        (queue,) = target.queues
        ring = self._rings.setdefault((queue, tuple(names)), _Ring())
        others = {"$nin": sorted(without)} if without else {}
        given = (names, self._worker_id, horizon_ms)

        def take_some(limit: int, bounds: Filter) -> Awaitable[Scan]:
            return take(finding.scan_tenants(queue, *given, limit, {**bounds, **others}, also), note=target.note)

        def take_of_none(limit: int) -> Awaitable[Scan]:
            guards = [*also, {"tenant": None}]
            return take(finding.scan([queue], *given, limit, also=guards, timeout=_TIMEOUT), note=target.note)

        found = await self._scan_ring(ring, queue, capacity, take_some)
        of_none = await self._scan_of_none(ring, capacity // TENANTS, take_of_none)
        is_complete = not found.is_cut and of_none.is_complete
        return Scan([], None, is_complete, found.has_future or of_none.has_future)

    async def _scan_ring(
        self, ring: _Ring, queue: str, capacity: int, take: Callable[[int, Filter], Awaitable[Scan]]
    ) -> _Round:
        begin = ring.after if ring.after is not None else await self._random_place(queue)
        limit = max(1, capacity // max(1, min(ring.width, TENANTS)))
        found = _Round()
        # First from the beginning to the end of the ring, then from its first tenant to the beginning.
        bounds: list[Filter] = [{"$gt": begin}, {"$gte": "", "$lte": begin}]
        for _ in range(TENANTS):
            if len(found.documents) >= capacity:
                break
            last = found.take(await take(limit, bounds[0]), limit)
            if last is not None:
                ring.after = last
                bounds[0] = {**bounds[0], "$gt": last}
                bounds[0].pop("$gte", None)
            elif len(bounds) > 1:
                bounds.pop(0)
            else:
                ring.width = max(1, found.tenants)
                return found
        ring.width, found.is_cut = TENANTS, True
        return found

    async def _random_place(self, queue: str) -> str:
        ends = await self._run(finding.tenants_at_ends(queue))
        return "" if ends is None else between(*ends, random.random())

    @staticmethod
    async def _scan_of_none(ring: _Ring, limit: int, take: Callable[[int], Awaitable[Scan]]) -> Scan:
        """Scan for tasks of no tenant. They have their turn like those of one more tenant."""
        began = monotonic()
        nothing = Scan([], None, is_complete=True, has_future=False)
        if began < ring.next_of_none:
            return nothing
        try:
            found = await take(limit)
        except DatabaseUnavailable:
            if monotonic() - began < _TIMEOUT.total_seconds():
                raise
            found = nothing
        if found.is_complete:
            ring.next_of_none = monotonic() + _TIMES * (monotonic() - began)
        return found
