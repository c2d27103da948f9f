"""Retention: removes what a queue is not to keep of its finished tasks. Any number of workers may do it."""

from __future__ import annotations

import asyncio
import random
from time import monotonic

from mtask.errors import MtaskError
from mtask.model.status import TaskStatus
from mtask.store.driver.stores import AsyncStore
from mtask.store.tasks import retention
from mtask.worker.admission.controls import Controls
from mtask.worker.log import fields, logger
from mtask.worker.state.timing import wake_or_wait

#: Between two looks, in seconds: from half to one and a half of it, so that workers do not all look at once.
_INTERVAL = 60.0
_SUCCESS = (TaskStatus.SUCCESS,)
_FAIL = (TaskStatus.FAIL, TaskStatus.CANCELED)


class Retention:
    """Keeps the newest finished tasks of the queues that this worker serves, where they are bounded."""

    def __init__(self, store: AsyncStore, controls: Controls) -> None:
        self._store = store
        self._controls = controls
        self._wake = asyncio.Event()
        self._is_stopping = False
        #: Held while a batch is removed.
        self._removing = asyncio.Lock()

    def wake(self) -> None:
        """Look now: what is to be kept has changed."""
        self._wake.set()

    def stop(self) -> None:
        """End `run` after the batch that is under way."""
        self._is_stopping = True
        self._wake.set()

    async def run(self) -> None:
        """Look again and again, until stopped."""
        while not self._is_stopping:
            self._wake.clear()
            try:
                await self._look()
            except MtaskError as error:
                logger.warning("retention failed, will be done again", extra=fields(reason=str(error)))
            except Exception:
                logger.exception("retention failed, and goes on")
            pause = _INTERVAL * (0.5 + random.random())
            await wake_or_wait(self._wake, pause if self._controls.keeps else None)

    async def until_landed(self) -> None:
        """Wait until the batch that is under way has ended; the next one goes by what holds then."""
        async with self._removing:
            pass

    async def _look(self) -> None:
        for queue in list(self._controls.keeps):
            for statuses in (_SUCCESS, _FAIL):
                await self._remove(queue, statuses)

    async def _remove(self, queue: str, statuses: tuple[TaskStatus, ...]) -> None:
        while not self._is_stopping:
            begun = monotonic()
            async with self._removing:
                found = await self._remove_batch(queue, statuses)
            if found < retention.BATCH:
                return
            await asyncio.sleep(monotonic() - begun)  # half of the time is left to others

    async def _remove_batch(self, queue: str, statuses: tuple[TaskStatus, ...]) -> int:
        """Remove a batch by what holds now: it may have been called off since the last. Return how many were found."""
        control = self._controls.keeps.get(queue)
        if control is None or self._controls.is_out_of_touch():
            return 0
        keep = control.keep_success if statuses == _SUCCESS else control.keep_fail
        if keep is None:
            return 0
        return await self._store.run(retention.remove_older(queue, statuses, keep, self._controls.validity()))
