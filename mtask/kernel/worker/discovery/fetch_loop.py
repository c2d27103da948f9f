"""Scans: decides when the worker asks the database for tasks that are due or soon will be.

There is a scan at intervals, after a break of the change stream, and when the queue has drained.
"""

from __future__ import annotations

import asyncio
import random
from time import monotonic

from mtask.database import setup
from mtask.errors import MtaskError, OperationFailed
from mtask.kernel.document.rules import HORIZON
from mtask.kernel.worker.discovery.buffer import PreemptionQueue
from mtask.kernel.worker.discovery.fetch import MAX_ALL_PAUSE, Batches
from mtask.kernel.worker.discovery.fleet import Ranks, Roster
from mtask.kernel.worker.discovery.reaper import TaskJanitor
from mtask.kernel.worker.discovery.rereads import Lookups
from mtask.kernel.worker.process.log import fields, logger, told
from mtask.kernel.worker.process.part import Hooks
from mtask.kernel.worker.process.state import Scope
from mtask.kernel.worker.process.time import Backoff, wake_or_wait

_PAUSE, _MAX_PAUSE = 0.1, 2.0
#: The least time between two refills, in seconds.
_REFILL_PAUSE = 0.05
#: The same where a refill brings the tasks of all workers, as most of these tasks are claimed by the others meanwhile.
#: The pause is also this multiple of the last such scan's duration: on a busy server, helpers must not be what slows
#: the others down.
#: But it is no longer than `MAX_ALL_PAUSE`.
_HELP_PAUSE, _HELP_TIMES = 0.2, 10
#: The change stream tells of malformed tasks. In case it has missed one, each n-th regular scan looks for them: once a
#: minute. A full scan follows a break of the stream, so it looks for malformed tasks, too.
_RECHECKED_EVERY = 12


