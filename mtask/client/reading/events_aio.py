"""The iterator over events for asyncio: it goes on after failovers, and can be taken up again by a token."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator
from datetime import timedelta
from types import TracebackType
from typing import Self

from mtask.client.reading.reader import AsyncReader, end_of
from mtask.errors import DatabaseUnavailable, DocumentTooLarge
from mtask.store.streams.cursors import AsyncCursor
from mtask.store.streams.events import TaskEvent

logger = logging.getLogger("mtask.client")

_PAUSE, _MAX_PAUSE = 0.1, 2.0


class AsyncEvents(AsyncReader):
    """What happens to tasks, as it happens: iterate over it in an `async with` block, or `poll` and close it.

    It goes on by itself after a failover, where it was. Raises EventsLost where the oplog no longer reaches back to
    where it is to begin.
    A call that is cancelled loses nothing: what it sent for is read all the same, and told to the next call.
    """

    async def __aenter__(self) -> Self:
        return await self.open()

    async def open(self) -> Self:
        """Begin now: what happens from here on will be told."""
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
        """Return the next event, or None where none came in time (a timedelta or seconds; None waits without end)."""
        end = end_of(timeout)
        pause = _PAUSE
        while not self._found and not self._is_closed:
            try:
                await self._read_on(self._read)
                pause = _PAUSE
            except DatabaseUnavailable as error:
                logger.warning("events broke off, and are taken up again: %s", error)
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
            if not is_whole:  # where the cursor stands by now is not known: another one begins after what was taken
                await self._drop()

    async def _read_one(self, cursor: AsyncCursor) -> bool:
        """Read a change, if one comes; return whether the stream may stay as it is: else it is to be opened anew."""
        try:
            change = await cursor.next()
        except DocumentTooLarge as error:
            self._following.ask_for_less(error)
            return False
        if change is not None and self._following.is_in_doubt(change):
            change = await cursor.with_document_then(change)
        return self._take(change, cursor.token, is_alive=cursor.is_alive)

    async def _drop(self) -> None:
        cursor, self._cursor = self._cursor, None
        if cursor is not None:
            try:
                await cursor.close()
            except Exception as error:
                logger.debug("cursor not closed: %s", error)
