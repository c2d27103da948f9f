"""The iterators over events, sync and async: they go on after failovers, and can be taken up again by a token."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from datetime import timedelta
from types import TracebackType
from typing import Any, Self

from mtask.client.reading.following import Following
from mtask.errors import DatabaseUnavailable, DocumentTooLarge
from mtask.store.driver import rights
from mtask.store.driver.stores import TASKS, AsyncStore, SyncStore, bounded
from mtask.store.streams import readers
from mtask.store.streams.events import TaskEvent

logger = logging.getLogger("mtask.client")

_STEP = 3600.0
_PAUSE, _MAX_PAUSE = 0.1, 2.0
_OPEN_TIMEOUT, _CLOSE_TIMEOUT = timedelta(seconds=10), timedelta(seconds=2)
Document = dict[str, Any]


class _Reader:
    """What both kinds of iterator keep."""

    def __init__(self, following: Following) -> None:
        self._following = following
        self._cursor: Any = None
        self._found: deque[TaskEvent] = deque()
        self._returned = following.token
        self._is_closed = False

    @property
    def token(self) -> str | None:
        """Where to go on after the last event that was returned, and what was left out since."""
        return self._returned if self._found else self._following.token

    def _next(self) -> TaskEvent | None:
        if not self._found:
            return None
        event = self._found.popleft()
        self._returned = event.token
        return event

    def _opened(self, cursor: Any) -> None:
        self._cursor = cursor
        self._following.opened(cursor.resume_token)

    def _take(self, change: Document | None, resume_token: Mapping[str, Any] | None, *, is_alive: bool) -> bool:
        """Take what was read; return whether the stream is to be opened anew."""
        if change is None:
            is_as_before = self._following.passed(resume_token)
            return not (is_alive and is_as_before)
        if not self._found:
            self._returned = self._following.token
        found, is_as_before = self._following.take(change)
        self._found.extend(found)
        return not is_as_before


class Events(_Reader):
    """What happens to tasks, as it happens: iterate over it, or `poll`. Close it, or use it in a `with` block.

    It goes on by itself after a failover, where it was. Raises EventsLost where the oplog no longer reaches back to
    where it is to begin.
    """

    def __init__(self, store: SyncStore, following: Following) -> None:
        super().__init__(following)
        self._store = store

    def __enter__(self) -> Self:
        return self

    def open(self) -> Self:
        """Begin now: what happens from here on will be told."""
        self._open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __iter__(self) -> Iterator[TaskEvent]:
        return self

    def __next__(self) -> TaskEvent:
        while not self._is_closed:
            event = self.poll(None)
            if event is not None:
                return event
        raise StopIteration

    def poll(self, timeout: timedelta | float | None = 0.0) -> TaskEvent | None:
        """Return the next event, or None where none came in time (a timedelta or seconds; None waits without end)."""
        end = _end(timeout)
        pause = _PAUSE
        while not self._found and not self._is_closed:
            try:
                if self._cursor is None:
                    self._open()
                self._read()
                pause = _PAUSE
            except DatabaseUnavailable as error:
                logger.warning("events broke off, and are taken up again: %s", error)
                self._drop()
                time.sleep(min(pause, max(0.0, end - time.monotonic())))
                pause = min(2 * pause, _MAX_PAUSE)
            if not self._found and time.monotonic() >= end:
                return None
        return self._next()

    def close(self) -> None:
        """End the iteration."""
        self._is_closed = True
        self._drop()

    def _open(self) -> None:
        try:
            with bounded(_OPEN_TIMEOUT):
                cursor = self._store.readable[TASKS].watch(self._following.pipeline, **self._following.options())
        except DocumentTooLarge as error:
            self._following.ask_for_less(error)
            self._open()
        except Exception as error:
            translated = self._following.translated(error)
            raise rights.explained(translated, rights.FOLLOWING, self._store.database.name) from error
        else:
            self._opened(cursor)

    def _read(self) -> None:
        try:
            with bounded(None):
                change = self._cursor.try_next()
        except DocumentTooLarge as error:
            self._following.ask_for_less(error)
            self._drop()
            return
        except Exception as error:
            raise self._following.translated(error) from error
        if change is not None and self._following.is_in_doubt(change):
            change = self._store.run(readers.with_document_then(change))
        if self._take(change, self._cursor.resume_token, is_alive=self._cursor.alive):
            self._drop()

    def _drop(self) -> None:
        cursor, self._cursor = self._cursor, None
        if cursor is not None:
            try:
                with bounded(_CLOSE_TIMEOUT):
                    cursor.close()
            except Exception as error:
                logger.debug("cursor not closed: %s", error)


class AsyncEvents(_Reader):
    """What happens to tasks, as it happens: `async for` over it in an `async with` block, or `poll`. See `Events`.

    A call that is cancelled loses nothing: what it sent for is read all the same, and told to the next call.
    """

    def __init__(
        self, store: AsyncStore | SyncStore, following: Following, prepare: Callable[[], Awaitable[None]]
    ) -> None:
        super().__init__(following)
        self._store = store
        self._prepare = prepare
        #: What is being read, whoever waits for it.
        self._reading: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        return await self.open()

    async def open(self) -> Self:
        """Begin now: what happens from here on will be told."""
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
            event = await self.poll(_STEP)
            if event is not None:
                return event
        raise StopAsyncIteration

    async def poll(self, timeout: timedelta | float | None = 0.0) -> TaskEvent | None:
        """Return the next event, or None where none came in time (a timedelta or seconds; None waits without end)."""
        end = _end(timeout)
        pause = _PAUSE
        while not self._found and not self._is_closed:
            try:
                await self._read_on()
                pause = _PAUSE
            except DatabaseUnavailable as error:
                logger.warning("events broke off, and are taken up again: %s", error)
                await asyncio.sleep(min(pause, max(0.0, end - time.monotonic())))
                pause = min(2 * pause, _MAX_PAUSE)
            if not self._found and time.monotonic() >= end:
                return None
        return self._next()

    async def close(self) -> None:
        """End the iteration."""
        self._is_closed = True
        reading = self._reading
        if reading is not None and not reading.done():
            if isinstance(self._store, SyncStore):  # a thread cannot be cancelled, and what it has sent for comes soon
                await asyncio.wait((reading,), timeout=_CLOSE_TIMEOUT.total_seconds())
            reading.cancel()
            await asyncio.wait((reading,))
        await self._drop()

    async def _read_on(self) -> None:
        """Wait until something was read, or nothing came for a while; who is cancelled leaves it to the next."""
        if self._reading is None or self._reading.done():
            self._reading = asyncio.create_task(self._read())
            self._reading.add_done_callback(_look_at)
        reading = self._reading
        await asyncio.wait((reading,))
        if self._reading is reading:
            self._reading = None
        if not reading.cancelled():
            reading.result()

    async def _call(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call the driver: with a Motor client its own way, which is the sync client in threads."""
        if isinstance(self._store, SyncStore):
            return await asyncio.to_thread(method, *args, **kwargs)
        return await method(*args, **kwargs)

    async def _open(self) -> None:
        await self._prepare()
        try:
            with bounded(_OPEN_TIMEOUT):
                following = self._following
                cursor = await self._call(self._store.readable[TASKS].watch, following.pipeline, **following.options())
        except DocumentTooLarge as error:
            self._following.ask_for_less(error)
            await self._open()
        except Exception as error:
            translated = self._following.translated(error)
            raise rights.explained(translated, rights.FOLLOWING, self._store.database.name) from error
        else:
            self._opened(cursor)

    async def _read(self) -> None:
        is_whole = False
        try:
            if self._cursor is None:
                await self._open()
            is_whole = not await self._read_one()
        finally:
            if not is_whole:  # where the cursor stands by now is not known: another one begins after what was taken
                await self._drop()

    async def _read_one(self) -> bool:
        """Read a change, if one comes; return whether the stream is to be opened anew."""
        cursor = self._cursor
        try:
            with bounded(None):
                change = await self._call(cursor.try_next)
        except DocumentTooLarge as error:
            self._following.ask_for_less(error)
            return True
        except Exception as error:
            raise self._following.translated(error) from error
        if change is not None and self._following.is_in_doubt(change):
            change = await self._call(self._store.run, readers.with_document_then(change))
        return self._take(change, cursor.resume_token, is_alive=cursor.alive)

    async def _drop(self) -> None:
        cursor, self._cursor = self._cursor, None
        if cursor is not None:
            try:
                with bounded(_CLOSE_TIMEOUT):
                    await self._call(cursor.close)
            except Exception as error:
                logger.debug("cursor not closed: %s", error)


def _look_at(reading: asyncio.Task[None]) -> None:
    """Look at what became of it, where nobody waits for it any more."""
    if not reading.cancelled():
        reading.exception()


def _end(timeout: timedelta | float | None) -> float:
    if timeout is None:
        return float("inf")
    return time.monotonic() + (timeout.total_seconds() if isinstance(timeout, timedelta) else timeout)
