"""The settlers: each tells others of the ends of tasks, by one relay.

The end of a task and the mark that others are owed are one write. So nothing is lost if this worker dies, or if the
settler fails: a scan of any worker finds the mark, and does the rest.
"""

from __future__ import annotations

import asyncio

from mtask.errors import MtaskError
from mtask.kernel.driver.stores import AsyncStore
from mtask.kernel.operations.relays import Relay
from mtask.kernel.worker.process.log import fields, logger, told

#: The most ended tasks that are settled together.
_MAX_GROUP = 200


class Settler:
    """Settles the ends of tasks in groups. While one group is under way, the next one gathers."""

    def __init__(self, store: AsyncStore, relay: Relay) -> None:
        self.relay = relay
        self._store = store
        self._waiting: dict[str, None] = {}
        self._under_way: asyncio.Task[None] | None = None

    def submit(self, task_id: str) -> None:
        """Settle the end of this task soon."""
        self._waiting[task_id] = None
        if self._under_way is None:
            self._under_way = asyncio.get_running_loop().create_task(self._settle_waiting())
            self._under_way.add_done_callback(self._landed)

    async def drain(self) -> None:
        """Wait until each submitted end is settled, or left to a scan."""
        while self._under_way is not None:
            await asyncio.wait((self._under_way,))

    def _landed(self, task: asyncio.Task[None]) -> None:
        self._under_way = None
        if not task.cancelled() and task.exception() is not None:
            logger.error("settler failed and goes on", exc_info=task.exception())
        if self._waiting:
            self.submit(next(iter(self._waiting)))

    async def _settle_waiting(self) -> None:
        while self._waiting:
            group = list(self._waiting)[:_MAX_GROUP]
            for task_id in group:
                del self._waiting[task_id]
            try:
                await self._store.run(self.relay.settle(group))
            except MtaskError as error:
                logger.warning(
                    "end of a task not settled, left to a scan", extra=fields(tasks=len(group), reason=told(error))
                )
