"""Recovery: claims whose reply was lost, or cut short, are read back; what they took is run or handed back."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from time import monotonic
from typing import Any

from mtask.errors import DatabaseUnavailable, MtaskError
from mtask.model.status import RunStatus
from mtask.store.driver.stores import OPERATION_TIMEOUT
from mtask.store.statements.outcome import Outcome
from mtask.store.tasks import claims
from mtask.worker.claiming.adoption import Adoption
from mtask.worker.claiming.attempt import Attempt
from mtask.worker.log import fields, logger
from mtask.worker.state.scope import Scope
from mtask.worker.state.timing import Backoff, wake_or_wait

Document = dict[str, Any]

_PAUSE, _MAX_PAUSE = 0.05, 0.5
#: When a claim that was not answered is looked for again, in seconds after the look before: it may be written, and not
#: yet by the majority, which is all that may be run.
_LOOKS_AGAIN = (0.05, 0.2, 0.5)
#: A claim cannot come true later than this after its reply was given up, in seconds: its last write was sent before.
_SETTLED = OPERATION_TIMEOUT.total_seconds() + 2.0


class Recovery:
    """Finds out what became of claims that were not answered as they should be."""

    def __init__(self, scope: Scope, adoption: Adoption) -> None:
        self._store = scope.store
        self._signals = scope.signals
        self._adoption = adoption
        self._stopped = asyncio.Event()
        #: Recoveries that go on after `recover` has returned.
        self.jobs: set[asyncio.Task[None]] = set()

    def stop(self) -> None:
        """Wait no longer for a database that is away than a claim can come true."""
        self._stopped.set()

    async def recover(self, attempt: Attempt, *, look_again_first: bool = False) -> list[str]:
        """Read back what a claim took, and start that; return the rest.

        Some of the rest may come true later: it is read back a few times more, before the return if
        `look_again_first`. What comes true after these reads is handed back.
        """
        settled = monotonic() + _SETTLED
        doubtful = await self._adopt(attempt, attempt.task_ids, settled)
        if look_again_first:
            doubtful = await self._adopt_later(attempt, doubtful, settled)
        self._signals.tasks_doubtful.send(doubtful)
        if doubtful:
            late = self._recover_late(attempt, doubtful, settled, is_to_look=not look_again_first)
            job = asyncio.get_running_loop().create_task(late)
            self.jobs.add(job)
            job.add_done_callback(self._landed)
        return doubtful

    def _landed(self, job: asyncio.Task[None]) -> None:
        self.jobs.discard(job)
        if not job.cancelled() and job.exception() is not None:
            logger.error("recovery failed", exc_info=job.exception())

    async def _recover_late(self, attempt: Attempt, doubtful: list[str], settled: float, *, is_to_look: bool) -> None:
        if is_to_look:
            doubtful = await self._adopt_later(attempt, doubtful, settled)
        if doubtful:
            await self._hand_back_late(attempt, doubtful, settled)

    async def _adopt_later(self, attempt: Attempt, doubtful: list[str], settled: float) -> list[str]:
        for pause in _LOOKS_AGAIN:
            if not doubtful or self._stopped.is_set():
                break
            await asyncio.sleep(pause)
            doubtful = await self._adopt(attempt, doubtful, settled)
        return doubtful

    async def _adopt(self, attempt: Attempt, doubtful: Sequence[str], settled: float) -> list[str]:
        """Read back which of the tasks in doubt the claim took, and start those; return the rest."""
        documents = await self._read_back(attempt, settled)
        if documents is None:
            return []
        wanted = set(doubtful)
        found = [document for document in documents if document["_id"] in wanted]
        await self._adoption.take_back(found, attempt)
        known = {document["_id"] for document in found}
        return [task_id for task_id in doubtful if task_id not in known]

    async def _read_back(self, attempt: Attempt, settled: float) -> list[Document] | None:
        """Return what a claim took, as soon as the database can be asked; None where a stop ends the wait for it."""
        pauses = Backoff(_PAUSE, _MAX_PAUSE)
        while True:
            try:
                return await self._store.run(claims.claimed(attempt.task_ids, attempt.token))
            except DatabaseUnavailable:
                if self._stopped.is_set() and monotonic() > settled:
                    return None
                await asyncio.sleep(pauses.next())

    async def _hand_back_late(self, attempt: Attempt, doubtful: Sequence[str], settled: float) -> None:
        """Hand back runs of a claim that came true on the server after we had read back: nobody runs them."""
        run_ids = attempt.run_ids
        await wake_or_wait(self._stopped, max(0.0, settled - monotonic()))
        try:
            states = await self._store.run(claims.run_statuses(doubtful, [run_ids[task_id] for task_id in doubtful]))
            late = [task_id for task_id in doubtful if states.get(run_ids[task_id]) == RunStatus.RUNNING]
            for task_id in late:  # each alone: one that is locked must not keep the others
                logger.warning("late claim handed back", extra=fields(task=task_id))
                await self._hand_back(task_id, run_ids[task_id])
            if len(attempt.task_ids) == 1:  # a group's tasks were claimed again, each alone
                never_came = [task_id for task_id in doubtful if run_ids[task_id] not in states]
                await self._adoption.give_up(never_came, attempt)
        except MtaskError as error:
            logger.warning("late claims left to lapse", extra=fields(tasks=len(doubtful), reason=str(error)))

    async def _hand_back(self, task_id: str, run_id: str) -> None:
        outcome = Outcome(task_id, run_id, RunStatus.CANCELED, reason="handed back: the claim's reply was lost")
        try:
            await self._store.run(claims.finish([outcome]))
        except MtaskError as error:
            logger.warning("late claim left to lapse", extra=fields(task=task_id, reason=str(error)))
