"""Batches: the batch queries that find tasks which are due or soon will be, and put them into the inbox.

`mtask.kernel.worker.discovery.fetch_loop` decides when there is a scan. A scan is one of these queries, or several.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from time import monotonic

from mtask.errors import DatabaseUnavailable
from mtask.kernel.document.rules import HORIZON
from mtask.kernel.driver.operation import Operation
from mtask.kernel.operations import find_due as finding
from mtask.kernel.statements.filters import Filter, other_than, without_tenants
from mtask.kernel.worker.discovery.buffer import PreemptionQueue
from mtask.kernel.worker.discovery.fleet import Ranks
from mtask.kernel.worker.discovery.inbox import Inbox
from mtask.kernel.worker.discovery.quarantine import Quarantine
from mtask.kernel.worker.process.part import Gate, Hooks, ScanTarget
from mtask.kernel.worker.process.state import Scope

#: The batch of a scan that is one of several is smaller: the usual size is divided by this number.
_APART = 4
#: A share scan looks only for tasks of this worker's share. To be worth it, the scan must find enough tasks: at least
#: the queue's capacity divided by this number. A look at the tasks of all workers brings as many.
_ENOUGH = 4
#: The number of documents that the server should read for a share scan, as a multiple of the queue's capacity. If the
#: share is small, few of the documents read belong to it. So the batch of the scan is small, too.
_LOOKED_THROUGH = 4
#: The first value: the time limit of a share scan. It may read many documents of a long backlog and find few tasks.
#: The second value: the pause after a share scan, as a multiple of the scan's duration. There is a pause if the scan
#: found all tasks of the share, or too few to be worth it. Tests tune both.
SHARE_TIMEOUT, SHARE_TIMES = timedelta(seconds=1), 20
#: A scan that leaves the tasks of isolated handlers out passes the keys of all of them. The first value: the time limit
#: of such a scan. The others: the pause after one that has found all, or has met the limit, as a multiple of the scan's
#: duration, and the longest such pause in seconds. Tests tune `BESIDE_TIMEOUT`.
BESIDE_TIMEOUT, _BESIDE_TIMES, _MAX_BESIDE_PAUSE = timedelta(seconds=1), 20, 5.0
#: After this time, in seconds, a refill looks at the tasks of all workers again. If all refills scanned only this
#: worker's share, older tasks of a full or departed worker would wait behind newer tasks.
MAX_ALL_PAUSE = 2.0
#: While the stream is closed: the time before the end of a lease at which a begun task is looked for, in ms, and the
#: most tasks of one look.
_URGENT_MS, _URGENT_CNT = 1_000, 200


class Batches:
    """Asks the database for tasks, and puts them into the inbox."""

    def __init__(
        self,
        scope: Scope,
        queue: PreemptionQueue,
        quarantine: Quarantine,
        gate: Gate | None,
        inbox: Inbox,
        ranks: Ranks,
        hooks: Hooks,
    ) -> None:
        self._scope = scope
        self._store = scope.store
        self._queue = queue
        self._served = scope.served
        self._gate = gate
        self._quarantine = quarantine
        self._hooks = hooks
        self._inbox = inbox
        self._ranks = ranks
        #: The time of the last scan for the tasks of all workers (monotonic seconds).
        self.all_at = 0.0
        #: The duration of the last scan for the tasks of all workers, in seconds.
        self.all_took = 0.0
        #: The time before which no share scan is made (monotonic seconds).
        self.next_share = 0.0
        #: The time before which no scan leaves out the tasks of isolated handlers (monotonic seconds).
        self.next_beside = 0.0
        #: Whether the last scan left out what it should have read beside the tasks of isolated handlers, as it was too
        #: early for that. Then `until_beside` tells when to scan.
        self.is_beside_put_off = False
        #: The position behind which the next share scan goes on: a filter. None: it begins with the first due task.
        self.position: Filter | None = None
        self.count = 0  #: the number of queries so far

    @property
    def is_plain(self) -> bool:
        """Whether the tasks of a backlog differ in priority and age alone: no gate, no turns, no paused tenant."""
        return not (self._served.is_limited or self._served.fair_queues or self._served.paused_tenants)

    @property
    def _enough(self) -> int:
        return self._queue.capacity // _ENOUGH

    @property
    def has_enough_own(self) -> bool:
        """Whether enough tasks of this worker's share are ready in the queue."""
        return self._queue.ready_count(monotonic(), own_only=True) >= self._enough

    @property
    def is_low_in_isolated(self) -> bool:
        """Whether few tasks of isolated handlers are left in the queue, and more wait."""
        return self._queue.has_more_isolated and self._queue.isolated_count(monotonic()) * _ENOUGH < self._enough

    @property
    def _is_crowded(self) -> bool:
        """Whether tasks that wait for an executor take much of the queue, beside those of other handlers."""
        return 0 < self._enough <= self._queue.isolated_count(monotonic())

    @property
    def _names(self) -> Sequence[str]:
        """The names whose tasks are wanted now: without those of isolated handlers if enough of them are here."""
        names = self._served.names
        return [name for name in names if not self._queue.is_isolated(name)] if self._is_crowded else names

    @property
    def until_beside(self) -> float:
        """The seconds until a scan may leave the tasks of isolated handlers out."""
        return max(0.0, self.next_beside - monotonic())

    def begin_beside_anew(self) -> None:
        """Let the next scan read all that it should. Call this when tasks may have come unheard."""
        self.next_beside = 0.0

    def begin_share_anew(self) -> None:
        """Let the next share scan begin with the first due task. Call this when the share has changed."""
        self.position = None

    async def look_for_urgent(self) -> None:
        """Find the tasks that go before those of the backlog, for a worker whose stream is closed.

        These are due tasks of a higher priority than the next one, and begun tasks whose lease ends soon. There are
        few of them. Raises DatabaseError.
        """
        queues, names, worker_id = self._served.queues, self._served.names, self._scope.worker_id
        also = self._not_left_alone()
        await self.take(finding.scan_begun(queues, names, worker_id, _URGENT_MS, _URGENT_CNT, also=also))
        priority = self._queue.next_priority(monotonic())
        if priority is not None:
            above = {"task_option.priority": {"$gt": priority}}
            await self.take(finding.scan(queues, self._names, worker_id, 0, _URGENT_CNT, also=[*also, above]))

    @property
    def has_share(self) -> bool:
        """Whether this worker has a share of the backlog, and a share scan may be made now."""
        return bool(self._share(monotonic())[0])

    def _share(self, now: float) -> tuple[list[Filter], float]:
        """Return the result of `Ranks.share`, but without a filter if no share scan may be made now."""
        # There are no share scans if tasks may have to wait at the gate: each queue is scanned as the gate allows. Nor
        # are there if a tenant is paused, or tenants take turns.
        return self._ranks.share(self._served.names) if self.is_plain and now >= self.next_share else ([], 1.0)

    async def scan_share(self) -> bool:
        """Scan for due tasks of this worker's share; return whether the scan found enough tasks for now."""
        began = monotonic()
        (share, fraction), ranks = self._share(began), self._ranks.version
        if not share or began > self.all_at + MAX_ALL_PAUSE:
            return False
        limit = min(self._queue.capacity, max(self._enough, int(_LOOKED_THROUGH * fraction * self._queue.capacity)))
        is_enough = has_seen_all = False
        names = self._names
        with _at_most(SHARE_TIMEOUT):
            position = self.position
            found = await self._take_share(names, share, ranks, limit, position)
            if position is not None and found.is_complete and not self.has_enough_own:
                position = None  # the share goes on before the position, if at all
                found = await self._take_share(names, share, ranks, limit, None)
            has_seen_all = found.is_complete and position is None
            is_enough = self.has_enough_own
        if has_seen_all or not is_enough:
            self.next_share = monotonic() + SHARE_TIMES * (monotonic() - began)
        if is_enough:
            self._queue.has_more = True
            self._queue.drop_behind_own(with_isolated=names == self._served.names)
        return is_enough

    async def _take_share(
        self, names: Sequence[str], share: list[Filter], ranks: int, limit: int, position: Filter | None
    ) -> finding.Scan:
        """Scan for due tasks of the share behind this position, and note the position of the last one.

        `ranks`: the version of the ranks that this share follows from.
        """
        scan = finding.scan(
            self._served.queues,
            names,
            self._scope.worker_id,
            0,
            limit,
            also=[*share, *self._not_left_alone()],
            timeout=SHARE_TIMEOUT,
            position=position,
        )
        found = await self.take(scan, share_of=ranks)
        self.position = None if found.is_complete else finding.behind(found.documents[-1])
        return found

    async def look_at_all(self, *, is_refill: bool) -> bool:
        """Look at the tasks of all workers that go first; return whether a scan of all can be left out.

        It can be if due tasks were left unread, a task of this worker's share still goes before those of the others,
        and no task of a higher priority is due soon. A refill looks at due tasks only, and leaves those of isolated
        handlers out if enough of them are here.
        """
        if not self.has_share:
            return False
        self.all_at = monotonic()
        self.position = None
        names, horizon = (self._names, timedelta(0)) if is_refill else (self._served.names, HORIZON)
        found = await self.scan_within(horizon, self._enough, names=names)
        is_own_next = self._queue.is_own_next(monotonic(), past_isolated=names != self._served.names)
        if found.is_complete or found.has_future or not is_own_next:
            return False
        self._queue.has_more = True
        return True

    async def scan_all(self, *, is_refill: bool) -> bool:
        """Scan for the tasks of all workers that are due, or will be within the horizon.

        A refill looks within the horizon only if the scan has found all due tasks. Return whether due tasks were left
        unread. Those of isolated handlers do not count if enough of them are here for the executors.
        """
        self.all_at = monotonic()
        self.position = None
        self.is_beside_put_off = False
        if not (is_refill and self._is_crowded):
            was_cut = await self._read(self._served.names, is_refill=is_refill)
            self._queue.has_more_isolated = was_cut and (self._is_crowded or self._queue.has_more_isolated)
            if not (was_cut and self._is_crowded):
                return was_cut
        return await self._read_beside_isolated(is_refill=is_refill)

    async def scan_isolated(self) -> None:
        """Scan for due tasks of isolated handlers. Those of the others may all go before them."""
        names = [name for name in self._served.names if self._queue.is_isolated(name)]
        has_more = False  # after the time limit, too: they follow when the others are done
        with _at_most(BESIDE_TIMEOUT):
            found = await self.scan_within(timedelta(0), names=names, timeout=BESIDE_TIMEOUT)
            has_more = not found.is_complete
        self._queue.has_more_isolated = has_more

    async def _read_beside_isolated(self, *, is_refill: bool) -> bool:
        """Do what `scan_all` does for the other handlers: tasks that wait for an executor may all go before theirs."""
        names, began = self._names, monotonic()
        # While there is a pause, it is not known whether more wait: a later refill looks for them.
        self.is_beside_put_off = self._queue.has_more = bool(names) and began < self.next_beside
        if not names or self.is_beside_put_off:
            return False
        was_cut, has_ended = False, False
        with _at_most(BESIDE_TIMEOUT):
            was_cut = await self._read(names, is_refill=is_refill, timeout=BESIDE_TIMEOUT)
            has_ended = True
        if not has_ended:
            self.is_beside_put_off = self._queue.has_more = True
        if self.is_beside_put_off or not (was_cut or self._queue.has_more):
            pause = min(_BESIDE_TIMES * (monotonic() - began), _MAX_BESIDE_PAUSE)
            self.next_beside = monotonic() + pause
        return was_cut

    async def _read(self, names: Sequence[str], *, is_refill: bool, timeout: timedelta | None = None) -> bool:
        began = monotonic()
        found = await self.scan_within(timedelta(0) if is_refill else HORIZON, names=names, timeout=timeout)
        self.all_took = monotonic() - began
        if found.is_complete and is_refill:
            found = await self.scan_within(HORIZON, names=names, timeout=timeout)
        if found.is_complete:
            return False
        self._queue.has_more = True
        if found.has_future:
            # Tasks that are not yet due may have filled the batch and kept due tasks out. So scan again, only for due
            # tasks.
            found = await self.scan_within(timedelta(0), names=names, timeout=timeout)
        return not found.is_complete

    async def scan_for_gate(self) -> None:
        """Scan the queues of which few tasks wait here at the gate, and more in the database."""
        if self._gate is None:
            return
        for target in self._gate.targets([queue for queue in self._served.queues if self._gate.wants_more(queue)]):
            if target.queues:  # else it is for what is of no queue
                await self._scan_target(target, self._served.names, timedelta(0), begun_only=False)
        self._gate.look_for_more()

    async def scan_within(
        self,
        horizon: timedelta,
        limit: int | None = None,
        *,
        names: Sequence[str] | None = None,
        timeout: timedelta | None = None,
        begun_only: bool = False,
    ) -> finding.Scan:
        """Scan all queues, with a scan for each target of the gate.

        `limit`: the most tasks of one query. None: the queue's capacity.
        `names`: the names of the tasks. None: all of this worker.
        `timeout`: the time limit of a query that orders by priority and age alone. None: the usual one.
        """
        names = self._served.names if names is None else names
        is_complete, has_future = True, False
        queues = self._served.queues
        for target in [ScanTarget(queues)] if self._gate is None else self._gate.targets(queues):
            found = await self._scan_target(target, names, horizon, limit, timeout, begun_only=begun_only)
            if not target.is_on_demand:
                is_complete, has_future = is_complete and found.is_complete, has_future or found.has_future
            elif not found.is_complete and found.has_future:
                # Tasks that are not yet due may have filled the batch and kept due tasks out.
                await self._scan_target(target, names, timedelta(0), begun_only=begun_only)
        if self._gate is not None:
            self._gate.look_for_more()
        return finding.Scan([], None, is_complete, has_future)

    async def _scan_target(
        self,
        target: ScanTarget,
        names: Sequence[str],
        horizon: timedelta,
        limit: int | None = None,
        timeout: timedelta | None = None,
        *,
        begun_only: bool,
    ) -> finding.Scan:
        if names != self._served.names:
            target = replace(target, note=None)  # a scan for some names does not tell what else waits
        limit = self._queue.capacity // _APART if target.is_apart else limit or self._queue.capacity
        paused = self._served.paused_tenants
        worker_id, also = self._scope.worker_id, [*self._not_left_alone(), *target.guards]
        if target.scanner is not None and not begun_only:
            return await target.scanner.scan(self.take, target, names, _ms(horizon), limit, also, paused)
        also += without_tenants({None: paused})
        given = (target.queues, names, worker_id, _ms(horizon), limit, also)
        if begun_only:
            return await self.take(finding.scan_begun(*given))
        return await self.take(finding.scan(*given, timeout=timeout), note=target.note)

    async def is_any_due(self) -> bool:
        """Whether a task is due that this worker may take now, wherever it waits. Raises DatabaseError."""
        served, also = self._served, [*self._not_left_alone(), *without_tenants({None: self._served.paused_tenants})]
        found = await self._store.run(finding.scan(served.queues, served.names, self._scope.worker_id, 0, 1, also))
        return bool(found.documents)

    async def take(
        self,
        scan: Operation[finding.Scan],
        *,
        share_of: int | None = None,
        note: Callable[[finding.Scan], None] | None = None,
    ) -> finding.Scan:
        """Run a scan, and queue what it finds.

        `share_of`: the version of the ranks whose share it looks for. `note` is called before the tasks are queued.
        """
        sent = monotonic()
        found = await self._store.run(scan)
        self.count += 1
        if found.server_time is not None:
            self._scope.clock.observe(found.server_time, sent, monotonic())
        if note is not None:
            note(found)
        self._inbox.push_all_found(found.documents, sent, are_in_share=share_of == self._ranks.version)
        return found

    def _not_left_alone(self) -> list[Filter]:
        """Return filters that exclude the tasks that this worker must not try now, or cannot decrypt.

        Each of the first is looked up when its pause is over. If such tasks filled a batch, the scan would miss other
        tasks.
        """
        return [*other_than(self._quarantine.left_alone()), *self._hooks.guard()]


@contextmanager
def _at_most(limit: timedelta) -> Iterator[None]:
    """Run queries that have this time limit. If they meet it, end the block before its end, without an error."""
    began = monotonic()
    try:
        yield
    except DatabaseUnavailable:
        if monotonic() - began < limit.total_seconds():
            raise


def _ms(duration: timedelta) -> int:
    return int(duration / timedelta(milliseconds=1))
