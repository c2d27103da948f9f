"""Scans: finds tasks that are due or soon will be, with batch queries.

There is a scan at intervals, after a break of the change stream, and when the queue has drained.
"""

from __future__ import annotations

import asyncio
import random
from datetime import timedelta
from time import monotonic

from mtask.errors import DatabaseUnavailable, MtaskError, OperationFailed
from mtask.model.rules import HORIZON
from mtask.store import workers
from mtask.store.driver.operation import Operation
from mtask.store.layout import setup
from mtask.store.statements.filters import Filter, other_than, without_tenants
from mtask.store.tasks import finding
from mtask.worker.admission.admission import Admission
from mtask.worker.admission.limits import ScanTarget
from mtask.worker.discovery.callback_janitor import CallbackJanitor
from mtask.worker.discovery.flow_janitor import FlowJanitor
from mtask.worker.discovery.inbox import Inbox
from mtask.worker.discovery.janitor import Janitor
from mtask.worker.discovery.lookups import Lookups
from mtask.worker.discovery.ranks import Ranks
from mtask.worker.discovery.turns import TurnScans
from mtask.worker.log import fields, logger
from mtask.worker.state.queue import PreemptionQueue
from mtask.worker.state.scope import Scope
from mtask.worker.state.timing import Backoff, wake_or_wait

_PAUSE, _MAX_PAUSE = 0.1, 2.0
#: The least time between two refills, in seconds.
_REFILL_PAUSE = 0.05
#: The same where a refill brings the tasks of all workers, as most of these tasks are claimed by the others meanwhile.
#: The pause is also this multiple of the last such scan's duration: on a busy server, helpers must not be what slows
#: the others down.
#: But it is no longer than `_ALL`.
_HELP_PAUSE, _HELP_TIMES = 0.2, 10
#: A queue with parked tasks is scanned alone. The batch of this scan is smaller: the usual size is divided by this
#: number.
_APART = 4
#: A share scan looks only for tasks of this worker's share. To be worth it, the scan must find enough tasks: at least
#: the queue's capacity divided by this number.
_ENOUGH = 4
#: The number of documents that the server should read for a share scan, as a multiple of the queue's capacity. If the
#: share is small, few of the documents read belong to it. So the batch of the scan is small, too.
_LOOKED_THROUGH = 4
#: The first value: the time limit of a share scan. It may read many documents of a long backlog and find few tasks.
#: The second value: the pause after a share scan, as a multiple of the scan's duration. There is a pause if the scan
#: found all tasks of the share, or too few to be worth it.
_SHARE_TIMEOUT, _SHARE_TIMES = timedelta(seconds=1), 20
#: After this time, in seconds, a refill scans the whole backlog again. If all refills scanned only this worker's share,
#: older tasks of a full or departed worker would wait behind newer tasks.
_ALL = 2.0
#: While the stream is closed: the time before the end of a lease at which a begun task is looked for, in ms, and the
#: most tasks of one look.
_URGENT_MS, _URGENT_CNT = 1_000, 200


