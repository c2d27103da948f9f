"""The scheduler: makes the firings that are due. Any number of processes may run a scheduler; none of them leads.

Each scheduler reads the schedules that fire soon, waits for their times, and tries to advance each schedule to its next
firing. Only one process succeeds at each firing, and this process publishes the task. The process that made the last
firing of a schedule tries first at the next firing. The other processes try a moment later. They find that the firing
is made, or they make or complete it.
"""

from __future__ import annotations

import asyncio
import random
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from time import monotonic
from typing import Any, TypeVar

from mtask.app.middleware import FiredTask, Tracer
from mtask.errors import DatabaseError, DatabaseUnavailable, MtaskError, SchemaMismatch
from mtask.features.schedules import client as scheduling
from mtask.features.schedules import operations as schedules
from mtask.features.schedules import triggers
from mtask.features.schedules.client import Definition
from mtask.features.schedules.operations import Firing, PageEnd
from mtask.features.schedules.rules import MAX_ID_BYTES, Pending, Plan, Schedule, plan
from mtask.kernel.document.handlers import leave, watch
from mtask.kernel.driver.stores import SCHEDULES, AsyncStore
from mtask.kernel.worker.process import runtime
from mtask.kernel.worker.process.counts import Meter
from mtask.kernel.worker.process.part import Part, Service
from mtask.kernel.worker.process.time import wake_or_wait
from mtask.logs import SureLogger, fields, told

T = TypeVar("T")
logger = SureLogger("mtask.scheduler")

#: The first value: a read covers the schedules that fire within this time. The second value: the longest time until the
#: next read. Both are in seconds.
_HORIZON, _READ_AGAIN = 60.0, 30.0
#: The number of schedules that one query reads. Tests tune it.
PAGE = 200
#: The most schedules that the query excludes because they failed a short time ago. Further schedules of this kind are
#: read and skipped. Tests tune it.
MAX_LEFT_OUT = 10_000
#: The most schedules whose last firing by this process is remembered. The same limit holds for the schedules whose last
#: refusal is remembered. Tests tune it.
MAX_REMEMBERED = 10_000
#: The most failed schedules that one round logs by their ids. Of the other failed schedules, only the number is logged.
_MAX_LOGGED = 100
#: The delay of a process that did not make the last firing, in seconds: the fixed part, and the longest random part.
_BEHIND, _SPREAD = 0.15, 0.1
#: The most schedules that are fired at the same time.
_AT_ONCE = 16
#: The pause of a schedule that could not be fired, and of the scheduler after an error, in seconds.
_REFUSED_PAUSE, _ERROR_PAUSE = 30.0, 0.5


@dataclass(frozen=True, slots=True)
class _Planned:
    """The next step for a due schedule: the firings to be completed, or the firings to be made."""

    left: Sequence[Firing]
    made: Plan | None = None
    firings: Sequence[Firing] = ()


