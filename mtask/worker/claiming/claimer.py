"""The claimer: takes what is due, as many as there are free slots, in groups. The claim is the truth."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime, timedelta
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, Any

from mtask.errors import DatabaseError, DatabaseTimeout, DatabaseUnavailable, MtaskError
from mtask.model import rules
from mtask.model.documents import StoredTask, runs_in
from mtask.model.handlers import Handler
from mtask.model.identity import fresh_token
from mtask.model.status import RunStatus
from mtask.store.driver.stores import AsyncStore
from mtask.store.tasks import claims, sessions
from mtask.worker.admission.quarantine import Quarantine
from mtask.worker.claiming.pace import PATIENCE, Pace
from mtask.worker.claiming.recovery import Attempt, Recovery
from mtask.worker.leases.held_run import EndReason, HeldRun
from mtask.worker.log import fields, logger
from mtask.worker.state.queue import Entry, PreemptionQueue

if TYPE_CHECKING:
    from mtask.worker.admission.controls import Controls
    from mtask.worker.admission.limits import Admitted, Limits
    from mtask.worker.discovery.inbox import Hints
    from mtask.worker.running.runner import Runner
    from mtask.worker.state.tempo import Tempo

MAX_GROUP = 200
MAX_IN_FLIGHT = 4
#: A further group is begun beside others only when it is worth it: it is large, or a rescue.
_MIN_FURTHER = 50
#: The next tasks wait this long, in seconds, for the group under way: a slower group holds back none of the others.
_MAX_GATHER = 0.2
#: How long a claim may wait for a document that is locked, in seconds: at least, and at most.
_LEAST_WAIT, _MOST_WAIT = 0.3, 5.0
#: Tasks of a held up group that are claimed at once, each alone.
_MAX_APART = 16
_PAUSE = 0.05
#: A timer that comes so much later, in seconds, says that something blocked the loop.
_LATE = 0.05
#: How long it is remembered that a task was claimed here, in seconds, and for how many at least.
_RECENT, _MAX_RECENT = 60.0, 4000


class Claimer:
    """Claims due tasks and starts their runs.

    Where handlers are quick it claims more than the slots that are free: those will be, by the time the claim has
    landed. So it may hold more leases than its concurrency for an instant; handlers never overlap beyond it. What waits
    for a slot is started in the order of the claims, and not at all once it is to be ended.
    """

    def __init__(
        self,
        store: AsyncStore,
        queue: PreemptionQueue,
        handlers: Mapping[str, Handler],
        worker_id: str,
        concurrency: int,
        *,
        controls: Controls,
        limits: Limits,
        hints: Hints,
        quarantine: Quarantine,
        runner: Runner,
        tempo: Tempo,
        is_backed_up: Callable[[], bool],
        on_landed: Callable[[], None],
    ) -> None:
        self._store = store
        self._queue = queue
        self._handlers = handlers
        self._worker_id = worker_id
        self._runner = runner
        self._controls = controls
        self._limits = limits
        self._hints = hints
        self._quarantine = quarantine
        self._is_backed_up = is_backed_up
        self._on_landed = on_landed
        self._concurrency = concurrency
        self._running = 0
        self._pace = Pace()
        #: Claimed, and their slots not free yet; with the time of the claim's landing.
        self._waiting: deque[tuple[float, HeldRun]] = deque()
        self._impatience: asyncio.TimerHandle | None = None
        self._wake = asyncio.Event()
        self._in_flight: set[asyncio.Task[None]] = set()
        #: Tasks that are claimed one by one, since their groups failed: they hold back no group.
        self._apart: set[asyncio.Task[None]] = set()
        self._places_apart = asyncio.Semaphore(_MAX_APART)
        self._held_up_cnt = 0
        self._tempo = tempo
        self._launched_at = 0.0
        self._stopped = asyncio.Event()
        self._recovery = Recovery(store, self._take_back, self._never_came, hints.look_again, self._stopped)
        #: Whether the tasks of the last group were plain: the next one's may be, too.
        self._are_simple = True
        self.busy: set[str] = set()  #: tasks whose claim is under way
        #: When a task was last claimed here, monotonic seconds; the longest ago first.
        self.recent: OrderedDict[str, float] = OrderedDict()
        self.won_cnt = 0
        self.lost_cnt = 0

    @property
    def concurrency(self) -> int:
        """How many handlers run at once."""
        return self._concurrency

    def set_concurrency(self, concurrency: int) -> None:
        """Hold that many at once from now on; 0 pauses. What runs goes on."""
        self._concurrency = concurrency
        self._start_waiting()
        self._wake.set()

    def wake(self) -> None:
        """Look at the queue again: something came in, or a slot is free."""
        self._wake.set()

    def free_slot(self) -> None:
        """Take back the slot of a run that has really ended."""
        self._running -= 1
        self._pace.ended()
        if self._waiting:
            self._start_waiting()
        self._wake.set()

    async def run(self) -> None:
        """Claim until `stop`. Woken by `wake`, by a task's time and by a landed group; bounded by free slots."""
        while not self._stopped.is_set():
            self._wake.clear()
            pause = self._launch()
            with suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._wake.wait()
        for under_way in (self._in_flight, self._apart, self._recovery.jobs):
            while under_way:
                await asyncio.wait(under_way)
        if self._impatience is not None:
            self._impatience.cancel()

    async def until_landed(self) -> None:
        """Wait until every claim that is under way now has landed, or cannot any more."""
        for under_way in (self._in_flight, self._apart, self._recovery.jobs):  # each leaves some to those after it
            begun = set(under_way)
            if begun:
                await asyncio.wait(begun)

    def stop(self) -> None:
        """Claim nothing more, and hand back what has not begun. `run` returns when what is under way has landed."""
        self._stopped.set()
        self._start_waiting()
        self._wake.set()

    def _launch(self) -> float | None:
        """Begin what can be begun; return the seconds until there is more to do, None: until woken."""
        while not self._stopped.is_set():
            slots = self._concurrency - len(self.busy) - self._running - len(self._waiting)
            free = slots + self._pace.ahead(self._concurrency)
            if free <= 0 or len(self._in_flight) >= MAX_IN_FLIGHT:
                return None
            if self._is_backed_up() or self._controls.is_out_of_touch():
                return _PAUSE
            now = monotonic()
            pause = self._queue.next_ready(now)
            if pause is None or pause > 0:
                return pause
            is_limited = self._queue.is_limited_next
            if is_limited:
                free = slots  # it starts when it is claimed
                if free <= 0:
                    return None
            waited = now - self._launched_at
            is_worth_it = min(free, len(self._queue)) >= _MIN_FURTHER or self._queue.is_rescue_next
            if self._in_flight and not is_worth_it and waited < _MAX_GATHER:
                return _MAX_GATHER - waited  # the next group gathers; the one under way wakes us
            entries = self._queue.take(min(free, MAX_GROUP), now)
            if is_limited:
                entries = [entry for entry in entries if not self._limits.park(entry)]
                if not entries:
                    continue
            else:
                entries = self._without_locked(entries)
            if entries:
                task_ids = [entry.task_id for entry in entries]
                self.busy.update(task_ids)
                is_rescue = entries[0].is_begun  # and looked at just now
                look_first = entries[0].rank > 0 and not is_rescue
                is_simple = len(entries) == 1 and entries[0].is_simple
                claim = (
                    partial(self._claim_limited, is_rescue=is_rescue)
                    if is_limited
                    else partial(self._claim_free, look_first=look_first, is_rescue=is_rescue, is_simple=is_simple)
                )
                job = asyncio.get_running_loop().create_task(self._claim(task_ids, claim))
                self._in_flight.add(job)
                self._launched_at = now
                job.add_done_callback(self._landed)
        return None

    def _without_locked(self, entries: list[Entry]) -> list[Entry]:
        """Claim apart what was locked at the last try, so that no group waits for it again; return the others."""
        locked = [entry.task_id for entry in entries if self._quarantine.was_held_up(entry.task_id)]
        if not locked:
            return entries
        self.busy.update(locked)
        self._claim_apart(locked)
        return [entry for entry in entries if entry.task_id not in self.busy]

    def _landed(self, job: asyncio.Task[None]) -> None:
        self._in_flight.discard(job)
        self._apart.discard(job)
        if not job.cancelled() and job.exception() is not None:
            logger.error("claimer failed and goes on", exc_info=job.exception())
        self._wake.set()

    async def _claim(self, task_ids: list[str], claim: Callable[[list[str]], Awaitable[Collection[str]]]) -> None:
        apart: Collection[str] = ()
        try:
            apart = await claim(task_ids)
        except DatabaseError as error:
            await self._failed(task_ids, error)
        finally:
            self._let_go([task_id for task_id in task_ids if task_id not in apart])

    async def _failed(self, task_ids: Collection[str], error: DatabaseError) -> None:
        logger.warning("claim failed, will be tried again", extra=fields(tasks=len(task_ids), reason=str(error)))
        await asyncio.sleep(_PAUSE)
        self._hints.look_again(task_ids)

    def _let_go(self, task_ids: Collection[str]) -> None:
        """Take back the slots that were kept for a claim of these tasks: what it won has taken its own."""
        self.busy.difference_update(task_ids)
        self._hints.landed(task_ids)
        self._on_landed()
        self._wake.set()

    async def _claim_free(
        self, task_ids: list[str], *, look_first: bool, is_rescue: bool, is_simple: bool
    ) -> Collection[str]:
        """Claim these tasks, which need no places; return those that are claimed apart from now on."""
        if is_rescue:
            await self._end_lapsed_sessions(task_ids)
        wanted = task_ids
        if look_first:
            wanted = [task.id for task in await self._store.run(self._hints.still_due(task_ids))]
        return await self._claim_group(wanted, is_rescue=is_rescue, is_simple=is_simple) if wanted else ()

    async def _claim_limited(self, task_ids: list[str], *, is_rescue: bool) -> Collection[str]:
        """Claim those of these tasks that get their places; the others wait for theirs.

        Returns those that are claimed apart from now on.
        """
        if is_rescue:
            await self._end_lapsed_sessions(task_ids)
        due = {task.id: task for task in await self._store.run(self._hints.still_due(task_ids))}
        tasks = [due[task_id] for task_id in task_ids if task_id in due]  # the most urgent first
        free = [task.id for task in tasks if not self._limits.is_limited(task.queue)]
        apart = list(await self._claim_group(free, is_rescue=is_rescue)) if free else []
        limited = [task for task in tasks if self._limits.is_limited(task.queue)]
        if not limited:
            return apart
        admitted = await self._limits.admit(limited, fresh_token())
        if is_rescue:
            # Their places do not wait for a second try, as those of a group that is held up would.
            return apart + self._claim_apart(admitted.task_ids, admitted)
        return apart + list(await self._claim_group(admitted.task_ids, admitted=admitted))

    def _claim_apart(
        self, task_ids: list[str], admitted: Admitted | None = None, *, was_held_up: bool = False
    ) -> list[str]:
        """Claim each of these tasks alone from now on, beside the groups; return them.

        `was_held_up`: their group waited too long for a document that was locked, it seems.
        """
        if task_ids:
            job = asyncio.get_running_loop().create_task(self._claim_each(task_ids, admitted, was_held_up=was_held_up))
            self._apart.add(job)
            job.add_done_callback(self._landed)
        return task_ids

    async def _claim_each(self, task_ids: Sequence[str], admitted: Admitted | None, *, was_held_up: bool) -> None:
        left_alone_cnt = self._held_up_cnt
        each = [self._claim_alone(task_id, place, admitted) for place, task_id in enumerate(task_ids)]
        for ended in await asyncio.gather(*each, return_exceptions=True):
            if isinstance(ended, BaseException):
                logger.error("claim failed", exc_info=ended)
        if was_held_up and left_alone_cnt == self._held_up_cnt:
            self._tempo.took(self._wait)  # nothing is locked: the server is busy

    async def _claim_alone(self, task_id: str, place: int, admitted: Admitted | None) -> None:
        try:
            async with self._places_apart:
                if self._quarantine.was_held_up(task_id):
                    await self._end_lapsed_sessions([task_id])
                await self._claim_group([task_id], admitted=admitted, part=f"-{place}")
        except DatabaseError as error:
            await self._failed([task_id], error)
        finally:
            self._let_go([task_id])

    async def _claim_group(
        self,
        task_ids: list[str],
        *,
        is_rescue: bool = False,
        is_simple: bool = False,
        admitted: Admitted | None = None,
        part: str = "",
    ) -> Collection[str]:
        """Claim these tasks and start the runs won; return those that are claimed apart from now on.

        `is_simple`: the one task; where it is not, it counts as lost. `part` tells the claims of one admission apart.
        """
        if not task_ids:
            return ()
        token = fresh_token() if admitted is None else admitted.token + part
        attempt = Attempt(task_ids, token, monotonic(), admitted)
        guard = [self._controls.guard(), *(self._limits.guard_of_free() if admitted is None else admitted.guard)]
        are_simple = is_simple or (len(task_ids) > 1 and self._are_simple and not is_rescue)
        timeout = timedelta(seconds=self._wait)
        try:
            claim = claims.claim(task_ids, self._worker_id, token, timeout, guard, are_simple=are_simple)
            documents = await self._store.run(claim)
        except DatabaseUnavailable as error:
            logger.warning("claim unanswered, reading back", extra=fields(tasks=len(task_ids), reason=str(error)))
            is_timeout, asked = isinstance(error, DatabaseTimeout), monotonic()
            left = await self._recovery.recover(attempt, look_again_first=not is_timeout)
            if not is_timeout:
                return ()
            if monotonic() - asked > timeout.total_seconds() / 2:  # and reading waits for no lock
                self._tempo.took(timeout.total_seconds())
                return ()
            if len(task_ids) > 1:
                return self._claim_apart(left, admitted, was_held_up=True)
            self._leave_alone(left)
        except MtaskError as error:
            # One malformed document fails its whole group, after some were taken: the rest is tried one by one.
            left = await self._recovery.recover(attempt)
            if len(task_ids) > 1:
                return self._claim_apart(left, admitted)
            await self._quarantine.examine(left, error)
            if admitted is not None:
                await self._limits.settle(admitted, {}, left)
        else:
            took = monotonic() - attempt.sent
            won = {document["_id"] for document in documents}
            lost = [task_id for task_id in task_ids if task_id not in won]
            self._pace.claimed(took)
            self._tempo.took(took)
            self.won_cnt += len(won)
            self.lost_cnt += len(lost)
            await self._adopt(documents, attempt)
            self._hints.lost(lost, won)
            if admitted is not None:
                await self._limits.settle(admitted, _claim_times(documents, token), lost)
        return ()

    @property
    def _wait(self) -> float:
        """How long a claim may wait for a document that is locked, in seconds."""
        return self._tempo.limit(_LEAST_WAIT, _MOST_WAIT)

    async def _end_lapsed_sessions(self, task_ids: Sequence[str]) -> None:
        """End the transactions that dead workers left open on these tasks: a claim would wait for them."""
        try:
            ended = await self._store.run(sessions.end_lapsed(task_ids))
        except DatabaseError as error:
            # The claim decides all the same: what is still locked is left alone for a while.
            logger.warning("sessions not ended", extra=fields(tasks=len(task_ids), reason=str(error)))
            return
        for task_id in ended:
            logger.info("the server was asked to end the session of a lapsed run", extra=fields(task=task_id))

    def _leave_alone(self, task_ids: Sequence[str]) -> None:
        """Leave tasks alone for a while that someone's open transaction has locked."""
        for task_id in task_ids:
            logger.warning("task is locked, left alone for a while", extra=fields(task=task_id))
            self._held_up_cnt += 1
            self._quarantine.hold_up(task_id)

    async def _take_back(self, documents: Sequence[dict[str, Any]], attempt: Attempt) -> None:
        """Start the runs that a claim took whose reply was lost."""
        self.won_cnt += len(documents)
        await self._adopt(documents, attempt)
        if attempt.admitted is not None:
            await self._limits.settle(attempt.admitted, _claim_times(documents, attempt.token), ())

    async def _never_came(self, task_ids: Sequence[str], attempt: Attempt) -> None:
        """Give back the places of tasks that a claim did not take after all."""
        if attempt.admitted is not None and task_ids:
            await self._limits.settle(attempt.admitted, {}, task_ids)

    async def _adopt(self, documents: Sequence[dict[str, Any]], attempt: Attempt) -> None:
        """Start the runs that a claim took. What cannot be started is ended, after all that can has begun."""
        if attempt.admitted is not None:
            self._limits.hold(attempt.admitted, [document["_id"] for document in documents])
        run_ids = attempt.run_ids
        refused: list[tuple[dict[str, Any], Exception]] = []
        are_simple = True
        now = monotonic()
        for document in documents:
            task_id = document["_id"]
            self._remember(task_id, now)
            try:
                task = StoredTask.model_validate(document)
                own = next(entry for entry in reversed(task.runs) if entry.run_id == run_ids[task_id])
                run = HeldRun(task, own, self._handlers[task.name], attempt.sent)
            except Exception as error:  # whatever it is about this one, the others begin
                refused.append((document, error))
                continue
            are_simple &= run.is_simple and not task.task_option.specific_worker_ids
            if own.status is RunStatus.RUNNING and run.is_lease_valid:  # else it was read back too late
                self._runner.hold(run)
                if task.task_state.status.is_final:  # marked as malformed since, by whoever looked at it
                    self._runner.hand_back(run)
                    continue
                self._waiting.append((now, run))
                if task.task_state.cancel_requested or not rules.is_admitted(task, self._worker_id):
                    self._hints.look_at_holder(task_id)
            else:
                self._limits.over(task_id, run_ids[task_id], is_closed=own.status is not RunStatus.RUNNING)
        self._start_waiting()
        self._forget_old(now)
        if len(attempt.task_ids) > 1 and documents:
            self._are_simple = are_simple
        for document, problem in refused:
            run_id, is_closed = run_ids[document["_id"]], False
            try:
                is_closed = await self._quarantine.end(document, run_id, problem)
            finally:
                self._limits.over(document["_id"], run_id, is_closed=is_closed)

    def _start_waiting(self) -> None:
        while self._waiting and (self._running < self._concurrency or self._stopped.is_set()):
            _, run = self._waiting.popleft()
            if self._stopped.is_set():
                run.end(EndReason.WORKER_STOP)
            if run.end_reason is not None or not run.is_lease_valid:
                self._runner.hand_back(run)
                continue
            self._running += 1
            self._runner.start(run)
        if self._waiting and self._impatience is None:
            self._be_patient(max(0.0, self._waiting[0][0] + PATIENCE - monotonic()))

    def _be_patient(self, seconds: float) -> None:
        self._impatience = asyncio.get_running_loop().call_later(seconds, self._lose_patience, monotonic() + seconds)

    def _lose_patience(self, due: float) -> None:
        """Hand back what has waited long for a slot: some handlers take longer than those before them."""
        self._impatience = None
        now = monotonic()
        if now >= due + _LATE:
            self._be_patient(_LATE)  # a handler blocked the loop: what has ended meanwhile frees its slots first
            return
        while self._waiting and self._waiting[0][0] <= now - PATIENCE:
            self._pace.forget()
            self._runner.hand_back(self._waiting.popleft()[1])
        self._start_waiting()

    def _remember(self, task_id: str, now: float) -> None:
        self.recent[task_id] = now
        self.recent.move_to_end(task_id)

    def _forget_old(self, now: float) -> None:
        while len(self.recent) > _MAX_RECENT:
            task_id, when = self.recent.popitem(last=False)
            if when > now - _RECENT:
                self.recent[task_id] = when
                self.recent.move_to_end(task_id, last=False)
                return


def _claim_times(documents: Iterable[dict[str, Any]], token: str) -> dict[str, datetime]:
    """Return by task when the claim with this token took it."""
    return {
        document["_id"]: run["claim_time"]
        for document in documents
        for run in runs_in(document)
        if str(run.get("run_id")).startswith(f"{token}-")
    }
