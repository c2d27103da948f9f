"""Discovery: the change stream first, then the batch query. Both are repeated after any break, so there is no gap."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from time import monotonic
from typing import Any

from mtask.errors import DatabaseTimeout, DatabaseUnavailable, MtaskError, OperationFailed
from mtask.model.rules import HORIZON
from mtask.store import workers
from mtask.store.driver.operation import Operation
from mtask.store.driver.stores import AsyncStore
from mtask.store.layout import setup
from mtask.store.statements.filters import Filter
from mtask.store.streams.wakeups import Event, EventKind, Stream
from mtask.store.tasks import claims, finding
from mtask.worker.admission.controls import Controls
from mtask.worker.admission.limits import Limits, Part
from mtask.worker.admission.quarantine import Quarantine
from mtask.worker.discovery.inbox import MAX_UNSERVED, Hints
from mtask.worker.log import fields, logger
from mtask.worker.running.runner import Runner
from mtask.worker.state.clock import ServerClock
from mtask.worker.state.queue import PreemptionQueue

#: A lapsed lease that nobody preempted for this long is settled by whoever scans.
_SETTLE_GRACE_MS = 2_000
_SETTLE_LIMIT = 500
#: How long settling may wait for a document that is locked; and of how many at once, each alone.
_SETTLE_TIMEOUT, _MAX_APART = timedelta(seconds=1), 16
_PAUSE, _MAX_PAUSE = 0.1, 2.0
_MALFORMED_LIMIT = 1000
#: Between scans that were asked for because the queue had drained, in seconds at least.
_REFILL_PAUSE = 0.05
#: The batch of a queue of which some wait for limits is so many times smaller than that of all others.
_APART = 4
#: This part of a batch keeps a worker busy for a while.
_ENOUGH = 4
#: The batch of a worker's share is smaller, the smaller the share: to find it the server looks through so many batches.
_LOOKED_THROUGH = 4
#: Where little of a long backlog is this worker's, a scan for its share looks through much, for nothing: it may take so
#: long; and the next one comes after so many times what it has taken.
_SHARE_TIMEOUT, _SHARE_TIMES = timedelta(seconds=1), 20
#: So long after the last look at all that is due, in seconds, a refill is for all of it again: what is left to a worker
#: that does not take it, for it is full, or serves it no more, must not stand behind what is younger.
_ALL = 2.0


class Discovery:
    """Finds what is due, or soon will be, and tells `Hints` of it."""

    def __init__(
        self,
        store: AsyncStore,
        stream_store: AsyncStore,
        worker_id: str,
        queues: Sequence[str],
        names: Sequence[str],
        *,
        hints: Hints,
        queue: PreemptionQueue,
        clock: ServerClock,
        runner: Runner,
        controls: Controls,
        limits: Limits,
        quarantine: Quarantine,
        on_control: Callable[[], None],
        on_schedules: Callable[[], None],
        on_dropped: Callable[[], None],
    ) -> None:
        self._store = store
        self._stream_store = stream_store
        self._worker_id = worker_id
        self._queues = list(queues)
        self._names = list(names)
        self._hints = hints
        self._queue = queue
        self._clock = clock
        self._runner = runner
        self._controls = controls
        self._limits = limits
        self._quarantine = quarantine
        self._on_control = on_control
        self._on_schedules = on_schedules
        self._on_dropped = on_dropped
        self._wake_scan = asyncio.Event()
        self._is_full_scan_due = True
        self._are_peers_due = True
        self._is_setup_due = False
        self._is_refill = False
        #: How many tasks were ready after the last scan; and whether only what this worker ranks first for counts: that
        #: was enough, or more may be had of it.
        self._scanned, self._counts_own = 0, False
        self._scanned_at = self._scanned_all_at = 0.0
        self._next_share = 0.0
        #: A refill that was wanted right after the last scan: what that brought is done already.
        self._refill: asyncio.TimerHandle | None = None
        self._is_stopping = False
        self._stream_task: asyncio.Task[None] | None = None
        self.is_ready = asyncio.Event()
        self.scan_cnt = 0
        self.event_cnt = 0

    async def stop(self) -> None:
        """Stop all loops. The stream's wait is cut short: its client is its own, and closes with it."""
        self._is_stopping = True
        self._hints.stop()
        self._wake_scan.set()
        if self._refill is not None:
            self._refill.cancel()
        if self._stream_task is not None:
            self._stream_task.cancel()

    # --- the stream -------------------------------------------------------------------------------------

    async def run_stream(self) -> None:
        """Follow the change stream until `stop`; after any break open a new one and scan again."""
        self._stream_task = asyncio.current_task()
        pause = _PAUSE
        while not self._is_stopping:
            try:
                await self._follow()
                pause = _PAUSE
            except asyncio.CancelledError:
                if not self._is_stopping:
                    raise
            except MtaskError as error:
                if not self._is_stopping:
                    logger.warning("change stream broke, opening a new one", extra=fields(reason=str(error)))
            except Exception:
                logger.exception("change stream failed, opening a new one")
            if not self._is_stopping:
                self.ask_full_scan()  # until it opens, scans are all there is
                await asyncio.sleep(pause * (0.5 + random.random()))
                pause = min(pause * 2, _MAX_PAUSE)

    async def _follow(self) -> None:
        """Open a stream and take its events until it breaks or ends."""
        stream = await Stream.open(self._stream_store, self._worker_id, self._queues, _ms(HORIZON))
        self.ask_full_scan()
        # What changed while there was no stream was not heard of.
        self._on_schedules()
        self._controls.wake()
        try:
            await self._stream_store.while_primary(self._read(stream))
        finally:
            with suppress(Exception):
                await stream.close()

    async def _read(self, stream: Stream) -> None:
        while stream.is_open and not self._is_stopping:
            event = await stream.next()
            if event is not None and not self._take(event):
                return

    def _take(self, event: Event) -> bool:
        """Take one event, without any call to the database; return False where the stream must be opened anew."""
        self.event_cnt += 1
        try:
            return self._take_event(event)
        except Exception as error:
            self._hints.cannot_take(event.task_id, error)
            return True

    def _take_event(self, event: Event) -> bool:
        if event.kind is EventKind.TASK_INSERTED:
            self._hints.push(event.task_id, event.document or {}, is_simple=event.is_simple)
        elif event.kind is EventKind.TASK_CHANGED:
            self._hints.push_changed(
                event.task_id, event.preempt_time, is_begun=event.is_begun, concerns_holder=event.concerns_holder
            )
        elif event.kind is EventKind.WORKER_ORDER and event.task_id == self._worker_id:
            self._on_control()
        elif event.kind in (EventKind.PEERS_CHANGED, EventKind.WORKER_ORDER):
            self._are_peers_due = True
            self._wake_scan.set()
        elif event.kind is EventKind.CONTROLS_CHANGED:
            self._controls.wake()
        elif event.kind is EventKind.SCHEDULES_CHANGED:
            self._on_schedules()
        elif event.kind is EventKind.COLLECTION_LOST:
            logger.warning("the collection was dropped or renamed, starting over")
            self._is_setup_due = True
            return False
        return True

    # --- scans ------------------------------------------------------------------------------------------

    def ask_full_scan(self) -> None:
        """Look for all that waits, soon: what was left out may be served again."""
        self._is_full_scan_due = True
        self._are_peers_due = True  # workers that came while there was no stream were not heard of either
        self._wake_scan.set()

    def scan_soon(self) -> None:
        """Scan for what is due: places are free again that it may take up."""
        self._is_refill = True
        self._wake_scan.set()

    def refill(self) -> None:
        """Scan again soon if what the last scan brought for this worker has drained and more is known to wait."""
        if not self._queue.has_more or self._refill is not None:
            return
        now = monotonic()
        if self._queue.ready_count(now, own_only=self._counts_own) * 4 > self._scanned:
            return
        pause = self._scanned_at + _REFILL_PAUSE - now
        if pause > 0:
            self._refill = asyncio.get_running_loop().call_later(pause, self._refill_late)
        else:
            self._queue.has_more = False
            self._is_refill = True
            self._wake_scan.set()

    def _refill_late(self) -> None:
        self._refill = None
        self.refill()

    async def run_scans(self) -> None:
        """Scan every half horizon until `stop`, and at once after a break or when a drained queue has more."""
        pause = _PAUSE
        next_regular = 0.0
        regular_cnt = 0
        while not self._is_stopping:
            try:
                is_regular = monotonic() >= next_regular
                self._is_refill &= not (is_regular or self._is_full_scan_due)
                await self._scan()
                if is_regular or self._is_full_scan_due:
                    if self._queue.has_more or self._hints.forgot_leases():
                        await self._scan_within(HORIZON, begun_only=True)
                    next_regular = monotonic() + HORIZON.total_seconds() / 2
                    await self._upkeep(regular_cnt)
                    regular_cnt += 1
                pause = _PAUSE
                self.is_ready.set()
            except Exception as error:
                if isinstance(error, MtaskError):
                    logger.warning("scan failed, will be repeated", extra=fields(reason=str(error)))
                else:
                    logger.exception("scan failed, will be repeated")
                # An index that the scan relies on may be gone, with the collection or by hand.
                self._is_setup_due |= isinstance(error, OperationFailed)
                self._wake_scan.clear()
                await self._wait_scan(pause * (0.5 + random.random()))
                pause = min(pause * 2, _MAX_PAUSE)
                continue
            await self._wait_scan(next_regular - monotonic())

    async def _wait_scan(self, seconds: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, seconds)):
                await self._wake_scan.wait()

    async def _scan(self) -> None:
        self._wake_scan.clear()
        is_refill, self._is_refill = self._is_refill, False
        if self._is_setup_due:
            await self._store.run(setup.ensure())
            self._is_setup_due = False
            self._on_dropped()
        if self._are_peers_due:
            await self._refresh_peers()
        if is_refill and await self._scan_share():
            self._queue.has_more = True
        else:
            await self._scan_all(is_refill=is_refill)
        now = monotonic()
        own = self._queue.ready_count(now, own_only=True)
        self._counts_own = own >= self._enough or bool(self._share(now)[0])
        self._scanned, self._scanned_at = own if self._counts_own else self._queue.ready_count(now), now

    @property
    def _enough(self) -> int:
        return self._queue.capacity // _ENOUGH

    def _share(self, now: float) -> tuple[list[Filter], float]:
        """Return this worker's share, as `Hints.share` does, where it may be asked for."""
        # Where places are limited, each queue is scanned by how many there are.
        return ([], 1.0) if now < self._next_share or self._limits.is_any else self._hints.share(self._controls.names)

    async def _scan_share(self) -> bool:
        """Scan for what is due and other workers leave to this one; return whether there is enough of it for now."""
        began = monotonic()
        share, part = self._share(began)
        if not share or began > self._scanned_all_at + _ALL:
            return False
        limit = min(self._queue.capacity, max(self._enough, int(_LOOKED_THROUGH * part * self._queue.capacity)))
        scan = finding.scan(
            self._controls.queues,
            self._controls.names,
            self._worker_id,
            0,
            limit,
            also=[*share, *self._hints.not_left_alone()],
            timeout=_SHARE_TIMEOUT,
        )
        is_enough = has_seen_all = False
        try:
            found = await self._take_scan(scan)
            has_seen_all = found.is_complete
            is_enough = self._queue.ready_count(monotonic(), own_only=True) >= self._enough
        except DatabaseUnavailable:
            if monotonic() - began < _SHARE_TIMEOUT.total_seconds():
                raise
        if has_seen_all or not is_enough:
            self._next_share = monotonic() + _SHARE_TIMES * (monotonic() - began)
        return is_enough

    async def _scan_all(self, *, is_refill: bool) -> None:
        self._scanned_all_at = monotonic()
        found = await self._scan_within(timedelta(0) if is_refill else HORIZON)
        if found.is_complete and is_refill:
            found = await self._scan_within(HORIZON)
        if not found.is_complete:
            self._queue.has_more = True
            if found.has_future:
                # What is not yet due fills the batch: it must not stand before what is.
                await self._scan_within(timedelta(0))

    async def _scan_within(self, horizon: timedelta, *, begun_only: bool = False) -> finding.Scan:
        """Scan, apart for queues of which some has to wait for the limits' places."""
        is_complete, has_future = True, False
        for part in self._limits.parts(self._controls.queues):
            found = await self._scan_part(part, horizon, begun_only=begun_only)
            if not part.is_apart:
                is_complete, has_future = found.is_complete, found.has_future
            elif not found.is_complete:
                self._limits.note_more(part)
                if found.has_future:
                    await self._scan_part(part, timedelta(0), begun_only=begun_only)
        return finding.Scan([], None, is_complete, has_future)

    async def _scan_part(self, part: Part, horizon: timedelta, *, begun_only: bool) -> finding.Scan:
        scan = finding.scan_begun if begun_only else finding.scan
        limit = self._queue.capacity // _APART if part.is_apart else self._queue.capacity
        names, worker_id = self._controls.names, self._worker_id
        also = self._hints.not_left_alone()
        return await self._take_scan(scan(part.queues, names, worker_id, _ms(horizon), limit, part.left_out, also))

    async def _take_scan(self, scan: Operation[finding.Scan]) -> finding.Scan:
        sent = monotonic()
        found = await self._store.run(scan)
        self.scan_cnt += 1
        if found.server_time is not None:
            self._clock.observe(found.server_time, sent, monotonic())
        for document in found.documents:
            self._hints.push_found(document, sent)
        return found

    async def _upkeep(self, count: int) -> None:
        if count % 4 == 1:
            self._controls.wake()  # the stream tells of them; this is for what nobody foresaw
        if self._is_full_scan_due:
            self._is_full_scan_due = False
            try:
                await self._full_upkeep()
            except MtaskError:
                self._is_full_scan_due = True
                raise
        if count % 4 == 0:
            self._hints.look_again(d["_id"] for d in await self._store.run(finding.undiscoverable(_MALFORMED_LIMIT)))
        if count % 2 == 0:
            await self._settle_lapsed()
        else:
            self._are_peers_due = True
        await self._hints.look_at_held([run.task_id for run in self._runner.runs])

    async def _full_upkeep(self) -> None:
        # A collection dropped while no stream was open was not heard of, and a scan of none finds nothing wrong.
        if not await self._store.run(setup.is_there()):
            self._is_setup_due = True
            self._wake_scan.set()
        for name in await self._store.run(finding.unserved_names(self._queues, self._names, MAX_UNSERVED)):
            self._hints.note_unserved(str(name))

    async def _settle_lapsed(self) -> None:
        lapsed = await self._store.run(finding.lapsed(_SETTLE_GRACE_MS, _SETTLE_LIMIT))
        task_ids = [task_id for task_id in lapsed if not self._quarantine.is_left_alone(task_id)]
        if not task_ids:
            return
        try:
            if await self._store.run(claims.settle(task_ids, _SETTLE_TIMEOUT)) < len(task_ids):
                self._hints.look_again(task_ids)  # another worker was faster, or some are malformed
        except (OperationFailed, DatabaseTimeout):
            # One document fails the whole batch, or holds it up: it is malformed, too large, or locked.
            await self._settle_apart(task_ids)

    async def _settle_apart(self, task_ids: Sequence[Any]) -> None:
        """Settle each alone, so that what is locked, or cannot be changed, holds up none of the others."""
        places = asyncio.Semaphore(_MAX_APART)
        await asyncio.gather(*(self._settle_alone(task_id, places) for task_id in task_ids))

    async def _settle_alone(self, task_id: Any, places: asyncio.Semaphore) -> None:
        try:
            async with places:
                await self._store.run(claims.settle([task_id], _SETTLE_TIMEOUT))
        except DatabaseTimeout:
            logger.warning("task is locked, left alone for a while", extra=fields(task=task_id))
            self._quarantine.hold_up(task_id)
        except OperationFailed as error:
            self._hints.doubt(task_id, error)
        except MtaskError as error:
            logger.warning("task not settled", extra=fields(task=task_id, reason=str(error)))

    async def _refresh_peers(self) -> None:
        self._are_peers_due = False
        sent = monotonic()
        live = await self._store.run(workers.live(self._queues))
        if live:  # this worker's own document is there as a rule: an idle worker's clock is read by it, too
            self._clock.observe(live[0]["now"], sent, monotonic())
        # Beside the loop: ranks among a thousand workers take a tenth of a second.
        await asyncio.to_thread(self._hints.prepare_peers, live)
        self._hints.take_peers(live)


def _ms(duration: timedelta) -> int:
    return int(duration / timedelta(milliseconds=1))
