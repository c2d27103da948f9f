"""The claimer: takes what is due, as many as there are free slots, in groups. The claim is the truth."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, Any

from mtask.errors import DatabaseError, DatabaseUnavailable, MtaskError
from mtask.model import rules
from mtask.model.documents import StoredTask
from mtask.model.handlers import Handler
from mtask.model.identity import fresh_token
from mtask.model.status import RunStatus
from mtask.store import claims
from mtask.store.driver import OPERATION_TIMEOUT, AsyncStore
from mtask.store.pipelines import Outcome
from mtask.worker.log import fields, logger
from mtask.worker.pace import PATIENCE, Pace
from mtask.worker.quarantine import Quarantine
from mtask.worker.queue import PreemptionQueue
from mtask.worker.run import EndReason, HeldRun

if TYPE_CHECKING:
    from mtask.worker.controls import Controls
    from mtask.worker.hints import Hints
    from mtask.worker.limits import Admitted, Limits
    from mtask.worker.runner import Runner

MAX_GROUP = 200
MAX_IN_FLIGHT = 4
#: A further group is begun beside others only when it is worth it: it is large, or a rescue.
_MIN_FURTHER = 50
#: A group is waited for so long, in seconds: one that takes longer, behind someone's open transaction, say, holds back
#: none of the others.
_MAX_GATHER = 0.2
_PAUSE, _MAX_PAUSE = 0.05, 0.5
#: When a claim that was not answered is looked for again, in seconds after the look before: it may be written, and not
#: yet by the majority, which is all that may be run.
_LOOKS_AGAIN = (0.05, 0.2, 0.5)
#: So long after its reply was given up, in seconds, a claim cannot come true any more: its last write was sent before.
_SETTLED = OPERATION_TIMEOUT.total_seconds() + 2.0
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
        self._claiming = 0
        self._running = 0
        self._pace = Pace()
        #: Claimed, and their slots not free yet; with the time of the claim's landing.
        self._waiting: deque[tuple[float, HeldRun]] = deque()
        self._impatience: asyncio.TimerHandle | None = None
        self._wake = asyncio.Event()
        self._in_flight: set[asyncio.Task[None]] = set()
        self._launched_at = 0.0
        self._recoveries: set[asyncio.Task[None]] = set()
        self._stopped = asyncio.Event()
        #: Whether the tasks of the last group were plain: the next one's may be, too.
        self._are_plain = True
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
        for under_way in (self._in_flight, self._recoveries):
            while under_way:
                await asyncio.wait(under_way)
        if self._impatience is not None:
            self._impatience.cancel()

    async def until_landed(self) -> None:
        """Wait until every claim that is under way now has landed, or cannot any more."""
        begun = set(self._in_flight)
        if begun:
            await asyncio.wait(begun)
        recoveries = set(self._recoveries)  # those that the claims left behind among them
        if recoveries:
            await asyncio.wait(recoveries)

    def stop(self) -> None:
        """Claim nothing more, and hand back what has not begun. `run` returns when what is under way has landed."""
        self._stopped.set()
        self._start_waiting()
        self._wake.set()

    def _launch(self) -> float | None:
        """Begin what can be begun; return the seconds until there is more to do, None: until woken."""
        while not self._stopped.is_set():
            slots = self._concurrency - self._claiming - self._running - len(self._waiting)
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
            if entries:
                task_ids = [entry.task_id for entry in entries]
                self._claiming += len(task_ids)
                self.busy.update(task_ids)
                is_rescue = entries[0].is_begun  # and looked at just now
                look_first = entries[0].rank > 0 and not is_rescue
                is_plain = len(entries) == 1 and entries[0].is_plain
                claim = (
                    partial(self._claim_limited, is_rescue=is_rescue)
                    if is_limited
                    else partial(self._claim_free, look_first=look_first, is_rescue=is_rescue, is_plain=is_plain)
                )
                job = asyncio.get_running_loop().create_task(self._claim(task_ids, claim))
                self._in_flight.add(job)
                self._launched_at = now
                job.add_done_callback(self._landed)
        return None

    def _landed(self, job: asyncio.Task[None]) -> None:
        self._in_flight.discard(job)
        if not job.cancelled() and job.exception() is not None:
            logger.error("claimer failed and goes on", exc_info=job.exception())
        self._wake.set()

    async def _claim(self, task_ids: list[str], claim: Callable[[list[str]], Awaitable[None]]) -> None:
        try:
            await claim(task_ids)
        except DatabaseError as error:
            logger.warning("claim failed, will be tried again", extra=fields(tasks=len(task_ids), reason=str(error)))
            await asyncio.sleep(_PAUSE)
            self._hints.look_again(task_ids)
        finally:
            self.busy.difference_update(task_ids)
            self._claiming -= len(task_ids)
            self._hints.landed(task_ids)
            self._on_landed()

    async def _claim_free(self, task_ids: list[str], *, look_first: bool, is_rescue: bool, is_plain: bool) -> None:
        """Claim these tasks, which need no places."""
        wanted = task_ids
        if look_first:
            wanted = [task.id for task in await self._store.run(self._hints.still_due(task_ids))]
        if wanted:
            await self._claim_group(wanted, is_rescue=is_rescue, is_plain=is_plain)

    async def _claim_limited(self, task_ids: list[str], *, is_rescue: bool) -> None:
        """Claim those of these tasks that get their places; the others wait for theirs."""
        due = {task.id: task for task in await self._store.run(self._hints.still_due(task_ids))}
        tasks = [due[task_id] for task_id in task_ids if task_id in due]  # the most urgent first
        free = [task.id for task in tasks if not self._limits.is_limited(task.queue)]
        if free:
            await self._claim_group(free, is_rescue=is_rescue)
        limited = [task for task in tasks if self._limits.is_limited(task.queue)]
        if not limited:
            return
        admitted = await self._limits.admit(limited, fresh_token())
        if is_rescue:
            # Their places do not wait for a second try, as those that an open transaction holds up would have it.
            await self._claim_apart(admitted.task_ids, is_rescue=True, admitted=admitted)
        elif admitted.task_ids:
            await self._claim_group(admitted.task_ids, admitted=admitted)

    async def _claim_apart(self, task_ids: Sequence[str], *, is_rescue: bool, admitted: Admitted | None = None) -> None:
        """Claim each alone, and all at once."""
        each = (
            self._claim_group([task_id], is_rescue=is_rescue, admitted=admitted, part=f"-{place}")
            for place, task_id in enumerate(task_ids)
        )
        for ended in await asyncio.gather(*each, return_exceptions=True):  # none is left under way
            if isinstance(ended, BaseException):
                raise ended

    async def _claim_group(
        self,
        task_ids: list[str],
        *,
        is_rescue: bool = False,
        is_plain: bool = False,
        admitted: Admitted | None = None,
        part: str = "",
    ) -> None:
        """Claim these tasks and start the runs won.

        `is_plain`: the one task; where it is not, it counts as lost. `part` tells the claims of one admission apart.
        """
        token, sent = fresh_token() if admitted is None else admitted.token + part, monotonic()
        guard = [self._controls.guard(), *(self._limits.guard_of_free() if admitted is None else admitted.guard)]
        timeout = claims.RESCUE_TIMEOUT if is_rescue else None
        are_plain = is_plain or (len(task_ids) > 1 and self._are_plain and not is_rescue)
        try:
            claim = claims.claim(task_ids, self._worker_id, token, timeout, guard, are_plain=are_plain)
            documents = await self._store.run(claim)
        except DatabaseUnavailable as error:
            logger.warning("claim unanswered, reading back", extra=fields(tasks=len(task_ids), reason=str(error)))
            left = await self._recover(task_ids, token, sent, () if is_rescue else _LOOKS_AGAIN, admitted)
            if is_rescue:
                await self._rescue_apart(left, is_alone=len(task_ids) == 1)
        except MtaskError as error:
            # One malformed document fails its whole group, after some were taken: the rest is tried one by one.
            left = await self._recover(task_ids, token, sent, (), admitted)
            if len(task_ids) > 1:
                for place, task_id in enumerate(left):
                    await self._claim_group([task_id], is_rescue=is_rescue, admitted=admitted, part=f"-{place}")
                return
            await self._quarantine.examine(left, error)
            if admitted is not None:
                await self._limits.settle(admitted, {}, left)
        else:
            won = {document["_id"] for document in documents}
            lost = [task_id for task_id in task_ids if task_id not in won]
            self._pace.claimed(monotonic() - sent)
            self.won_cnt += len(won)
            self.lost_cnt += len(lost)
            await self._adopt(documents, task_ids, token, sent, admitted)
            self._hints.lost(lost, won)
            if admitted is not None:
                await self._limits.settle(admitted, _claim_times(documents, token), lost)

    async def _rescue_apart(self, task_ids: list[str], *, is_alone: bool) -> None:
        """Claim each alone: an open transaction may hold one of them up, and it must not hold up the others again."""
        if is_alone:
            for task_id in task_ids:
                logger.warning("task is held up, left alone for a while", extra=fields(task=task_id))
                self._quarantine.hold_up(task_id)
        else:
            await self._claim_apart(task_ids, is_rescue=True)

    async def _adopt(
        self,
        documents: Sequence[dict[str, Any]],
        task_ids: Sequence[str],
        token: str,
        sent: float,
        admitted: Admitted | None = None,
    ) -> None:
        """Start the runs that a claim took. What cannot be started is ended, after all that can has begun."""
        if admitted is not None:
            self._limits.hold(admitted, [document["_id"] for document in documents])
        run_ids = claims.run_ids_of(task_ids, token)
        refused: list[tuple[dict[str, Any], Exception]] = []
        are_plain = True
        now = monotonic()
        for document in documents:
            task_id = document["_id"]
            self._remember(task_id, now)
            try:
                task = StoredTask.model_validate(document)
                own = next(entry for entry in reversed(task.runs) if entry.run_id == run_ids[task_id])
                run = HeldRun(task, own, self._handlers[task.name], sent)
            except Exception as error:  # whatever it is about this one, the others begin
                refused.append((document, error))
                continue
            are_plain &= run.is_plain and not task.task_option.specific_worker_ids
            if own.status is RunStatus.RUNNING and run.is_lease_valid:  # else it was read back too late
                self._runner.hold(run)
                if task.task_state.status.is_final:  # marked as malformed since, by whoever looked at it
                    self._runner.hand_back(run)
                    continue
                self._waiting.append((now, run))
                if task.task_state.cancel_requested or not rules.is_admitted(task, self._worker_id):
                    self._hints.look_at_holder(task_id)
        self._start_waiting()
        self._forget_old(now)
        if len(task_ids) > 1 and documents:
            self._are_plain = are_plain
        for document, problem in refused:
            await self._quarantine.end(document, run_ids[document["_id"]], problem)

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

    async def _recover(
        self,
        task_ids: list[str],
        token: str,
        sent: float,
        looks_again: Sequence[float] = (),
        admitted: Admitted | None = None,
    ) -> list[str]:
        """Read back what a claim took that was not answered as it should be, and start that; return the rest.

        What comes true only after the last of these reads is handed back.
        """
        settled = monotonic() + _SETTLED
        known: set[str] = set()
        for pause in (0.0, *looks_again):
            if len(known) == len(task_ids) or (pause and self._stopped.is_set()):
                break
            await asyncio.sleep(pause)
            documents = await self._read_back(task_ids, token, settled)
            if documents is None:
                return []
            found = [document for document in documents if document["_id"] not in known]
            known.update(document["_id"] for document in found)
            self.won_cnt += len(found)
            await self._adopt(found, task_ids, token, sent, admitted)
            if admitted is not None:
                await self._limits.settle(admitted, _claim_times(found, token), ())
        doubtful = [task_id for task_id in task_ids if task_id not in known]
        self._hints.look_again(doubtful)
        if doubtful:
            job = asyncio.get_running_loop().create_task(self._hand_back_late(task_ids, doubtful, token, settled))
            self._recoveries.add(job)
            job.add_done_callback(self._recoveries.discard)
        return doubtful

    async def _read_back(self, task_ids: list[str], token: str, settled: float) -> list[dict[str, Any]] | None:
        """Return what a claim took, as soon as the database can be asked; None where a stop ends the wait for it."""
        pause = _PAUSE
        while True:
            try:
                return await self._store.run(claims.claimed(task_ids, token))
            except DatabaseUnavailable:
                if self._stopped.is_set() and monotonic() > settled:
                    return None
                await asyncio.sleep(pause)
                pause = min(pause * 2, _MAX_PAUSE)

    async def _hand_back_late(self, task_ids: list[str], doubtful: list[str], token: str, settled: float) -> None:
        """Hand back runs of a claim that came true on the server after we had read back: nobody runs them."""
        run_ids = claims.run_ids_of(task_ids, token)
        with suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, settled - monotonic())):
                await self._stopped.wait()
        try:
            states = await self._store.run(claims.run_statuses(doubtful, [run_ids[task_id] for task_id in doubtful]))
            late = [t for t in doubtful if states.get(run_ids[t]) == RunStatus.RUNNING]
            if late:
                logger.warning("late claims handed back", extra=fields(tasks=len(late)))
                await self._store.run(claims.finish([_handed_back(t, run_ids[t]) for t in late]))
        except MtaskError as error:
            logger.warning("late claims left to lapse", extra=fields(tasks=len(doubtful), reason=str(error)))


def _claim_times(documents: Iterable[dict[str, Any]], token: str) -> dict[str, datetime]:
    """Return by task when the claim with this token took it."""
    return {
        document["_id"]: run["claim_time"]
        for document in documents
        for run in claims.runs_in(document)
        if str(run.get("run_id")).startswith(f"{token}-")
    }


def _handed_back(task_id: str, run_id: str) -> Outcome:
    return Outcome(task_id, run_id, RunStatus.CANCELED, reason="handed back: the claim's reply was lost")
