"""Looks: reads at intervals what the change stream would report, while the worker works off a backlog without a stream.

A look costs a few small reads, however many writes the server has taken since the last one. A stream costs the server
two entries of the oplog for each task of each worker.
"""

from __future__ import annotations

from time import monotonic
from typing import Any

from mtask.features.controls.worker import Controls
from mtask.kernel.driver.stores import AsyncStore
from mtask.kernel.operations.change_stream import Traffic, read_orders
from mtask.kernel.worker.discovery.fetch import Batches
from mtask.kernel.worker.discovery.fetch_loop import Scans
from mtask.kernel.worker.discovery.rereads import Lookups
from mtask.kernel.worker.process.scope import Scope

#: The interval between two looks, in seconds.
INTERVAL = 0.25
#: Urgent tasks and schedules are looked for with each n-th look only. A look for urgent tasks passes the keys of the
#: index that claims have removed, and the server keeps these for minutes. Each m-th look asks for a full scan, which
#: also reads the live workers and looks for flows and what features have left.
_URGENT_EVERY, _SCHEDULES_EVERY, _FULL_EVERY = 2, 4, 20


class Looks:
    """Reads this worker's orders, the controls, its own runs, and the tasks that go before the backlog."""

    def __init__(
        self, scope: Scope, store: AsyncStore, controls: Controls, scans: Scans, batches: Batches, lookups: Lookups
    ) -> None:
        """`store` has the connections of the change stream, which are free now."""
        self._scope = scope
        self._store = store
        self._controls = controls
        self._scans = scans
        self._batches = batches
        self._lookups = lookups
        self._count = 0
        self._control: Any = None
        #: The run_ids of the runs that this worker held at the last look.
        self._held: frozenset[str] = frozenset()

    def begin(self) -> None:
        """Forget the former rest of the stream."""
        self._count, self._control, self._held = 0, None, frozenset()

    async def take(self, traffic: Traffic) -> None:
        """Look once, and note in `traffic` how many writes the server has taken. Raises DatabaseError."""
        self._count += 1
        await self.look_at_orders(traffic)
        self._controls.wake()
        if self._count % _SCHEDULES_EVERY == 0:
            self._scope.signals.schedules_changed.send()
        if self._count % _FULL_EVERY == 0:
            self._scans.ask_full()
        await self._look_at_held()
        if self._count % _URGENT_EVERY == 0:
            await self._batches.look_for_urgent()

    async def look_at_orders(self, traffic: Traffic) -> None:
        """Look for orders to this worker alone, and note the server's writes. Raises DatabaseError."""
        orders, written = await read_orders(self._store, self._scope.worker_id)
        if written is not None:
            traffic.note(written.time, written.inc, monotonic())
        if orders != self._control:  # also at the first look: nothing reported the orders just before it
            self._scope.signals.heartbeat_wanted.send()
        self._control = orders

    async def _look_at_held(self) -> None:
        """Check the runs that were held at the last look, too. Most runs of a quick backlog have ended before that."""
        runs = [run for run in self._scope.ledger.held if run.run_id in self._held]
        self._held = frozenset(run.run_id for run in self._scope.ledger.held)
        await self._lookups.check_held([run.task_id for run in runs])
