"""The iterator over events for asyncio: it continues after failovers, and can begin at a token."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import AsyncIterator
from datetime import timedelta
from types import TracebackType
from typing import Self

from mtask.client.connection_aio import AsyncConnection
from mtask.errors import AccessDenied, DatabaseUnavailable, DocumentTooLarge, OperationFailed
from mtask.features.events import completed as several
from mtask.features.events import following
from mtask.features.events.completed import WaitForMany
from mtask.features.events.following import AsyncReader, end_of
from mtask.features.events.readers import AsyncCursor
from mtask.features.events.task_events import TaskEvent
from mtask.kernel.document.task import Task

logger = logging.getLogger("mtask.client")

_PAUSE, _MAX_PAUSE = 0.1, 2.0


class AsyncEvents(AsyncReader):
    """An iterator over the events of tasks. Use it in an `async with` block, or call `poll` and `close`.

    The iteration continues by itself after a failover, without a gap. It raises EventsLost if the oplog no longer
    reaches back to the point where the iteration begins.
    A call that is cancelled loses nothing: its read continues, and the next call returns the event.
    """

    async def __aenter__(self) -> Self:
        return await self.open()

    async def open(self) -> Self:
        """Open the change stream now, so that no later event is missed."""
        if self._cursor is None and not self._is_closed:
            await self._open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def __aiter__(self) -> AsyncIterator[TaskEvent]:
        return self

    async def __anext__(self) -> TaskEvent:
        while not self._is_closed:
            event = await self.poll(None)
            if event is not None:
                return event
        raise StopAsyncIteration

    async def poll(self, timeout: timedelta | float | None = 0.0) -> TaskEvent | None:
        """Return the next event, or None if no event came within `timeout`.

        `timeout`: a timedelta or seconds; None means no limit.
        """
        end = end_of(timeout)
        pause = _PAUSE
        while not self._found and not self._is_closed:
            try:
                await self._read_on(self._read)
                pause = _PAUSE
            except DatabaseUnavailable as error:
                logger.warning("reading events failed and begins again: %s", error)
                await self._sleep(min(pause, max(0.0, end - time.monotonic())))
                pause = min(2 * pause, _MAX_PAUSE)
            if not self._found and time.monotonic() >= end:
                return None
        return self._next()

    async def close(self) -> None:
        """End the iteration."""
        self._is_closed = True
        await self._end_reading()
        await self._drop()

    async def _open(self) -> AsyncCursor:
        await self._prepare()
        while True:
            try:
                self._cursor = await AsyncCursor.open(self._store, self._following.opening)
            except DocumentTooLarge as error:
                self._following.ask_for_less(error)
            else:
                self._following.opened(self._cursor.token)
                return self._cursor

    async def _read(self) -> None:
        is_whole = False
        try:
            is_whole = await self._read_one(self._cursor or await self._open())
        finally:
            # After a partial read, the cursor's position is unknown. A new cursor begins after the last change that was
            # taken.
            if not is_whole:
                await self._drop()

    async def _read_one(self, cursor: AsyncCursor) -> bool:
        """Read at most one change. Return whether the stream may stay open. If False, it must be opened again."""
        try:
            change = await cursor.next()
        except DocumentTooLarge as error:
            self._following.ask_for_less(error)
            return False
        if change is not None and self._following.is_in_doubt(change):
            change = await cursor.with_document_then(change)
        is_whole = self._take(change, cursor.token, is_alive=cursor.is_alive)
        await self._decode()
        return is_whole

    async def _drop(self) -> None:
        cursor, self._cursor = self._cursor, None
        if cursor is not None:
            try:
                await cursor.close()
            except Exception as error:
                logger.debug("cursor not closed: %s", error)


# --- tasks as they end -------------------------------------------------------------------------------------

# The iterator over tasks as they end, for asyncio. One stream of events serves all tasks.


class AsyncCompleted:
    """An iterator over tasks in the order in which they end. Use it in an `async with` block, or call `close`.

    It closes itself after the last task, and after an error.
    """

    def __init__(self, client: AsyncConnection, waiting: WaitForMany) -> None:
        self._client = client
        self._waiting = waiting
        self._began = time.monotonic()
        self._ended: deque[Task] = deque()
        self._events: AsyncEvents | None = None
        self._is_closed = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def __aiter__(self) -> AsyncIterator[Task]:
        return self

    async def __anext__(self) -> Task:
        try:
            while not self._ended and self._waiting.pending and not self._is_closed:
                self._ended.extend(await self._client._run(several.ended(self._waiting)))
                if not self._ended and self._waiting.pending:
                    await self._wait()
        except BaseException:
            await self.close()
            raise
        if not self._ended:
            await self.close()
            raise StopAsyncIteration
        return self._ended.popleft()

    async def close(self) -> None:
        """End the iteration. The tasks are left as they are."""
        self._is_closed = True
        self._ended.clear()
        happening, self._events = self._events, None
        if happening is not None:
            await happening.close()

    async def _wait(self) -> None:
        """Wait until a task may have ended. Raises WaitTimeout."""
        waiting = self._waiting
        elapsed = time.monotonic() - self._began
        pause = waiting.timing.next_pause(elapsed)
        if pause is None:
            raise waiting.give_up()
        if waiting.is_value_near():
            await self._client._sleep(pause)
            waiting.read_owing()
            return
        patience = waiting.patience(elapsed)
        if patience is None:
            await self._client._sleep(pause)
            waiting.read_all()
            return
        try:
            if self._events is None:
                # All tasks are read once more after the stream is open, so that no end is missed.
                self._events = AsyncEvents(
                    self._client._store, following.follow_tasks(list(waiting.pending)), self._client._make_ready
                )
                await self._events.open()
                waiting.read_all()
            else:
                waiting.note(await self._events.poll(patience))
        except (AccessDenied, OperationFailed):
            waiting.timing.can_follow = False  # the user lacks the right to open a change stream
            waiting.read_all()
