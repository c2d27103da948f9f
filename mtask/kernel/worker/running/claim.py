"""The sender: claims groups of tasks, and handles the results of the claims.

If the claim of a group fails, each task of the group gets a claim of its own. Meanwhile other groups are claimed. So a
malformed or locked document does not hold up the other tasks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime, timedelta
from time import monotonic
from typing import Any

from mtask.errors import DatabaseError, DatabaseTimeout, DatabaseUnavailable, MtaskError
from mtask.kernel.document.status import RunStatus
from mtask.kernel.document.task import StoredTask
from mtask.kernel.driver.stores import OPERATION_TIMEOUT
from mtask.kernel.operations import claim as claims
from mtask.kernel.operations import sessions
from mtask.kernel.statements.filters import Filter
from mtask.kernel.statements.finish import Outcome
from mtask.kernel.worker.discovery.quarantine import Losses, Quarantine
from mtask.kernel.worker.discovery.reaper import count_lapses
from mtask.kernel.worker.discovery.rereads import Lookups
from mtask.kernel.worker.process.log import fields, logger, told
from mtask.kernel.worker.process.part import Admission, Gate, Hooks
from mtask.kernel.worker.process.state import Scope
from mtask.kernel.worker.process.time import Backoff, wake_or_wait
from mtask.kernel.worker.running.accept import Adoption, Attempt
from mtask.kernel.worker.running.slots import Pace

#: The shortest and the longest time limit of a claim that may meet a locked document, in seconds.
_LEAST_WAIT, _MOST_WAIT = 0.3, 5.0
#: The most claims of single tasks that are under way at the same time.
_MAX_APART = 16
_PAUSE = 0.05


class Sender:
    """Claims groups of tasks, and passes the runs that were won to the adoption."""

    def __init__(
        self,
        scope: Scope,
        quarantine: Quarantine,
        losses: Losses,
        gate: Gate | None,
        lookups: Lookups,
        adoption: Adoption,
        recovery: Recovery,
        pace: Pace,
        hooks: Hooks,
    ) -> None:
        self._scope = scope
        self._store = scope.store
        self._tempo = scope.tempo
        self._clock = scope.clock
        self._quarantine = quarantine
        self._losses = losses
        self._gate = gate
        self._lookups = lookups
        self._adoption = adoption
        self._recovery = recovery
        self._pace = pace
        self._hooks = hooks
        self._landings = Landings()
        #: The requests to the gate: those of the first tasks are made first.
        self._requests = Landings()
        #: The asyncio tasks that claim single tasks. Groups are claimed at the same time and do not wait for them.
        self._apart: set[asyncio.Task[None]] = set()
        self._at_once = asyncio.Semaphore(_MAX_APART)
        self._held_up_cnt = 0
        self.lost_cnt = 0

    @property
    def under_way(self) -> tuple[set[asyncio.Task[None]], ...]:
        """The two sets of asyncio tasks that claim single tasks, and that recover claims without a reply.

        An asyncio task of the first set may start one of the second set.
        """
        return (self._apart, self._recovery.jobs)

    def stop(self) -> None:
        """From now on, wait for an unavailable database only while a claim may still take effect."""
        self._recovery.stop()

    async def claim(self, task_ids: list[str], claim: Callable[[], Awaitable[Collection[str]]]) -> None:
        """Claim these tasks with the function `claim`, and free the slots that were reserved for them.

        `claim` calls `claim_free` or `claim_gated`. It returns the tasks that now get claims of their own. Their
        slots stay reserved.
        """
        apart: Collection[str] = ()
        try:
            apart = await claim()
        except DatabaseError as error:
            await self._failed(task_ids, error)
        finally:
            self._free_slots([task_id for task_id in task_ids if task_id not in apart])

    async def _failed(self, task_ids: Collection[str], error: DatabaseError) -> None:
        logger.warning("claim failed, will be tried again", extra=fields(tasks=len(task_ids), reason=told(error)))
        await asyncio.sleep(_PAUSE)
        self._scope.signals.tasks_doubtful.send(task_ids)

    def _free_slots(self, task_ids: Collection[str]) -> None:
        """Free the slots that were reserved for the claim of these tasks. The won runs have already taken slots."""
        self._scope.ledger.claiming.difference_update(task_ids)
        self._scope.signals.claim_landed.send(task_ids)
        self._scope.signals.room_made.send()

    async def claim_free(
        self, task_ids: list[str], *, lookup_first: bool, is_rescue: bool, is_simple: bool
    ) -> Collection[str]:
        """Claim tasks that do not wait at the gate; return the tasks that now get claims of their own."""
        if is_rescue:
            await self._end_lapsed_sessions(task_ids)
            return await self.claim_group(task_ids, is_rescue=True)  # a rescue waits for no other task
        wanted = task_ids
        with self._landings.begin() as landing:
            if lookup_first:
                due = {task.id for task in await self._store.run(self._lookups.still_due(task_ids))}
                wanted = [task_id for task_id in task_ids if task_id in due]  # the tenants in their turns
            return await self.claim_group(wanted, is_simple=is_simple, landing=landing)

    async def claim_gated(self, task_ids: list[str], *, is_rescue: bool) -> Collection[str]:
        """Claim the tasks that pass the gate, and queue the others again.

        Returns the tasks that now get claims of their own, and those that were queued again: they may be under way in
        another claim by now.
        """
        assert self._gate is not None
        if is_rescue:
            await self._end_lapsed_sessions(task_ids)
        back: set[str] = set()
        try:
            return {*await self._claim_gated(self._gate, task_ids, back, is_rescue=is_rescue), *back}
        finally:
            self._gate.landed([task_id for task_id in task_ids if task_id not in back])

    async def _claim_gated(
        self, gate: Gate, task_ids: list[str], back: set[str], *, is_rescue: bool
    ) -> Collection[str]:
        """Do as `claim_gated` does. `back` takes the tasks that are queued again."""
        with self._requests.begin() as place:
            began = monotonic()
            tasks, now = await self._store.run(self._lookups.still_due_at(task_ids))
            took = monotonic() - began
            dead = _lapsed_runs(tasks, now) if is_rescue else []
            if dead:
                tasks, now, dead = await self._close(dead, tasks)
            free = [task.id for task in tasks if not gate.needs(task)]
            apart = list(await self.claim_group(free, is_rescue=is_rescue)) if free else []
            gated = [task for task in tasks if gate.needs(task)]
            if not gated or now is None:
                return apart
            read_at = now

            def refuse(refused: Sequence[StoredTask], under_way: Sequence[StoredTask]) -> None:
                self._lookups.queue_again(refused, read_at)
                self._lookups.look_later(under_way)
                gone = [task.id for task in (*refused, *under_way)]
                back.update(gone)
                self._scope.signals.claim_landed.send(gone)

            if fallen := [task for task in gated if gate.has_fallen_back(task, now)]:
                gate.landed([task.id for task in fallen])  # others ask in their place
                refuse(fallen, ())
                gated = [task for task in gated if task.id not in back]
            if not is_rescue:
                await self._requests.wait_for_earlier(place, took)
            admission = await gate.admit(gated, claims.fresh_token(), now, refuse, dead)
        if is_rescue:
            # Each task gets a claim of its own at once. If a claim of the whole group timed out first, a second claim
            # might come after `claim_by`.
            return apart + self.claim_apart(admission.task_ids, admission, is_rescue=True, is_first=True)
        return apart + list(await self.claim_group(admission.task_ids, admission=admission))

    async def _close(
        self, dead: Sequence[tuple[str, str]], tasks: Sequence[StoredTask]
    ) -> tuple[list[StoredTask], datetime | None, list[tuple[str, str]]]:
        """Close these lapsed runs; return what is still due of the tasks, the time, and the runs that are closed now.

        These tasks take the place of the lapsed runs. No late ping can revive a closed run.
        """
        closed_cnt = await self._store.run(claims.settle([task_id for task_id, _ in dead]))
        await count_lapses(self._scope, [task_id for task_id, _ in dead], closed_cnt)
        due, now = await self._store.run(self._lookups.still_due_at([task.id for task in tasks]))
        # The first read may have been older than a ping. What was not closed for that keeps its place.
        closed = _closed_runs(due)
        return due, now, [run for run in dead if run in closed]

    def claim_apart(
        self,
        task_ids: list[str],
        admission: Admission | None = None,
        *,
        was_held_up: bool = False,
        is_rescue: bool = False,
        is_first: bool = False,
    ) -> list[str]:
        """Begin to claim each of these tasks in a claim of its own, in the background; return the tasks.

        `was_held_up`: the claim of the whole group timed out, probably because of a locked document.
        `is_first`: there was no claim of the whole group.
        """
        if task_ids:
            job = asyncio.get_running_loop().create_task(
                self._claim_each(task_ids, admission, was_held_up=was_held_up, is_rescue=is_rescue, is_first=is_first)
            )
            self._apart.add(job)
            job.add_done_callback(self._apart_landed)
        return task_ids

    def _apart_landed(self, job: asyncio.Task[None]) -> None:
        self._apart.discard(job)
        if not job.cancelled() and job.exception() is not None:
            logger.error("claimer failed and goes on", exc_info=job.exception())
        self._scope.signals.room_made.send()

    async def _claim_each(
        self,
        task_ids: Sequence[str],
        admission: Admission | None,
        *,
        was_held_up: bool,
        is_rescue: bool,
        is_first: bool,
    ) -> None:
        left_alone_cnt = self._held_up_cnt
        each = [
            self._claim_alone(task_id, index, admission, is_rescue=is_rescue, is_first=is_first)
            for index, task_id in enumerate(task_ids)
        ]
        for ended in await asyncio.gather(*each, return_exceptions=True):
            if isinstance(ended, BaseException):
                logger.error("claim failed", exc_info=ended)
        if was_held_up and left_alone_cnt == self._held_up_cnt:
            self._tempo.took(self._wait)  # no document was locked, so the server is busy

    async def _claim_alone(
        self, task_id: str, index: int, admission: Admission | None, *, is_rescue: bool, is_first: bool
    ) -> None:
        try:
            async with self._at_once:
                if self._quarantine.was_held_up(task_id):
                    await self._end_lapsed_sessions([task_id])
                await self.claim_group(
                    [task_id], is_rescue=is_rescue, admission=admission, part=f"-{index}", is_first=is_first
                )
        except DatabaseError as error:
            await self._failed([task_id], error)
        finally:
            self._free_slots([task_id])

    async def claim_group(
        self,
        task_ids: list[str],
        *,
        is_rescue: bool = False,
        is_simple: bool = False,
        admission: Admission | None = None,
        part: str = "",
        is_first: bool = True,
        landing: int | None = None,
    ) -> Collection[str]:
        """Claim these tasks and start the runs that were won; return the tasks that now get claims of their own.

        `is_simple`: the claim takes its only task for a simple task. If the task is not simple, the claim is lost.
        `part`: a text that is added to the token of `admission`. If several claims use it, each of the claims needs its
        own token.
        `is_first`: no claim was sent before with this admission. The reply of such a claim was lost, or an error: it
        may have won the tasks that this claim loses. So nothing is given back for them: if no run has it, the gate
        finds that out later.
        `landing`: the number of this claim among those whose runs start in their order.
        """
        if not task_ids:
            return ()
        token = claims.fresh_token() if admission is None else admission.token + part
        attempt = Attempt(task_ids, token, monotonic(), admission)
        guard = [
            self._scope.served.guard(self._scope.validity.until),
            *self._hooks.guard(),
            *(self._guard_of_free() if admission is None else admission.guard),
        ]
        are_simple = is_simple or (len(task_ids) > 1 and self._adoption.are_simple and not is_rescue)
        timeout = timedelta(seconds=self._wait)
        closed: list[int] = []
        try:
            claim = claims.claim(
                task_ids,
                self._scope.worker_id,
                token,
                timeout,
                guard,
                are_simple=are_simple,
                as_group=is_rescue,
                tell_changed=closed.append,
                tell_size=self._pace.read,
            )
            documents = await self._store.run(claim)
        except DatabaseUnavailable as error:
            logger.warning("claim unanswered, reading back", extra=fields(tasks=len(task_ids), reason=told(error)))
            is_timeout, asked = isinstance(error, DatabaseTimeout), monotonic()
            left = await self._recovery.recover(attempt, read_again_first=not is_timeout)
            if not is_timeout:
                return ()
            if monotonic() - asked > timeout.total_seconds() / 2:  # locks do not delay a read, so the server is busy
                self._tempo.took(timeout.total_seconds())
                return ()
            if len(task_ids) > 1:
                return self.claim_apart(left, admission, was_held_up=True, is_rescue=is_rescue)
            self._leave_alone(left)
        except MtaskError as error:
            # A malformed document makes the claim of its whole group fail. By then some tasks of the group may be
            # claimed. Each of the other tasks gets a claim of its own.
            left = await self._recovery.recover(attempt)
            if len(task_ids) > 1:
                return self.claim_apart(left, admission, is_rescue=is_rescue)
            await self._quarantine.examine(left, error)
            if admission is not None:
                await admission.settle(left)
        else:
            took = monotonic() - attempt.sent
            won = {document["_id"] for document in documents}
            lost = [task_id for task_id in task_ids if task_id not in won]
            self._pace.claimed(took)
            self._tempo.took(took)
            self.lost_cnt += len(lost)
            self._scope.meter.lost(len(lost))
            if landing is not None:
                await self._landings.wait_for_earlier(landing, took)
            await self._adoption.adopt(documents, attempt)
            for task_id in won:
                self._losses.forget(task_id)
            claim_by = None if admission is None else admission.claim_by
            if claim_by is None or self._clock.now() < claim_by:  # one that came too late says nothing of its tasks
                self._losses.add(lost)
            self._scope.signals.tasks_doubtful.send(lost)
            if admission is not None and is_first:
                await admission.settle(lost)
            if closed:
                await count_lapses(self._scope, lost, sum(closed))
        return ()

    def _guard_of_free(self) -> list[Filter]:
        return self._gate.guard_of_free() if self._gate is not None and self._scope.served.is_limited else []

    @property
    def _wait(self) -> float:
        """The time limit of a claim that may meet a locked document, in seconds."""
        return self._tempo.limit(_LEAST_WAIT, _MOST_WAIT)

    async def _end_lapsed_sessions(self, task_ids: Sequence[str]) -> None:
        """End the transactions that dead workers left open on these tasks: a claim would wait for their end."""
        try:
            ended = await self._store.run(sessions.end_lapsed(task_ids))
        except DatabaseError as error:
            # The tasks are claimed nevertheless. If a task is still locked, this worker does not try it again for a
            # while.
            logger.warning("sessions not ended", extra=fields(tasks=len(task_ids), reason=told(error)))
            return
        for task_id in ended:
            logger.info("the server was asked to end the session of a lapsed run", extra=fields(task=task_id))

    def _leave_alone(self, task_ids: Sequence[str]) -> None:
        """Do not try these tasks again for a while: open transactions have locked their documents."""
        for task_id in task_ids:
            logger.warning("task is locked, left alone for a while", extra=fields(task=task_id))
            self._held_up_cnt += 1
            self._quarantine.hold_up(task_id)


def _closed_runs(tasks: Sequence[StoredTask]) -> set[tuple[str, str]]:
    """Return the task and the token of each run that is closed."""
    return {
        (task.id, claims.token_of(run.run_id))
        for task in tasks
        for run in task.runs
        if run.status is not RunStatus.RUNNING
    }


def _lapsed_runs(tasks: Sequence[StoredTask], now: datetime | None) -> list[tuple[str, str]]:
    """Return the task and the token of each lapsed run."""
    if now is None:
        return []
    return [(task.id, claims.token_of(run.run_id)) for task in tasks for run in task.runs if run.is_lapsed(now)]


# --- recovery --------------------------------------------------------------------------------------------

# Recovery: finds out which tasks a claim has won if its reply was lost. The won tasks are run or handed back.

Document = dict[str, Any]

_FIRST_PAUSE, _MAX_PAUSE = 0.05, 0.5
#: The pauses before the further reads of a claim without a reply, in seconds. The claim may be written but not yet
#: majority-committed. Its tasks may run only when it is majority-committed.
_READ_AGAIN_AFTER = (0.05, 0.2, 0.5)
#: The longest time for which a claim may still take effect, in seconds, after the worker stopped waiting for its reply.
#: Tests tune it.
SETTLED = OPERATION_TIMEOUT.total_seconds() + 2.0


class Recovery:
    """Finds out the results of claims without a complete reply."""

    def __init__(self, scope: Scope, adoption: Adoption) -> None:
        self._store = scope.store
        self._signals = scope.signals
        self._adoption = adoption
        self._stopped = asyncio.Event()
        #: The asyncio tasks of the recoveries that continue after `recover` has returned.
        self.jobs: set[asyncio.Task[None]] = set()

    def stop(self) -> None:
        """From now on, wait for an unavailable database only while a claim may still take effect."""
        self._stopped.set()

    async def recover(self, attempt: Attempt, *, read_again_first: bool = False) -> list[str]:
        """Read back which tasks a claim has won, and start their runs; return the other tasks.

        The claim may still take effect for one of the other tasks. So these tasks are read a few more times. If
        `read_again_first`, this method reads them before it returns; if not, it reads them in the background. A run
        that appears only after these reads is handed back.
        """
        settled = monotonic() + SETTLED
        doubtful = await self._adopt(attempt, attempt.task_ids, settled)
        if read_again_first:
            doubtful = await self._adopt_later(attempt, doubtful, settled)
        self._signals.tasks_doubtful.send(doubtful)
        if doubtful:
            late = self._recover_late(attempt, doubtful, settled, reads_again=not read_again_first)
            job = asyncio.get_running_loop().create_task(late)
            self.jobs.add(job)
            job.add_done_callback(self._landed)
        return doubtful

    def _landed(self, job: asyncio.Task[None]) -> None:
        self.jobs.discard(job)
        if not job.cancelled() and job.exception() is not None:
            logger.error("recovery failed", exc_info=job.exception())

    async def _recover_late(self, attempt: Attempt, doubtful: list[str], settled: float, *, reads_again: bool) -> None:
        if reads_again:
            doubtful = await self._adopt_later(attempt, doubtful, settled)
        if doubtful:
            await self._hand_back_late(attempt, doubtful, settled)

    async def _adopt_later(self, attempt: Attempt, doubtful: list[str], settled: float) -> list[str]:
        for pause in _READ_AGAIN_AFTER:
            if not doubtful or self._stopped.is_set():
                break
            await asyncio.sleep(pause)
            doubtful = await self._adopt(attempt, doubtful, settled)
        return doubtful

    async def _adopt(self, attempt: Attempt, doubtful: Sequence[str], settled: float) -> list[str]:
        """Read back which of the doubtful tasks the claim has won, and start their runs; return the other tasks."""
        documents = await self._read_back(attempt, settled)
        if documents is None:
            return []
        wanted = set(doubtful)
        found = [document for document in documents if document["_id"] in wanted]
        await self._adoption.take_back(found, attempt)
        known = {document["_id"] for document in found}
        return [task_id for task_id in doubtful if task_id not in known]

    async def _read_back(self, attempt: Attempt, settled: float) -> list[Document] | None:
        """Return the tasks that a claim has won. If the database is unavailable, read again.

        None: after `stop`, the database was still unavailable at the time `settled`.
        """
        pauses = Backoff(_FIRST_PAUSE, _MAX_PAUSE)
        while True:
            try:
                return await self._store.run(claims.claimed(attempt.task_ids, attempt.token))
            except DatabaseUnavailable:
                if self._stopped.is_set() and monotonic() > settled:
                    return None
                await asyncio.sleep(pauses.next())

    async def _hand_back_late(self, attempt: Attempt, doubtful: Sequence[str], settled: float) -> None:
        """Hand back the runs that a claim has written after the last read. This worker does not run them."""
        run_ids = attempt.run_ids
        await wake_or_wait(self._stopped, max(0.0, settled - monotonic()))
        try:
            states = await self._store.run(claims.run_statuses(doubtful, [run_ids[task_id] for task_id in doubtful]))
            late = [task_id for task_id in doubtful if states.get(run_ids[task_id]) == RunStatus.RUNNING]
            for task_id in late:  # one statement for each task: a locked document must not hold up the others
                logger.warning("late claim handed back", extra=fields(task=task_id))
                await self._hand_back(task_id, run_ids[task_id])
            if len(attempt.task_ids) == 1:  # the tasks of a group have been claimed again one by one
                never_came = [task_id for task_id in doubtful if run_ids[task_id] not in states]
                await self._adoption.give_up(never_came, attempt)
        except MtaskError as error:
            logger.warning("late claims left to lapse", extra=fields(tasks=len(doubtful), reason=told(error)))

    async def _hand_back(self, task_id: str, run_id: str) -> None:
        outcome = Outcome(task_id, run_id, RunStatus.CANCELED, reason="handed back: the claim's reply was lost")
        try:
            await self._store.run(claims.finish([outcome]))
        except MtaskError as error:
            logger.warning("late claim left to lapse", extra=fields(task=task_id, reason=told(error)))


# --- landings --------------------------------------------------------------------------------------------

# Landings: the claims of groups land in the order in which they began, unless one is late.
#
# Several groups are claimed at once, each on a connection of its own. The tasks of an earlier group go first. So a
# group whose reply has come waits for earlier ones, but not for one whose reply seems lost: slots may be free
# meanwhile.

#: The longest wait for earlier claims: in seconds, or as a multiple of the time that the claim itself took.
#: Tests tune `LEAST_LANDING_WAIT`.
LEAST_LANDING_WAIT, _PATIENCE = 0.25, 2.0


class Landings:
    """The claims of groups that are under way."""

    def __init__(self) -> None:
        self._under_way: dict[int, asyncio.Event] = {}  # in the order in which they began
        self._begun_cnt = 0

    @contextmanager
    def begin(self) -> Iterator[int]:
        """Return the number of a claim that begins. It lands at the end of the context, and others wait until then."""
        self._begun_cnt += 1
        number, landed = self._begun_cnt, asyncio.Event()
        self._under_way[number] = landed
        try:
            yield number
        finally:
            del self._under_way[number]
            landed.set()

    async def wait_for_earlier(self, number: int, took: float) -> None:
        """Wait until the claims that began earlier have landed. `took`: the time that this claim took, in seconds."""
        earlier = [landed for other, landed in self._under_way.items() if other < number]
        if earlier:
            with suppress(TimeoutError):
                async with asyncio.timeout(max(LEAST_LANDING_WAIT, _PATIENCE * took)):
                    for landed in earlier:
                        await landed.wait()
