"""Retention: removes finished tasks beyond the number that their queue keeps. Several workers may remove at once."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from time import monotonic

from mtask.errors import MtaskError
from mtask.features.controls.worker import Controls
from mtask.kernel.document.status import TaskStatus
from mtask.kernel.operations import change
from mtask.kernel.worker.process.log import fields, logger, told
from mtask.kernel.worker.process.part import Part, Service
from mtask.kernel.worker.process.state import Scope
from mtask.kernel.worker.process.time import wake_or_wait

#: The time between two rounds of removals, in seconds. It varies at random by up to a half, so that workers do not
#: begin together. Tests tune it.
INTERVAL = 60.0
_SUCCESS = (TaskStatus.SUCCESS,)
_FAIL = (TaskStatus.FAIL, TaskStatus.CANCELED)


class Retention(Part):
    """Removes the oldest finished tasks of a queue, if a control sets how many finished tasks the queue keeps."""

    def __init__(self, scope: Scope, controls: Controls) -> None:
        self._store = scope.store
        self._validity = scope.validity
        self._controls = controls
        self._wake = asyncio.Event()
        self._is_stopping = False
        #: The lock that is held while a batch is removed.
        self._removing = asyncio.Lock()

    def services(self) -> Sequence[Service]:
        """Remove tasks until the worker stops."""
        return (Service(self.run, self.stop),)

    def wake(self) -> None:
        """Begin a round of removals now. Call this when the number to keep has changed."""
        self._wake.set()

    def stop(self) -> None:
        """End `run` after the batch that is under way."""
        self._is_stopping = True
        self._wake.set()

    async def run(self) -> None:
        """Remove surplus tasks at intervals, until `stop`."""
        while not self._is_stopping:
            self._wake.clear()
            try:
                await self.remove_surplus()
            except MtaskError as error:
                logger.warning("retention failed, will be done again", extra=fields(reason=told(error)))
            except Exception:
                logger.exception("retention failed, and goes on")
            pause = INTERVAL * (0.5 + random.random())
            await wake_or_wait(self._wake, pause if self._controls.keeps else None)

    async def until_landed(self) -> None:
        """Wait until the current batch is removed. The next batch uses the controls that are then in force."""
        async with self._removing:
            pass

    async def remove_surplus(self) -> None:
        """Remove the finished tasks of each queue that are more than it keeps."""
        for queue in list(self._controls.keeps):
            for statuses in (_SUCCESS, _FAIL):
                await self._remove(queue, statuses)

    async def _remove(self, queue: str, statuses: tuple[TaskStatus, ...]) -> None:
        while not self._is_stopping:
            begun = monotonic()
            async with self._removing:
                found = await self._remove_batch(queue, statuses)
            if found < change.BATCH:
                return
            await asyncio.sleep(monotonic() - begun)  # remove only half of the time: others need the database

    async def _remove_batch(self, queue: str, statuses: tuple[TaskStatus, ...]) -> int:
        """Remove one batch; return the number of tasks found. The number to keep is read again: it may have changed."""
        control = self._controls.keeps.get(queue)
        if control is None or self._validity.is_over():
            return 0
        keep = control.keep_success if statuses == _SUCCESS else control.keep_fail
        if keep is None:
            return 0
        return await self._store.run(change.remove_older(queue, statuses, keep, self._validity.guard()))