class Scheduler(Part):
    """Makes the firings of two kinds of schedules: those that clients have stored, and those that the app declares."""

    def __init__(
        self,
        store: AsyncStore,
        declared: Sequence[Definition],
        meter: Meter | None = None,
        tracer: Tracer | None = None,
    ) -> None:
        """`meter` counts how late firings are. `tracer` observes the publishing of the tasks."""
        self._store = store
        self._meter = Meter() if meter is None else meter
        self._tracer = tracer
        self._declared = {definition.schedule_id: definition for definition in declared}
        self._undeclared = set(self._declared)
        self._wake = asyncio.Event()
        self._stopped = asyncio.Event()
        #: The time of the last firing of each schedule, if this process made that firing. The key is the schedule's id.
        self._made: OrderedDict[str, datetime] = OrderedDict()
        #: The time until which a schedule that could not be fired is not tried again (monotonic seconds). The key is
        #: the schedule's id.
        self._left_alone: dict[str, float] = {}
        self._unlogged_cnt = self._logged_cnt = 0
        #: The revision that each schedule had when this process last failed to advance it. The key is the schedule's
        #: id.
        self._refused: OrderedDict[str, int] = OrderedDict()
        self.fired_cnt = 0

    def watches(self) -> Mapping[str, Callable[[], object]]:
        """Begin a round when a schedule has changed."""
        return {SCHEDULES: self.wake}

    def services(self) -> Sequence[Service]:
        """Make firings until the worker stops."""
        return (Service(self.run, self.stop),)

    def wake(self) -> None:
        """Begin a round now. Call this when a schedule has changed."""
        self._wake.set()

    def declare_again(self) -> None:
        """Store the declared schedules again. Call this when the database was dropped."""
        self._undeclared.update(self._declared)
        self._wake.set()

    def stop(self) -> None:
        """Begin no more firings. `run` returns when the firings under way are made."""
        self._stopped.set()
        self._wake.set()

    async def run(self) -> None:
        """Make firings until `stop`. Errors of the database are logged, and the round is repeated."""
        while not self._stopped.is_set():
            try:
                await self._declare()
                pause = await self._fire_due()
            except DatabaseError as error:
                logger.warning("schedules not read, will be tried again", extra=fields(reason=told(error)))
                pause = _ERROR_PAUSE if isinstance(error, DatabaseUnavailable) else _REFUSED_PAUSE
            except Exception:
                logger.exception("the scheduler failed, and goes on")
                pause = _REFUSED_PAUSE
            await wake_or_wait(self._wake, pause)
            self._wake.clear()

    async def _declare(self) -> None:
        """Store the declared schedules. If one of them is refused, the others are stored nevertheless."""
        for schedule_id in list(self._undeclared):
            try:
                await self._store.run(scheduling.put(self._declared[schedule_id], "update", "app"))
            except DatabaseUnavailable:
                raise
            except MtaskError as error:
                logger.error("declared schedule not stored", extra=fields(reason=told(error)))
            self._undeclared.discard(schedule_id)

    async def _fire_due(self) -> float:
        """Make the firings that are due, page by page; return the seconds until the next round.

        Schedules that cannot be fired are skipped, so that they do not hold up the next page.
        """
        began = monotonic()
        self._left_alone = {name: until for name, until in self._left_alone.items() if until > began}
        self._logged_cnt = self._unlogged_cnt = 0
        left_out = [name for name in self._left_alone if len(name) <= MAX_ID_BYTES][-MAX_LEFT_OUT:]
        wake_at, is_any_due = began + _READ_AGAIN, False
        page: PageEnd | None = None
        while not self._stopped.is_set():
            coming = await self._store.run(
                schedules.coming(int(_HORIZON * 1000), PAGE, list(self._declared), left_out, page)
            )
            read_at, now, page = monotonic(), coming.server_time, coming.end
            if now is None:
                break
            due: list[Schedule] = []
            # The documents are parsed in a thread, so that the event loop is not blocked.
            for schedule in await runtime.to_thread(self._parsed, coming.documents):
                left = self._seconds_left(schedule, now)
                if left > 0:
                    wake_at = min(wake_at, read_at + left)
                else:
                    due.append(schedule)
            is_any_due |= bool(due)
            await self._fire_all(due, now, read_at)
            if page is None:
                break
        if self._unlogged_cnt:
            logger.error(
                "more schedules cannot be fired, will be tried again later", extra=fields(schedules=self._unlogged_cnt)
            )
        if is_any_due:
            return 0.0
        return max(0.0, min([wake_at, *self._left_alone.values()]) - monotonic())

    def _parsed(self, documents: Sequence[dict[str, Any]]) -> list[Schedule]:
        """Return the readable schedules, without those that must not be tried now."""
        found = []
        now = monotonic()
        for document in documents:
            if self._left_alone.get(document["_id"], 0.0) > now:
                continue
            try:
                found.append(scheduling.schedule_of(document))
            except SchemaMismatch as error:
                self._leave_alone(document["_id"], error)
        return found

    async def _fire_all(self, due: list[Schedule], now: datetime, read_at: float) -> None:
        random.shuffle(due)  # so the processes begin with different schedules if many are due
        # The time of the read decides whether a firing was missed. If a firing is late only because many schedules fire
        # at once, it was not missed.
        for start in range(0, len(due), _AT_ONCE):
            if self._stopped.is_set():
                return
            batch = due[start : start + _AT_ONCE]
            # The firings are computed in a thread, because this may take a second for a rare trigger or for the firings
            # of years.
            planned = await runtime.to_thread(self._planned_all, batch, now)
            for fired in await asyncio.gather(*(self._fire(*each, now) for each in zip(batch, planned, strict=True))):
                present = now + timedelta(seconds=monotonic() - read_at)
                for firing in fired:
                    self._meter.fired((present - firing.pending.fire_time).total_seconds())

    def _planned_all(self, batch: Sequence[Schedule], now: datetime) -> list[_Planned | Exception]:
        return [self._planned(schedule, now) for schedule in batch]

    def _planned(self, schedule: Schedule, now: datetime) -> _Planned | Exception:
        """Compute the next step for a schedule. Any thread may call this."""
        try:
            left = [self._firing(schedule, pending) for pending in schedule.schedule_state.pending]
            if left:
                # Completing these firings changes the schedule. So its next firings wait until the schedule is read
                # again.
                return _Planned(left)
            made = plan(schedule, now)
            firings = made.firings if made is not None else ()
            return _Planned([], made, [self._firing(schedule, self._pending(schedule, at)) for at in firings])
        except Exception as error:
            return error

    def _seconds_left(self, schedule: Schedule, now: datetime) -> float:
        """Return the seconds until this process should make or complete the next firing of a schedule."""
        state = schedule.schedule_state
        behind = 0.0
        if state.last_fire_time is not None and self._made.get(schedule.id) != state.last_fire_time:
            behind = _BEHIND + _SPREAD * random.random()
        moments = [pending.fire_time for pending in state.pending]
        if state.next_fire_time is not None and not schedule.paused:
            moments.append(state.next_fire_time)
        return min((moment - now).total_seconds() for moment in moments) + behind if moments else _READ_AGAIN

    async def _fire(self, schedule: Schedule, planned: _Planned | Exception, read_at: datetime) -> Sequence[Firing]:
        """Complete the firings of a schedule that were begun, or make the firings that are due; return those made.

        `read_at`: the server's time at which the schedule was as it is here.
        """
        made: Sequence[Firing] = ()
        try:
            if isinstance(planned, Exception):
                raise planned
            await self._publish(schedule, planned.left)
            if planned.made is None:
                return ()
            published = await self._store.run(schedules.advance(schedule, planned.made, planned.firings))
            if published is None:
                self._note_refusal(schedule)
                return ()
            made = published
            self._note_advanced(schedule, planned.made, published)
            await self._publish(schedule, published, read_at)
        except DatabaseUnavailable as error:
            logger.warning(
                "schedule not fired, will be tried again", extra=fields(schedule_id=schedule.id, reason=told(error))
            )
            self._leave_alone_for(schedule.id, _ERROR_PAUSE)
        except Exception as error:
            self._leave_alone(schedule.id, error)
        return made

    async def _publish(self, schedule: Schedule, firings: Sequence[Firing], since: datetime | None = None) -> None:
        """Publish the tasks of these firings, and warn of those that are published already. `since`: as there."""
        for firing in await self._published(schedule, firings, since):
            logger.warning(
                "firing published nothing: its key was taken before",
                extra=fields(schedule_id=schedule.id, key=firing.task.key, task=firing.task.task_id),
            )

    async def _published(
        self, schedule: Schedule, firings: Sequence[Firing], since: datetime | None
    ) -> Sequence[Firing]:
        if self._tracer is None or not firings:
            return await self._store.run(schedules.publish(schedule.id, firings, since))
        fired = [FiredTask(one.task.task_id, one.task.name, one.task.queue, schedule.id) for one in firings]
        begun = [watch((self._tracer.fired,), one) for one in fired]
        try:
            traced = [
                replace(one, task=replace(one.task, trace=by.trace)) for one, by in zip(firings, fired, strict=True)
            ]
            taken = await self._store.run(schedules.publish(schedule.id, traced, since))
        except BaseException as error:
            for one in begun:
                leave(one, None, error)
            raise
        for one in begun:
            leave(one, None)
        return taken

    def _note_refusal(self, schedule: Schedule) -> None:
        """Note that the database has refused to advance a schedule.

        After the first refusal, another process has probably made the firing. If the schedule has not changed until the
        second refusal, no process can advance it. Then this process does not try it for a while.
        """
        if self._refused.pop(schedule.id, None) == schedule.revision:
            self._leave_alone(schedule.id, "it cannot be advanced, and no other process advances it: add it again")
        else:
            _remember(self._refused, schedule.id, schedule.revision)

    def _pending(self, schedule: Schedule, at: datetime) -> Pending:
        return Pending(fire_time=at, start_time=triggers.jittered(schedule.trigger, at, schedule.jitter_ms))

    def _firing(self, schedule: Schedule, pending: Pending) -> Firing:
        return Firing(pending, scheduling.new_task(schedule, pending.fire_time, pending.start_time))

    def _note_advanced(self, schedule: Schedule, made: Plan, published: list[Firing]) -> None:
        self.fired_cnt += len(published)
        last = published[-1].pending.fire_time if published else schedule.schedule_state.last_fire_time
        if made.next_fire_time is None or last is None:
            self._made.pop(schedule.id, None)  # it never fires again
        else:
            _remember(self._made, schedule.id, last)
        if made.has_missed:
            logger.warning(
                "firings were missed",
                extra=fields(
                    schedule_id=schedule.id,
                    since=schedule.schedule_state.next_fire_time,
                    catch_up=schedule.catch_up,
                    made=len(made.firings),
                ),
            )

    def _leave_alone(self, schedule_id: str, reason: Exception | str) -> None:
        if self._logged_cnt < _MAX_LOGGED:
            self._logged_cnt += 1
            logger.error(
                "schedule cannot be fired, will be tried again later",
                extra=fields(schedule_id=schedule_id, reason=str(reason)),
            )
        else:
            self._unlogged_cnt += 1
        self._leave_alone_for(schedule_id, _REFUSED_PAUSE)

    def _leave_alone_for(self, schedule_id: str, pause: float) -> None:
        self._left_alone[schedule_id] = monotonic() + pause


def _remember(memory: OrderedDict[str, T], name: str, value: T) -> None:
    memory[name] = value
    memory.move_to_end(name)
    if len(memory) > MAX_REMEMBERED:
        memory.popitem(last=False)
