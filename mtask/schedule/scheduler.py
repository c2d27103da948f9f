"""The scheduler: makes the firings that are due. Any number of processes may run one, and none of them leads.

Each reads what fires before long, waits until it does, and moves the schedule on in the transaction that publishes the
task. Of those that try one gets through. Who made the last firing of a schedule goes first at the next; the others look
again a moment later, and find it made.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime, timedelta
from time import monotonic
from typing import Any

from mtask.client import scheduling
from mtask.client.scheduling import Definition
from mtask.errors import DatabaseError, MtaskError, SchemaMismatch
from mtask.model import triggers
from mtask.model.schedules import Plan, Schedule, plan
from mtask.store import schedules, transactions
from mtask.store.driver import AsyncStore

logger = logging.getLogger("mtask.scheduler")

#: How far ahead a look goes, and after how long there is another in any case, in seconds.
_HORIZON, _LOOK_AGAIN = 20.0, 10.0
_MAX_SCHEDULES = 1_000
#: How much later than the one that made the last firing another process tries, in seconds.
_BEHIND, _SPREAD = 0.15, 0.1
#: How long a schedule is left alone that could not be fired, and the scheduler after an error, in seconds.
_REFUSED_PAUSE, _ERROR_PAUSE = 30.0, 0.5


class Scheduler:
    """Makes firings, of the schedules that clients have stored and of those that its own app declares."""

    def __init__(self, store: AsyncStore, declared: Sequence[Definition]) -> None:
        self._store = store
        self._declared = {definition.schedule_id: definition for definition in declared}
        self._wake = asyncio.Event()
        self._stopped = asyncio.Event()
        #: The last firing that this process made, by schedule.
        self._made: dict[str, datetime] = {}
        #: Schedules that are left alone, and until when (monotonic seconds).
        self._left_alone: dict[str, float] = {}
        self.fired_cnt = 0

    def wake(self) -> None:
        """Look now: a schedule has changed."""
        self._wake.set()

    def stop(self) -> None:
        """Make no more firings; `run` returns when the one under way is made."""
        self._stopped.set()
        self._wake.set()

    async def run(self) -> None:
        """Make firings until stopped, whatever the database does meanwhile."""
        is_declared = False
        while not self._stopped.is_set():
            try:
                if not is_declared:
                    await self._declare()
                    is_declared = True
                pause = await self._look()
            except DatabaseError as error:
                logger.warning("schedules not read, will be tried again: %s", error)
                pause = _ERROR_PAUSE
            with suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._wake.wait()
            self._wake.clear()

    async def _declare(self) -> None:
        for definition in self._declared.values():
            try:
                await self._store.run(scheduling.put(definition, "update", "app"))
            except SchemaMismatch as error:
                logger.error("declared schedule not stored: %s", error)

    async def _look(self) -> float:
        """Make what is due; return the seconds until something may be again."""
        coming = await self._store.run(schedules.coming(int(_HORIZON * 1000), _MAX_SCHEDULES))
        read_at = monotonic()
        pause = _LOOK_AGAIN
        for document in coming.documents:
            if self._stopped.is_set():
                break
            schedule = self._parsed(document)
            if schedule is None:
                continue
            now = coming.server_time + timedelta(seconds=monotonic() - read_at)
            left = self._seconds_left(schedule, now)
            if left > 0:
                pause = min(pause, left)
            elif not await self._fire(schedule, now):
                pause = 0.0  # it is not as it was read
            elif schedule.trigger.kind != "once":
                pause = 0.0  # its next firing may be near
        return pause

    def _parsed(self, document: dict[str, Any]) -> Schedule | None:
        schedule_id = str(document["_id"])
        if self._left_alone.get(schedule_id, 0.0) > monotonic():
            return None
        try:
            schedule = scheduling.schedule_of(document)
        except SchemaMismatch as error:
            self._leave_alone(schedule_id, error)
            return None
        # What an app no longer declares is fired by nobody who runs that app.
        return None if schedule.source == "app" and schedule_id not in self._declared else schedule

    def _seconds_left(self, schedule: Schedule, now: datetime) -> float:
        due = schedule.schedule_state.next_fire_time
        assert due is not None
        left = (due - now).total_seconds()
        last = schedule.schedule_state.last_fire_time
        if last is not None and self._made.get(schedule.id) != last:
            left += _BEHIND + _SPREAD * random.random()
        return left

    async def _fire(self, schedule: Schedule, now: datetime) -> bool:
        """Make what is due of a schedule; return False where it is not as it was read."""
        made = plan(schedule, now)
        if made is None:
            return True
        if made.has_missed:
            logger.warning(
                "firings of schedule %s since %s were missed: catch_up is %r, %d are made",
                schedule.id,
                schedule.schedule_state.next_fire_time,
                schedule.catch_up,
                len(made.firings),
            )
        new = [
            scheduling.new_task(
                schedule,
                firing,
                triggers.jittered(schedule.trigger, firing, schedule.anchor, schedule.jitter_ms),
            )
            for firing in made.firings
        ]
        try:
            fired = await transactions.carry_out(self._store, schedules.fire(schedule, made, new))
        except MtaskError as error:
            if transactions.is_conflict(error):
                return False
            if isinstance(error, DatabaseError) and not isinstance(error, schedules.REFUSALS):
                raise
            self._leave_alone(schedule.id, error)
            return True
        if fired is None:
            return False
        self._take_down(schedule, made, fired)
        return True

    def _take_down(self, schedule: Schedule, made: Plan, fired: int) -> None:
        self.fired_cnt += fired
        if fired:
            self._made[schedule.id] = made.firings[-1]
        elif schedule.schedule_state.last_fire_time is not None:
            self._made[schedule.id] = schedule.schedule_state.last_fire_time

    def _leave_alone(self, schedule_id: str, error: MtaskError) -> None:
        logger.error("schedule %s cannot be fired, left alone for a while: %s", schedule_id, error)
        self._left_alone[schedule_id] = monotonic() + _REFUSED_PAUSE
