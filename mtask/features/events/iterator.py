"""The hand-written part of the event iterators: their state, and how each iterator reads and waits."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from datetime import timedelta
from typing import Any

from mtask.errors import DatabaseError
from mtask.features.encryption import decrypt as unsealing
from mtask.features.events.cursors import CLOSE_TIMEOUT, AsyncCursor, SyncCursor
from mtask.features.events.following import Following
from mtask.features.events.task_events import TaskEvent
from mtask.kernel.document.parts import Sealed
from mtask.kernel.driver.failover import cancel
from mtask.kernel.driver.operation import Operation
from mtask.kernel.driver.stores import AsyncStore, SyncStore

Document = dict[str, Any]


class _Reader:
    """The state that the sync and the asyncio iterator have in common."""

    def __init__(self, following: Following, sealer: Any) -> None:
        self._following = following
        self._sealer = sealer
        self._found: deque[TaskEvent] = deque()
        self._returned = following.token
        self._is_closed = False

    @property
    def token(self) -> str | None:
        """The token with which a new iterator continues. It lies behind the last event that was returned."""
        return self._returned if self._found else self._following.token

    def _next(self) -> TaskEvent | None:
        if not self._found:
            return None
        event = self._found.popleft()
        self._returned = event.token
        return event

    def _opening(self) -> Operation[None] | None:
        """Return the operation that decrypts the texts of the events that wait; None: it is not needed."""
        if self._sealer is None or not any(isinstance(e.reason, Sealed) or e.message for e in self._found):
            return None
        return self._opened()

    def _opened(self) -> Operation[None]:
        opened: deque[TaskEvent] = deque()
        for event in self._found:
            opened.append((yield from unsealing.open_event(event)))
        self._found = opened

    def _take(self, change: Document | None, token: str | None, *, is_alive: bool) -> bool:
        """Take a change that was read. Return whether the stream may stay open. If False, it must be opened again."""
        if change is None:
            is_as_before = self._following.passed(token)
            return is_alive and is_as_before
        if not self._found:
            self._returned = self._following.token
        found, is_as_before = self._following.take(change)
        self._found.extend(found)
        return is_as_before


class SyncReader(_Reader):
    """Reads in the caller's thread."""

    _sleep = staticmethod(time.sleep)

    def __init__(self, store: SyncStore, following: Following, prepare: Callable[[], None]) -> None:
        super().__init__(following, store.sealer)
        self._store = store
        self._prepare = prepare
        self._cursor: SyncCursor | None = None

    def _read_on(self, read: Callable[[], None]) -> None:
        read()

    def _decrypt(self) -> None:
        """Decrypt the texts of the events that wait."""
        if (opening := self._opening()) is not None:
            with suppress(DatabaseError):  # the texts then say that they are encrypted
                self._store.run(opening)

    def _end_reading(self) -> None:
        """Do nothing: the thread that closes the iterator is the thread that reads."""


class AsyncReader(_Reader):
    """Reads in an asyncio task of its own. If a call is cancelled, its read continues for the next call."""

    _sleep = staticmethod(asyncio.sleep)

    def __init__(
        self, store: AsyncStore | SyncStore, following: Following, prepare: Callable[[], Awaitable[None]]
    ) -> None:
        super().__init__(following, store.sealer)
        self._store = store
        self._prepare = prepare
        self._cursor: AsyncCursor | None = None
        #: The read under way. The call that began it may have been cancelled.
        self._reading: asyncio.Task[None] | None = None

    async def _read_on(self, read: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Wait until the read has ended, with or without a change. A cancelled call leaves the read to the next."""
        if self._reading is None or self._reading.done():
            self._reading = asyncio.create_task(read())
            self._reading.add_done_callback(_consume_error)
        reading = self._reading
        await asyncio.wait((reading,))
        if self._reading is reading:
            self._reading = None
        if not reading.cancelled():
            reading.result()

    async def _decrypt(self) -> None:
        """Decrypt the texts of the events that wait."""
        if (opening := self._opening()) is None:
            return
        with suppress(DatabaseError):  # the texts then say that they are encrypted
            if isinstance(self._store, AsyncStore):
                await self._store.run(opening)
            else:
                await asyncio.to_thread(self._store.run, opening)

    async def _end_reading(self) -> None:
        """End the read under way, even if no call waits for it."""
        reading = self._reading
        if reading is not None and not reading.done():
            if isinstance(self._store, SyncStore):  # the read is in a thread: it cannot be cancelled, but ends soon
                await asyncio.wait((reading,), timeout=CLOSE_TIMEOUT.total_seconds())
            await cancel(reading)


def _consume_error(reading: asyncio.Task[None]) -> None:
    """Retrieve the error of a read, so that asyncio does not log it when no call waits for the read."""
    if not reading.cancelled():
        reading.exception()


def end_of(timeout: timedelta | float | None) -> float:
    """Return the time at which a wait ends that begins now. The times are those of the monotonic clock."""
    if timeout is None:
        return float("inf")
    return time.monotonic() + (timeout.total_seconds() if isinstance(timeout, timedelta) else timeout)