class Scans:
    """Has the batches of tasks read when they are wanted, and the worker's upkeep done at intervals."""

    def __init__(
        self,
        scope: Scope,
        queue: PreemptionQueue,
        batches: Batches,
        lookups: Lookups,
        ranks: Ranks,
        janitor: TaskJanitor,
        hooks: Hooks,
    ) -> None:
        self._scope = scope
        self._store = scope.store
        self._queue = queue
        self._batches = batches
        self._lookups = lookups
        self._ranks = ranks
        self._roster = Roster(scope, ranks)
        self._janitor = janitor
        #: What features do at each regular scan.
        self.upkeeps = hooks.upkeeps
        self._wake = asyncio.Event()
        #: The numbers of full scans that were asked for, and of those of them that are done. An ask may come while a
        #: scan is under way: then another full scan follows.
        self._full_asked, self._full_done = 1, 0
        self._is_setup_due = False
        #: Whether the next scan is a refill.
        self.is_refill = False
        #: Whether the gate wants more tasks of some queues.
        self._is_for_gate = False
        #: Whether a refill was asked for during the scan that is under way. The scan may bring enough.
        self._is_refill_asked = False
        #: The number of ready tasks after the last scan, and whether only tasks of this worker's share are counted. The
        #: count is that of the share alone if the share had enough tasks, or if another share scan may follow.
        self.scanned, self.counts_own = 0, False
        #: The time of the last scan (monotonic seconds).
        self.scanned_at = 0.0
        #: Set while the last scan left due tasks unread.
        self.was_cut = asyncio.Event()
        #: The timer of a refill that must wait, because the last scan was too recent.
        self.refill_timer: asyncio.TimerHandle | None = None
        #: The timer of a refill that follows a scan which was too early to read all that it should.
        self._put_off: asyncio.TimerHandle | None = None
        self._is_stopping = False
        self.is_ready = asyncio.Event()

    def stop(self) -> None:
        """End `run`."""
        self._is_stopping = True
        self._wake.set()
        for timer in (self.refill_timer, self._put_off):
            if timer is not None:
                timer.cancel()

    def ask_full(self) -> None:
        """Make a full scan soon: for all waiting tasks, not only for tasks of this worker's share."""
        self._full_asked += 1
        self._batches.begin_beside_anew()
        self._roster.ask_now()  # workers may have come or gone while no stream was open
        self._wake.set()

    def ask_peers(self) -> None:
        """Read the live workers again soon. Call this when workers have come or gone."""
        self._roster.ask()
        self._wake.set()

    def ask_setup(self) -> None:
        """Create the collections again and scan soon. Call this when the collections were dropped."""
        self._is_setup_due = True
        self._wake.set()

    def ask_soon(self) -> None:
        """Scan soon for due tasks."""
        self.is_refill = True
        self._wake.set()

    def ask_for_gate(self) -> None:
        """Scan soon the queues of which few tasks wait here at the gate."""
        self._is_for_gate = True
        self._wake.set()

    def refill(self) -> None:
        """Scan again soon if most tasks of the last scan have left the queue and more tasks are known to wait."""
        if self._queue.is_being_filled:
            self._is_refill_asked = True
            return
        if self.refill_timer is not None or not (self.is_low or self._batches.is_low_in_isolated):
            return
        is_helping = not self.counts_own and self._ranks.has_others(self._scope.served.names)
        help_pause = min(max(_HELP_PAUSE, _HELP_TIMES * self._batches.all_took), MAX_ALL_PAUSE)
        pause = help_pause if is_helping else _REFILL_PAUSE
        pause += self.scanned_at - monotonic()
        if pause > 0:
            self.refill_timer = asyncio.get_running_loop().call_later(pause, self._refill_late)
        else:
            self._queue.has_more = False
            self.is_refill = True
            self._wake.set()

    @property
    def is_low(self) -> bool:
        """Whether most tasks of the last scan have left the queue, and more wait."""
        if not self._queue.has_more:
            return False
        return self._queue.ready_count(monotonic(), own_only=self.counts_own) * 4 <= self.scanned

    def _refill_late(self) -> None:
        self.refill_timer = None
        self.refill()

    def _refill_put_off(self) -> None:
        self._put_off = None
        self.refill()

    async def run(self) -> None:
        """Scan until `stop`: at intervals of half a horizon, and soon after each request of another method."""
        pauses = Backoff(_PAUSE, _MAX_PAUSE)
        next_regular = 0.0
        regular_cnt = 0
        has_failed = False
        while not self._is_stopping:
            try:
                asked = self._full_asked
                is_regular, is_full = monotonic() >= next_regular, self._is_full_due
                self.is_refill &= not (is_regular or is_full)
                is_for_gate, self._is_for_gate = self._is_for_gate, False
                if is_regular or is_full or self.is_refill or self._is_setup_due or has_failed:
                    await self.scan(is_full=is_full)
                elif is_for_gate:
                    self._wake.clear()
                    await self._batches.scan_for_gate()
                else:
                    # Workers have come or gone. The stream tells of new tasks, so a scan would bring none.
                    self._wake.clear()
                    await self._read_peers()
                if is_regular or is_full:
                    if self._queue.has_more or self._queue.has_more_isolated or self._lookups.forgot_leases():
                        await self._batches.scan_within(HORIZON, begun_only=True)
                    # All workers scan after a break or a control. Their next scans must not all come at one moment.
                    part = random.uniform(0.5, 1) if is_full else 1
                    next_regular = monotonic() + part * HORIZON.total_seconds() / 2
                    # What is done only now and then must come about, whatever fails before it.
                    regular_cnt += 1
                    await self.upkeep(regular_cnt - 1, is_full=is_full)
                    self._full_done = asked
                pauses.reset()
                has_failed = False
                self.is_ready.set()
            except Exception as error:
                has_failed = True
                if isinstance(error, MtaskError):
                    logger.warning("scan failed, will be repeated", extra=fields(reason=told(error)))
                else:
                    logger.exception("scan failed, will be repeated")
                # An index that the scan needs may have been dropped, either alone or with its collection.
                self._is_setup_due |= isinstance(error, OperationFailed)
                self._note_cut(was_cut=False)
                self._wake.clear()
                await wake_or_wait(self._wake, pauses.next())
                continue
            await wake_or_wait(self._wake, max(0.0, min(next_regular, self._roster.due_at) - monotonic()))

    @property
    def _is_full_due(self) -> bool:
        return self._full_done < self._full_asked

    async def scan(self, *, is_full: bool) -> None:
        """Scan once, and have the refill follow that was asked for meanwhile."""
        self._queue.is_being_filled = True
        try:
            await self._scan_once(is_full=is_full)
        finally:
            self._queue.is_being_filled = False
        if self._is_refill_asked:
            self._is_refill_asked = False
            self.refill()
        if self._batches.is_beside_put_off and self._put_off is None:
            self._batches.is_beside_put_off = False
            self._put_off = asyncio.get_running_loop().call_later(self._batches.until_beside, self._refill_put_off)

    async def _scan_once(self, *, is_full: bool) -> None:
        self._wake.clear()
        is_refill, self.is_refill = self.is_refill, False
        if self._is_setup_due:
            await self._store.run(setup.ensure())
            self._is_setup_due = False
            self._scope.signals.collections_made.send()
        await self._read_peers()
        if is_refill and self._batches.is_low_in_isolated:
            await self._batches.scan_isolated()
        was_cut = is_refill and await self._batches.scan_share()
        if not was_cut and not is_full and (is_refill or self.was_cut.is_set()):
            may_go_on = await self._batches.look_at_all(is_refill=is_refill)
            was_cut = may_go_on and (not is_refill or await self._batches.scan_share())
        if not was_cut:
            was_cut = await self._batches.scan_all(is_refill=is_refill)
            if was_cut and is_refill and self._queue.ready_count(monotonic(), own_only=True) * 2 < self._queue.capacity:
                await self._batches.scan_share()
        self._note_cut(was_cut=was_cut)
        self._count_ready(is_refill=is_refill)

    def _count_ready(self, *, is_refill: bool) -> None:
        now = monotonic()
        counts_own = self._batches.has_enough_own or self._batches.has_share
        count = self._queue.ready_count(now, own_only=counts_own)
        if not is_refill and self.was_cut.is_set() and counts_own == self.counts_own:
            # A scan that is no refill may have brought little. The next refill comes as if it had not been.
            count = max(count, self.scanned)
        self.scanned, self.scanned_at, self.counts_own = count, now, counts_own

    @property
    def scan_cnt(self) -> int:
        """The number of batch queries so far."""
        return self._batches.count

    @property
    def is_in_backlog(self) -> bool:
        """Whether this worker works off a plain backlog: more due tasks wait than the last scan has brought."""
        return self.was_cut.is_set() and self._batches.is_plain

    def _note_cut(self, *, was_cut: bool) -> None:
        if was_cut:
            self.was_cut.set()
        else:
            self.was_cut.clear()

    async def is_any_due(self) -> bool:
        """Whether a task is due that this worker may take now. Raises DatabaseError."""
        return await self._batches.is_any_due()

    async def upkeep(self, count: int, *, is_full: bool) -> None:
        """Do what is due after regular scan number `count`."""
        if is_full:
            await self._full_upkeep()
        if is_full or count % _RECHECKED_EVERY == 0:
            await self._janitor.look_for_malformed()
        for upkeep in self.upkeeps:
            await upkeep(count, is_full=is_full)
        if count % 2 == 0:
            await self._janitor.settle_lapsed()
        else:
            self._roster.ask_now()
        await self._lookups.check_held([run.task_id for run in self._scope.ledger.runs])

    async def _full_upkeep(self) -> None:
        # A collection may have been dropped while no stream was open. A scan of a dropped collection reports no error.
        if not await self._store.run(setup.is_there()):
            self._is_setup_due = True
            self._wake.set()
        await self._janitor.note_unserved()

    async def _read_peers(self) -> None:
        if await self._roster.read_if_due():
            self._batches.begin_share_anew()
