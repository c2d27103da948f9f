"""The finisher: writes the outcomes of runs to the database, in groups.

While a group is being sent, further outcomes gather for the next group.

If a group meets a locked document, the finisher soon gives up the group and sends each of its outcomes alone. Then only
the outcome of the locked document has to wait. Meanwhile the finisher sends groups of other outcomes.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from time import monotonic

from mtask.errors import (
    DatabaseTimeout,
    DatabaseUnavailable,
    DocumentTooLarge,
    InvalidInput,
    MtaskError,
    NotStorable,
    OperationFailed,
)
from mtask.kernel.document.handlers import Begun, leave
from mtask.kernel.document.status import RunStatus
from mtask.kernel.driver.errors import VALIDATION
from mtask.kernel.operations import claim as claims
from mtask.kernel.statements.finish import Outcome
from mtask.kernel.worker.discovery.relays import Settler
from mtask.kernel.worker.process.log import fields, logger, told
from mtask.kernel.worker.process.state import Scope
from mtask.kernel.worker.process.time import Backoff
from mtask.kernel.worker.running.leases import Pinger
from mtask.kernel.worker.running.outcomes import Successes, refusal
from mtask.kernel.worker.running.run import HeldRun

MAX_GROUP = 400
MAX_IN_FLIGHT = 4
#: The fewest outcomes that a new group must have while another group is being sent. Small groups cost the server and
#: the worker more for each outcome.
_MIN_FURTHER = 360
#: A smaller group is sent at this time, in seconds, after the sending of the group before it began. It is sent even if
#: the group before it is still under way.
_MAX_GATHER = 0.2
#: The shortest and the longest time limit of a finish that may meet a locked document, in seconds.
_LEAST_WAIT, _MOST_WAIT = 0.3, 5.0
#: `_MAX_APART`: the most outcomes that are sent alone at the same time. `_MAX_LOCKED`: the same for outcomes whose
#: documents are known to be locked.
_MAX_APART, _MAX_LOCKED = 16, 2
#: If outcomes that are sent alone take no more than this time each, on the average, no document is locked. In seconds.
_APART_TIME = 0.0015
_MAX_GROUP_BYTES = 4 * 1024 * 1024
_PAUSE, _MAX_PAUSE = 0.05, 1.0
#: The most errors after which a group is sent again, not counting an unavailable database. At the next error, the
#: finisher assumes that the server refuses one of the outcomes.
_MAX_REFUSALS = 5
#: What the log says of a result that is not known to be stored.
_REFUSED = "result refused: the lease was lost"
_UNCONFIRMED = "result not confirmed: the lease ended before the database answered"


# It is made for each run. A frozen dataclass takes twice as long to make.
@dataclass(slots=True)
class Ending:
    """An outcome that is to be written to the database."""

    run: HeldRun
    outcome: Outcome
    size: int
    #: The middleware that waits for the writing of the outcome.
    watched: Begun = field(default_factory=list)
    #: Whether the outcome is a success that the short statement may write.
    is_short: bool = False
    #: Whether a next task is counted where it needs room.
    has_room: bool = False

    @property
    def goes_on(self) -> bool:
        """Whether the outcome has a next task."""
        return self.outcome.next is not None

    @property
    def is_general(self) -> bool:
        """Whether a success needs the general statement: the task goes on, or its end is to be told outside a flow."""
        return self.goes_on or "callback" in self.run.owes

    @property
    def is_success(self) -> bool:
        """Whether the outcome is a SUCCESS. Such outcomes have groups of their own."""
        return self.outcome.status is RunStatus.SUCCESS


@dataclass(slots=True)
class _Lane:
    """Outcomes that may be sent in the same group, and the groups that are being sent."""

    waiting: deque[Ending] = field(default_factory=deque)
    in_flight: set[asyncio.Task[None]] = field(default_factory=set)
    #: The time at which a group last began (monotonic seconds).
    launched_at: float = 0.0
    #: The timer that begins the next group.
    impatience: asyncio.TimerHandle | None = None


class Finisher:
    """Takes the outcomes of runs and writes them.

    Each outcome is sent until it is written or its run has lost the lease.
    """

    def __init__(
        self,
        scope: Scope,
        pinger: Pinger,
        settlers: Sequence[Settler],
        successes: Successes,
        watch: Callable[[HeldRun, Outcome], Begun] | None = None,
        hear: Callable[[HeldRun, Outcome | None], None] = lambda run, outcome: None,
    ) -> None:
        """`settlers` tell others of the ends. `watch` begins what runs around the writing of an outcome.

        `hear` is told of each end of a run, before it is written.
        """
        self._store = scope.store
        self._ledger = scope.ledger
        self._meter = scope.meter
        self._tempo = scope.tempo
        self._pinger = pinger
        self._settlers = settlers
        self._room_of, self._take_room_of = successes.room_of, successes.take_room
        self._watch = watch
        self._hear = hear
        # Three lanes: failures and hand-backs must not wait behind many successes. Successes that owe
        # others something need the general statement, which is long.
        self._successes, self._general, self._others = _Lane(), _Lane(), _Lane()
        self._lanes = (self._others, self._general, self._successes)
        #: The asyncio tasks that send outcomes alone. Groups do not wait for these asyncio tasks.
        self._apart: set[asyncio.Task[None]] = set()
        self._apart_semaphore = asyncio.Semaphore(_MAX_APART)
        self._locked_semaphore = asyncio.Semaphore(_MAX_LOCKED)
        self._pending = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self.finished_cnt = 0
        self.lost_cnt = 0

    @property
    def pending(self) -> int:
        """The number of outcomes that are not yet written."""
        return self._pending

    def submit(self, run: HeldRun, outcome: Outcome, size: int = 0, stored: Outcome | None = None) -> None:
        """Write this outcome soon, and keep the lease of its run until then.

        `size`: the size of the stored value in bytes. `stored`: the outcome as it is stored, if its values are
        encoded. Middleware sees the outcome itself.
        """
        run.is_finishing = True
        self._hear(run, outcome)
        stored = outcome if stored is None else stored
        if run.progress is not None:
            stored = replace(stored, progress=run.progress)
        if run.stored_trace is not None and outcome.status is not RunStatus.SUCCESS:
            stored = replace(stored, traceparent=run.stored_trace["traceparent"])
        self._pending += 1
        self._idle.clear()
        ending = Ending(run, stored, size, [] if self._watch is None else self._watch(run, outcome))
        lane = self._others
        if ending.is_success:
            is_general = ending.is_general
            ending.is_short = run.is_simple and not is_general
            lane = self._general if is_general else self._successes
        if ending.goes_on:
            self._ledger.owing.add("chain")  # the next task has this field
        lane.waiting.append(ending)
        if not (lane.in_flight and len(lane.waiting) < _MIN_FURTHER and lane.impatience is not None):
            self._launch()  # else the next group gathers already

    def heard(self, run: HeldRun) -> None:
        """Tell those who hear of ends that the transaction of a run has written its SUCCESS."""
        self._hear(run, None)

    def tell_of_end(self, run: HeldRun, *, goes_on: bool) -> None:
        """Settle what the end of a run owes to others, now that it is written.

        The transaction of a handler may have written it. `goes_on`: whether the end has a next task.
        """
        if run.owes or goes_on:  # the end of a simple task concerns nobody
            for settler in self._settlers:
                if settler.relay.concerns(run, goes_on):
                    settler.submit(run.task_id)

    async def drain(self) -> None:
        """Wait until each outcome is written or its run has lost the lease."""
        await self._idle.wait()

    def _launch(self) -> None:
        for lane in self._lanes:
            while lane.waiting and len(lane.in_flight) < MAX_IN_FLIGHT:
                if lane.in_flight and len(lane.waiting) < _MIN_FURTHER and self._is_to_gather(lane):
                    break
                lane.launched_at = monotonic()
                # The asyncio task starts in the next turn of the event loop, so outcomes of this turn still join the
                # group.
                task = asyncio.get_running_loop().create_task(self._flush_next(lane))
                lane.in_flight.add(task)
                task.add_done_callback(partial(self._landed, lane))
                if len(lane.waiting) <= MAX_GROUP:
                    break

    def _is_to_gather(self, lane: _Lane) -> bool:
        """Whether the next group should wait for more outcomes. If it should, a timer ends the wait."""
        left = lane.launched_at + _MAX_GATHER - monotonic()
        if left > 0 and lane.impatience is None:
            lane.impatience = asyncio.get_running_loop().call_later(left, self._lose_patience, lane)
        return left > 0

    def _lose_patience(self, lane: _Lane) -> None:
        lane.impatience = None
        self._launch()

    def _landed(self, lane: _Lane, task: asyncio.Task[None]) -> None:
        lane.in_flight.discard(task)
        if not task.cancelled() and task.exception() is not None:
            logger.error("finisher failed and goes on", exc_info=task.exception())
        self._launch()

    async def _flush_next(self, lane: _Lane) -> None:
        group = self._gather(lane.waiting)
        if group:
            await self._flush(group)

    @staticmethod
    def _gather(waiting: deque[Ending]) -> list[Ending]:
        group: dict[str, Ending] = {}
        size = 0
        while waiting and len(group) < MAX_GROUP:
            ending = waiting[0]
            if ending.run.task_id in group or (group and size + ending.size > _MAX_GROUP_BYTES):
                break  # a group holds one outcome per task, and a limited number of bytes
            group[ending.run.task_id] = waiting.popleft()
            size += ending.size
        return list(group.values())

    async def _flush(self, group: list[Ending], *, is_apart: bool = False) -> None:
        """Write these outcomes together.

        If a document is locked, or the server refuses an outcome, send each outcome alone.
        """
        pauses, refusals = Backoff(_PAUSE, _MAX_PAUSE), 0
        semaphore: AbstractAsyncContextManager[None] = self._apart_semaphore if is_apart else nullcontext()
        while group:
            try:
                async with semaphore:
                    accepted = await self._write(group, may_be_short=not is_apart)
            except MtaskError as error:
                if _is_about_value(error) or refusals >= _MAX_REFUSALS:
                    await self._refused(group, error)
                    return
                # The failed try may have written some outcomes. The next try finds such an outcome by its run_id.
                refusals += not isinstance(error, DatabaseUnavailable)
                logger.warning("finish failed, will be sent again", extra=fields(runs=len(group), reason=told(error)))
                group = await self._drop_expired(group)
                if isinstance(error, DatabaseTimeout):
                    if is_apart:
                        semaphore = self._locked_semaphore
                    elif await self._is_held_up(group):
                        self._send_apart(group, was_held_up=True)
                        return
                await asyncio.sleep(pauses.next())
            else:
                self._pinger.release_all(ending.run for ending in group)
                for ending in group:
                    self._resolve(ending, is_accepted=ending.run.run_id in accepted, is_released=True)
                return

    async def _write(self, group: list[Ending], *, may_be_short: bool) -> set[str]:
        """Send these outcomes in one statement; return the run_ids of the outcomes that are written."""
        await self._make_room(group)
        sent = monotonic()
        is_simple = may_be_short and all(ending.is_short for ending in group)
        has_steps = any("flow" in ending.run.owes for ending in group)
        timeout = timedelta(seconds=self._wait)
        outcomes = [ending.outcome for ending in group]
        finish = claims.finish(outcomes, timeout, is_simple=is_simple, has_steps=has_steps)
        accepted = await self._store.run(finish)
        self._tempo.took(monotonic() - sent)
        return accepted

    async def _make_room(self, group: list[Ending]) -> None:
        """Have the next tasks of these outcomes counted where they need room. Where there is none, the run fails.

        Its failure leaves the group, which holds successes: one statement writes either these or others.
        """
        rooms: dict[str, list[Ending]] = {}
        for ending in group:
            key = None if ending.has_room else self._room_of(ending.outcome)
            if key is not None:
                rooms.setdefault(key, []).append(ending)
        for key, endings in rooms.items():
            await self._take_room(key, endings)
        failed = [ending for ending in group if not ending.is_success]
        if 0 < len(failed) < len(group):
            group[:] = [ending for ending in group if ending.is_success]
            self._others.waiting.extend(failed)
            self._launch()

    async def _take_room(self, key: str, endings: Sequence[Ending]) -> None:
        try:
            await self._store.run(self._take_room_of(key, len(endings)))
        except InvalidInput as error:
            if len(endings) > 1:  # some of them may fit
                for ending in endings:
                    await self._take_room(key, [ending])
                return
            endings[0].outcome = refusal(endings[0].run, f"the task cannot go on: {error}")
        for ending in endings:
            ending.has_room = True

    async def _is_held_up(self, group: list[Ending]) -> bool:
        """Whether a locked document probably held up the group.

        To find out, this method reads the documents. A read waits for no lock, so a quick answer shows that the
        database works. If the read shows that an outcome is already written, the outcome is resolved and removed from
        `group`.
        """
        wait, asked = self._wait, monotonic()
        try:
            await self._resolve_written(group)
        except MtaskError:
            self._tempo.took(wait)
            return False
        if monotonic() - asked > wait / 2:
            self._tempo.took(wait)
            return False
        return True

    async def _resolve_written(self, group: list[Ending]) -> None:
        """Read which of these outcomes are already written. Resolve these, and remove them from `group`."""
        outcomes = [ending.outcome for ending in group]
        accepted = await self._store.run(claims.finished(outcomes, timedelta(seconds=self._wait)))
        written = [ending for ending in group if ending.run.run_id in accepted]
        group[:] = [ending for ending in group if ending.run.run_id not in accepted]
        for ending in written:
            self._resolve(ending, is_accepted=True)

    @property
    def _wait(self) -> float:
        """The time limit of a finish that may meet a locked document, in seconds."""
        return self._tempo.limit(_LEAST_WAIT, _MOST_WAIT)

    def _send_apart(self, group: list[Ending], *, was_held_up: bool = False) -> None:
        """Send each of these outcomes alone from now on. Meanwhile the finisher sends groups of other outcomes."""
        if not group:
            return
        task = asyncio.get_running_loop().create_task(self._flush_each(group, was_held_up=was_held_up))
        self._apart.add(task)
        task.add_done_callback(self._apart_landed)

    def _apart_landed(self, task: asyncio.Task[None]) -> None:
        self._apart.discard(task)
        if not task.cancelled() and task.exception() is not None:
            logger.error("finisher failed and goes on", exc_info=task.exception())

    async def _flush_each(self, group: list[Ending], *, was_held_up: bool) -> None:
        each = [asyncio.ensure_future(self._flush([ending], is_apart=True)) for ending in group]
        if was_held_up:
            wait = self._wait
            await asyncio.wait(each, timeout=max(wait, len(each) * _APART_TIME))
            if all(one.done() for one in each):
                self._tempo.took(wait)  # no document is locked: the server is busy
        for ended in await asyncio.gather(*each, return_exceptions=True):
            if isinstance(ended, BaseException):
                logger.error("finish failed", exc_info=ended)

    async def _refused(self, group: list[Ending], error: MtaskError) -> None:
        """Find the outcome that the server refuses, and write a failure in its place."""
        if len(group) > 1:
            self._send_apart(group)
            return
        ending = group[0]
        if _cannot_go_on(ending, error):
            reason = f"{ending.outcome.reason}; the task cannot be tried again, it breaks the schema: {error}"
            await self._flush([Ending(ending.run, refusal(ending.run, reason), 0, ending.watched)], is_apart=True)
            return
        if not ending.is_success:
            logger.error("finish refused", extra=fields(task=ending.run.task_id, reason=told(error)))
            self._resolve(ending, is_accepted=False)
            return
        kind = "is too large to be stored" if isinstance(error, DocumentTooLarge) else "was refused by the database"
        if isinstance(error, NotStorable):
            kind = "cannot be stored as BSON"
        refused = refusal(ending.run, f"the handler's return value {kind}: {error}")
        await self._flush([Ending(ending.run, refused, 0, ending.watched)], is_apart=True)

    async def _drop_expired(self, group: list[Ending]) -> list[Ending]:
        """Give up the outcomes whose lease has ended, and return the others.

        The server may have written such an outcome though its answer was lost. So the documents are read first.
        """
        now = monotonic()
        expired = [ending for ending in group if ending.run.trusted_until <= now]
        kept = [ending for ending in group if ending.run.trusted_until > now]
        if expired:
            with suppress(MtaskError):
                await self._resolve_written(expired)
            for ending in expired:
                self._resolve(ending, is_accepted=False, reason=_UNCONFIRMED)
        return kept

    def _resolve(self, ending: Ending, *, is_accepted: bool, reason: str = _REFUSED, is_released: bool = False) -> None:
        if not is_released:
            self._pinger.release(ending.run)
        ending.run.leave_gate(is_closed=is_accepted)
        self._pending -= 1
        if is_accepted:
            self.finished_cnt += 1
            self._meter.ended(ending.run, ending.outcome.status)
            self.tell_of_end(ending.run, goes_on=ending.goes_on)
        else:
            self.lost_cnt += 1
            logger.warning(
                reason,
                extra=fields(task=ending.run.task_id, run=ending.run.run_id, outcome=ending.outcome.status),
            )
        if ending.watched:
            leave(ending.watched, is_accepted)
        if self._pending == 0:
            self._idle.set()


def _is_invalid(error: MtaskError) -> bool:
    return isinstance(error, OperationFailed) and error.code == VALIDATION


def _is_about_value(error: MtaskError) -> bool:
    """Whether the error is about the value of the outcome. The server or the driver would refuse such a value again."""
    return _is_invalid(error) or isinstance(error, NotStorable | DocumentTooLarge)


def _cannot_go_on(ending: Ending, error: MtaskError) -> bool:
    """Whether the server refuses that the task becomes INIT: somebody has broken the document during the run."""
    return not ending.is_success and not ending.outcome.final and _is_invalid(error)
