"""Recovery: finds out which tasks a claim has won if its reply was lost. The won tasks are run or handed back."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from time import monotonic
from typing import Any

from mtask.errors import DatabaseUnavailable, MtaskError
from mtask.kernel.document.status import RunStatus
from mtask.kernel.driver.stores import OPERATION_TIMEOUT
from mtask.kernel.operations import claim as claims
from mtask.kernel.statements.finish import Outcome
from mtask.kernel.worker.process.log import fields, logger, told
from mtask.kernel.worker.process.scope import Scope
from mtask.kernel.worker.process.timing import Backoff, wake_or_wait
from mtask.kernel.worker.running.accept import Adoption
from mtask.kernel.worker.running.attempt import Attempt

Document = dict[str, Any]

_PAUSE, _MAX_PAUSE = 0.05, 0.5
#: The pauses before the further reads of a claim without a reply, in seconds. The claim may be written but not yet
#: majority-committed. Its tasks may run only when it is majority-committed.
_READ_AGAIN_AFTER = (0.05, 0.2, 0.5)
#: The longest time for which a claim may still take effect, in seconds, after the worker stopped waiting for its reply.
_SETTLED = OPERATION_TIMEOUT.total_seconds() + 2.0


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
        settled = monotonic() + _SETTLED
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
        pauses = Backoff(_PAUSE, _MAX_PAUSE)
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
