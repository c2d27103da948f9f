"""Scans of queues with fair turns: each takes equal parts from some tenants, and the next scan goes on behind them.

A scan in the order of age would find only tasks of the tenant with the longest backlog. The tenants form a ring, sorted
by their names. A worker begins at a random one.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from time import monotonic
from typing import Protocol

from mtask.errors import DatabaseUnavailable
from mtask.features.limits.targets import ScanTarget
from mtask.kernel.document.identity import between
from mtask.kernel.driver.operation import Operation
from mtask.kernel.operations import find_due as finding
from mtask.kernel.operations.find_due import Document, Scan, place_of
from mtask.kernel.statements.filters import Filter
from mtask.kernel.worker.discovery.buffer import ALL, Order
from mtask.kernel.worker.process.time import seconds_of

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


class TakeScan(Protocol):
    """Runs a scan and puts what it finds into the inbox. Before that, it calls `note`."""

    def __call__(self, scan: Operation[Scan], /, *, note: Callable[[Scan], None]) -> Awaitable[Scan]:
        """Return the scan."""


class TurnScans:
    """Scans queues with fair turns."""

    def __init__(
        self,
        worker_id: str,
        take: TakeScan,
        run: Callable[[Operation[Ends]], Awaitable[Ends]],
        note: Callable[[ScanTarget, Mapping[str | None, Order], bool], None],
    ) -> None:
        """`take` runs a scan and queues its tasks, and `run` runs another operation.

        `note` is told up to which order a scan of a target brings the tasks of some tenants, and whether it was cut.
        """
        self._note_bounds = note
        self._worker_id = worker_id
        self._take = take
        self._run = run
        #: By the queue and the names that are looked for.
        self._rings: dict[tuple[str, tuple[str, ...]], _Ring] = {}

    async def scan(
        self, target: ScanTarget, names: Sequence[str], horizon_ms: int, capacity: int, also: list[Filter]
    ) -> Scan:
        """Take equal parts from the next tenants of the target's queue, and tasks of no tenant beside them."""
        (queue,) = target.queues
        ring = self._rings.setdefault((queue, tuple(names)), _Ring())
        found = await self._scan_ring(ring, target, names, horizon_ms, capacity, also)
        of_none = await self._scan_of_none(ring, target, names, horizon_ms, capacity // TENANTS, also)
        is_complete = not found.is_cut and of_none.is_complete
        return Scan([], None, is_complete, found.has_future or of_none.has_future)

    async def _scan_ring(
        self, ring: _Ring, target: ScanTarget, names: Sequence[str], horizon_ms: int, capacity: int, also: list[Filter]
    ) -> _Round:
        (queue,) = target.queues
        begin = ring.after if ring.after is not None else await self._random_place(queue)
        limit = max(1, capacity // max(1, min(ring.width, TENANTS)))
        excluded = sorted(tenant for of in (None, queue) for tenant in target.paused_tenants.get(of, ()))
        others = {"$nin": excluded} if excluded else {}
        found = _Round()
        # First from the beginning to the end of the ring, then from its first tenant to the beginning.
        bounds: list[Filter] = [{"$gt": begin}, {"$gte": "", "$lte": begin}]
        for _ in range(TENANTS):
            if len(found.documents) >= capacity:
                break
            scan = finding.scan_tenants(queue, names, self._worker_id, horizon_ms, limit, {**bounds[0], **others}, also)
            last = found.take(await self._take(scan, note=partial(self._note, target, limit)), limit)
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

    def _note(self, target: ScanTarget, limit: int, found: Scan) -> None:
        """Note how far the windows of a limited queue hold the tasks of these tenants: the last one's may be cut."""
        if not found.documents:
            return
        bounds: dict[str | None, Order] = {}
        for document in found.documents:
            place, tenant = place_of(document), document.get("tenant")
            if place is not None and (tenant is None or type(tenant) is str):
                bounds[tenant] = (True, -place[0], seconds_of(place[1]))
        is_cut = len(found.documents) >= limit
        last = found.documents[-1].get("tenant")
        bounds = {tenant: bound if is_cut and tenant == last else ALL for tenant, bound in bounds.items()}
        self._note_bounds(target, bounds, is_cut)

    async def _random_place(self, queue: str) -> str:
        ends = await self._run(finding.tenants_at_ends(queue))
        return "" if ends is None else between(*ends, random.random())

    async def _scan_of_none(
        self, ring: _Ring, target: ScanTarget, names: Sequence[str], horizon_ms: int, limit: int, also: list[Filter]
    ) -> Scan:
        """Scan for tasks of no tenant. They have their turn like those of one more tenant."""
        began = monotonic()
        nothing = Scan([], None, is_complete=True, has_future=False)
        if began < ring.next_of_none:
            return nothing
        guards = [*also, {"tenant": None}]
        scan = finding.scan(target.queues, names, self._worker_id, horizon_ms, limit, also=guards, timeout=_TIMEOUT)
        try:
            found = await self._take(scan, note=partial(self._note, target, limit))
        except DatabaseUnavailable:
            if monotonic() - began < _TIMEOUT.total_seconds():
                raise
            found = nothing
        if found.is_complete:
            ring.next_of_none = monotonic() + _TIMES * (monotonic() - began)
        return found
