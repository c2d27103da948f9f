"""The overflow: the due tasks that this worker knows, while it has no room for them.

Most other workers may not hear of these tasks. So this worker reads whether they still wait, and appeals if they do.
"""

from __future__ import annotations

import asyncio
from time import monotonic

from mtask.errors import DatabaseError
from mtask.kernel.worker.discovery.buffer import PreemptionQueue
from mtask.kernel.worker.discovery.rereads import Lookups
from mtask.kernel.worker.discovery.stream import Hearing
from mtask.kernel.worker.process.log import fields, logger, told
from mtask.kernel.worker.process.state import Scope

#: The most tasks of one read. One task that waits is reason enough for an appeal.
_MAX_TASKS = 50
#: A task that has been due for this time, in seconds, should have been taken by another worker that knows it.
_OVERDUE = 0.1
#: The least time between two reads, and after one that has failed, in seconds.
_PAUSE, _PAUSE_AFTER_ERROR = 0.25, 1.0


class Overflow:
    """Appeals to the other workers when due tasks wait for which this worker has no room."""

    def __init__(self, scope: Scope, queue: PreemptionQueue, lookups: Lookups, hearing: Hearing) -> None:
        self._vitals = scope.vitals
        self._signals = scope.signals
        self._queue = queue
        self._lookups = lookups
        self._hearing = hearing
        self._next_read = 0.0
        self._reading: asyncio.Task[None] | None = None

    def look(self, now: float) -> float | None:
        """Begin a read if this worker, which has no room, knows overdue tasks; return the seconds until the next look.

        None: the next look follows a change of the queue or of the room.
        """
        pause = self._hearing.until_appeal(now)
        if pause is None or self._reading is not None or not self._vitals.concurrency:
            return None  # with concurrency 0, the other workers do not count on this one
        pause = max(pause, self._next_read - now)
        if not self._queue.has_ready(now):
            next_waiting = self._queue.next_waiting(now)
            return None if next_waiting is None else max(pause, next_waiting + _OVERDUE)
        if pause > 0:
            return pause
        self._next_read = now + _PAUSE
        task_ids = self._queue.overdue(now - _OVERDUE, _MAX_TASKS)
        if not task_ids:
            return _PAUSE
        self._reading = asyncio.get_running_loop().create_task(self._read(task_ids, now))
        return None

    async def _read(self, task_ids: list[str], sent: float) -> None:
        try:
            if await self._lookups.look_whether_due(task_ids, sent) and not self._hearing.until_appeal(monotonic()):
                self._hearing.appeal()
        except Exception as error:
            self._next_read = monotonic() + _PAUSE_AFTER_ERROR
            if isinstance(error, DatabaseError):
                logger.warning("lookup failed, will be repeated", extra=fields(reason=told(error)))
            else:
                logger.exception("lookup failed, will be repeated")
        finally:
            self._reading = None
            self._signals.room_made.send()  # the claimer looks again

    def stop(self) -> None:
        """End the read that is under way."""
        if self._reading is not None:
            self._reading.cancel()