class Scans:
    """Finds tasks that are due or soon will be, and puts them into the inbox."""

    def __init__(
        self,
        scope: Scope,
        queue: PreemptionQueue,
        admission: Admission,
        inbox: Inbox,
        lookups: Lookups,
        ranks: Ranks,
        janitor: Janitor,
        flow_janitor: FlowJanitor,
        callback_janitor: CallbackJanitor,
    ) -> None:
        self._scope = scope
        self._store = scope.store
        self._queue = queue
        self._controls = admission.controls
        self._limits = admission.limits
        self._quarantine = admission.quarantine
        self._keys = admission.keys
        self._inbox = inbox
        self._lookups = lookups
        self._ranks = ranks
        self._janitor = janitor
        self._flow_janitor = flow_janitor
        self._callback_janitor = callback_janitor
        self._turns = TurnScans(scope.worker_id, self._take_scan, scope.store.run)
        self._wake = asyncio.Event()
        self._is_full_due = True
        self._are_peers_due = True
        self._is_setup_due = False
        self._is_refill = False
        #: The number of ready tasks after the last scan, and whether only tasks of this worker's share are counted. The
        #: count is limited to the share if the share had enough tasks, or if another share scan may follow.
        self._scanned, self._counts_own = 0, False
        self._scanned_at = self._scanned_all_at = 0.0
        #: The duration of the last scan for the tasks of all workers, in seconds.
        self._scan_all_took = 0.0
        self._next_share = 0.0
        #: The position behind which the next share scan goes on: a filter. None: it begins with the first due task.
        self._position: Filter | None = None
        #: Set while the last scan left due tasks unread.
        self.was_cut = asyncio.Event()
        #: The timer of a refill that must wait, because the last scan was too recent.
        self._refill: asyncio.TimerHandle | None = None
        self._is_stopping = False
        self.is_ready = asyncio.Event()
        self.scan_cnt = 0

    def stop(self) -> None:
        """End `run`."""
        self._is_stopping = True
        self._wake.set()
        if self._refill is not None:
            self._refill.cancel()

    def ask_full(self) -> None:
        """Make a full scan soon: for all waiting tasks, not only for tasks of this worker's share."""
        self._is_full_due = True
        self.ask_peers()  # workers may have come or gone while no stream was open

    def ask_peers(self) -> None:
        """Read the live workers again and scan soon. Call this when workers have come or gone."""
        self._are_peers_due = True
        self._wake.set()

    def ask_setup(self) -> None:
        """Create the collections again and scan soon. Call this when the collections were dropped."""
        self._is_setup_due = True
        self._wake.set()

    def ask_soon(self) -> None:
        """Scan soon for due tasks. Call this when permits are free again."""
        self._is_refill = True
        self._wake.set()

    def refill(self) -> None:
        """Scan again soon if most tasks of the last scan have left the queue and more tasks are known to wait."""
        if not self._queue.has_more or self._refill is not None:
            return
        now = monotonic()
        if self._queue.ready_count(now, own_only=self._counts_own) * 4 > self._scanned:
            return
        is_helping = not self._counts_own and self._ranks.has_others(self._controls.names)
        help_pause = min(max(_HELP_PAUSE, _HELP_TIMES * self._scan_all_took), _ALL)
        pause = help_pause if is_helping else _REFILL_PAUSE
        pause += self._scanned_at - now
        if pause > 0:
            self._refill = asyncio.get_running_loop().call_later(pause, self._refill_late)
        else:
            self._queue.has_more = False
            self._is_refill = True
            self._wake.set()

    def _refill_late(self) -> None:
        self._refill = None
        self.refill()

    async def run(self) -> None:
        """Scan until `stop`: at intervals of half a horizon, and soon after each request of another method."""
        pauses = Backoff(_PAUSE, _MAX_PAUSE)
        next_regular = 0.0
        regular_cnt = 0
        while not self._is_stopping:
            try:
                is_regular = monotonic() >= next_regular
                self._is_refill &= not (is_regular or self._is_full_due)
                await self._scan()
                if is_regular or self._is_full_due:
                    if self._queue.has_more or self._lookups.forgot_leases():
                        await self._scan_within(HORIZON, begun_only=True)
                    # All workers scan after a break or a control. Their next scans must not all come at one moment.
                    part = random.uniform(0.5, 1) if self._is_full_due else 1
                    next_regular = monotonic() + part * HORIZON.total_seconds() / 2
                    # What is done only now and then must come about, whatever fails before it.
                    regular_cnt += 1
                    await self._upkeep(regular_cnt - 1)
                pauses.reset()
                self.is_ready.set()
            except Exception as error:
                if isinstance(error, MtaskError):
                    logger.warning("scan failed, will be repeated", extra=fields(reason=str(error)))
                else:
                    logger.exception("scan failed, will be repeated")
                # An index that the scan needs may have been dropped, either alone or with its collection.
                self._is_setup_due |= isinstance(error, OperationFailed)
                self._note_cut(was_cut=False)
                self._wake.clear()
                await wake_or_wait(self._wake, pauses.next())
                continue
            await wake_or_wait(self._wake, max(0.0, next_regular - monotonic()))

    async def _scan(self) -> None:
        self._wake.clear()
        is_refill, self._is_refill = self._is_refill, False
        if self._is_setup_due:
            await self._store.run(setup.ensure())
            self._is_setup_due = False
            self._scope.signals.collections_made.send()
        if self._are_peers_due:
            await self._refresh_peers()
        was_cut = is_refill and await self._scan_share()
        if not was_cut:
            was_cut = await self._scan_all(is_refill=is_refill)
            if was_cut and is_refill and self._queue.ready_count(monotonic(), own_only=True) * 2 < self._queue.capacity:
                await self._scan_share()
        self._note_cut(was_cut=was_cut)
        now = monotonic()
        own = self._queue.ready_count(now, own_only=True)
        self._counts_own = own >= self._enough or bool(self._share(now)[0])
        self._scanned, self._scanned_at = own if self._counts_own else self._queue.ready_count(now), now

    def _not_left_alone(self) -> list[Filter]:
        """Return filters that exclude the tasks that this worker must not try now, or cannot decrypt.

        Each of the first is looked up when its pause is over. If such tasks filled a batch, the scan would miss other
        tasks.
        """
        return [*other_than(self._quarantine.left_alone()), *self._keys.guard()]

    @property
    def _enough(self) -> int:
        return self._queue.capacity // _ENOUGH

    @property
    def is_plain(self) -> bool:
        """Whether the tasks of a backlog differ in priority and age alone: no limits, no turns, no paused tenant."""
        return not (self._limits.is_any or self._controls.fair_queues or self._controls.paused_tenants)

    @property
    def is_in_backlog(self) -> bool:
        """Whether this worker works off a plain backlog: more due tasks wait than the last scan has brought."""
        return self.was_cut.is_set() and self.is_plain

    def _note_cut(self, *, was_cut: bool) -> None:
        if was_cut:
            self.was_cut.set()
        else:
            self.was_cut.clear()

    async def look_for_urgent(self) -> None:
        """Find the tasks that go before those of the backlog, for a worker whose stream is closed.

        These are due tasks of a higher priority than the next one, and begun tasks whose lease ends soon. There are
        few of them. Raises DatabaseError.
        """
        queues, names, worker_id = self._controls.queues, self._controls.names, self._scope.worker_id
        also = self._not_left_alone()
        await self._take_scan(finding.scan_begun(queues, names, worker_id, _URGENT_MS, _URGENT_CNT, also=also))
        priority = self._queue.next_priority(monotonic())
        if priority is not None:
            above = {"task_option.priority": {"$gt": priority}}
            await self._take_scan(finding.scan(queues, names, worker_id, 0, _URGENT_CNT, also=[*also, above]))

    def _share(self, now: float) -> tuple[list[Filter], float]:
        """Return the result of `Ranks.share`, but without a filter if no share scan may be made now."""
        # If some queue has a limit, there are no share scans: each queue is scanned as its permits allow. Nor are there
        # if a tenant is paused, or tenants take turns.
        return self._ranks.share(self._controls.names) if self.is_plain and now >= self._next_share else ([], 1.0)

    async def _scan_share(self) -> bool:
        """Scan for due tasks of this worker's share; return whether the scan found enough tasks for now."""
        began = monotonic()
        share, fraction = self._share(began)
        if not share or began > self._scanned_all_at + _ALL:
            return False
        limit = min(self._queue.capacity, max(self._enough, int(_LOOKED_THROUGH * fraction * self._queue.capacity)))
        is_enough = has_seen_all = False
        try:
            behind = [] if self._position is None else [self._position]
            found = await self._take_share([*share, *behind], limit)
            if behind and found.is_complete:  # the share goes on before the position, if at all
                found = await self._take_share(share, limit)
            has_seen_all = found.is_complete
            is_enough = self._queue.ready_count(monotonic(), own_only=True) >= self._enough
        except DatabaseUnavailable:
            if monotonic() - began < _SHARE_TIMEOUT.total_seconds():
                raise
        if has_seen_all or not is_enough:
            self._next_share = monotonic() + _SHARE_TIMES * (monotonic() - began)
        if is_enough:
            self._queue.has_more = True
            self._queue.drop_behind_own()
        return is_enough

    async def _take_share(self, guards: list[Filter], limit: int) -> finding.Scan:
        """Scan for due tasks that these guards let through, and note the position of the last one."""
        scan = finding.scan(
            self._controls.queues,
            self._controls.names,
            self._scope.worker_id,
            0,
            limit,
            also=[*guards, *self._not_left_alone()],
            timeout=_SHARE_TIMEOUT,
        )
        found = await self._take_scan(scan)
        self._position = None if found.is_complete else finding.behind(found.documents[-1])
        return found

    async def _scan_all(self, *, is_refill: bool) -> bool:
        """Scan for the tasks of all workers that are due, or will be within the horizon.

        A refill looks within the horizon only if the scan has found all due tasks. Return whether due tasks were left
        unread.
        """
        self._scanned_all_at = monotonic()
        self._position = None
        found = await self._scan_within(timedelta(0) if is_refill else HORIZON)
        self._scan_all_took = monotonic() - self._scanned_all_at
        if found.is_complete and is_refill:
            found = await self._scan_within(HORIZON)
        if found.is_complete:
            return False
        self._queue.has_more = True
        if found.has_future:
            # Tasks that are not yet due may have filled the batch and kept due tasks out. So scan again, only for due
            # tasks.
            found = await self._scan_within(timedelta(0))
        return not found.is_complete

    async def _scan_within(self, horizon: timedelta, *, begun_only: bool = False) -> finding.Scan:
        """Scan all queues. Each queue with parked tasks gets a scan of its own."""
        is_complete, has_future = True, False
        for target in self._limits.scan_targets(self._controls.queues):
            found = await self._scan_target(target, horizon, begun_only=begun_only)
            if not target.is_apart:
                is_complete, has_future = is_complete and found.is_complete, has_future or found.has_future
            elif not found.is_complete:
                self._limits.note_more(target)
                if found.has_future:
                    await self._scan_target(target, timedelta(0), begun_only=begun_only)
        return finding.Scan([], None, is_complete, has_future)

    async def _scan_target(self, target: ScanTarget, horizon: timedelta, *, begun_only: bool) -> finding.Scan:
        limit = self._queue.capacity // _APART if target.is_apart else self._queue.capacity
        names, worker_id = self._controls.names, self._scope.worker_id
        also = self._not_left_alone()
        if target.tenant is not None:
            of_tenant = finding.scan_tenant(target.queues, target.tenant, names, worker_id, _ms(horizon), limit, also)
            return await self._take_scan(of_tenant)
        if target.is_fair and not begun_only:
            return await self._turns.scan(target, names, _ms(horizon), limit, also)
        scan = finding.scan_begun if begun_only else finding.scan
        also += without_tenants(target.excluded_tenants)
        return await self._take_scan(
            scan(target.queues, names, worker_id, _ms(horizon), limit, target.excluded_keys, also)
        )

    async def _take_scan(self, scan: Operation[finding.Scan]) -> finding.Scan:
        sent = monotonic()
        found = await self._store.run(scan)
        self.scan_cnt += 1
        if found.server_time is not None:
            self._scope.clock.observe(found.server_time, sent, monotonic())
        self._inbox.push_all_found(found.documents, sent)
        return found

    async def _upkeep(self, count: int) -> None:
        if count % 4 == 1:
            self._controls.wake()  # the change stream may have missed a change of the controls
        if self._is_full_due:
            self._is_full_due = False
            try:
                await self._full_upkeep()
            except MtaskError:
                self._is_full_due = True
                raise
        if count % 4 == 0:
            await self._janitor.look_for_malformed()
        await self._flow_janitor.look_after(count)
        await self._callback_janitor.look_after(count)
        if count % 2 == 0:
            await self._janitor.settle_lapsed()
        else:
            self._are_peers_due = True
        await self._lookups.check_held([run.task_id for run in self._scope.ledger.runs])

    async def _full_upkeep(self) -> None:
        # A collection may have been dropped while no stream was open. A scan of a dropped collection reports no error.
        if not await self._store.run(setup.is_there()):
            self._is_setup_due = True
            self._wake.set()
        await self._janitor.note_unserved()
        await self._flow_janitor.look_for_flows()
        await self._callback_janitor.look_for_callbacks()

    async def _refresh_peers(self) -> None:
        self._are_peers_due = False
        sent = monotonic()
        live = await self._store.run(workers.live(list(self._scope.queues)))
        if live:  # each document holds the server's time, so an idle worker learns this time, too
            self._scope.clock.observe(live[0]["now"], sent, monotonic())
        await self._ranks.take(live)
        self._position = None  # the share has changed


def _ms(duration: timedelta) -> int:
    return int(duration / timedelta(milliseconds=1))
