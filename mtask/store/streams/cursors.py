"""The change streams that readers of events open, sync and async: opening, reading on, and closing.

Motor runs the driver's sync client in threads: an asyncio reader on such a client does the same here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Self

from mtask.errors import EventsLost, OperationFailed
from mtask.store.driver import rights
from mtask.store.driver.stores import TASKS, AsyncStore, SyncStore, bounded
from mtask.store.streams import readers
from mtask.store.streams.readers import Opening

Document = dict[str, Any]
_OPEN_TIMEOUT, CLOSE_TIMEOUT = timedelta(seconds=10), timedelta(seconds=2)
#: ChangeStreamHistoryLost, ChangeStreamFatalError, and an instant before the oplog's first.
_LOST = frozenset({286, 280})


class _Cursor:
    """What both kinds know of the driver's cursor."""

    def __init__(self, store: AsyncStore | SyncStore, stream: Any) -> None:
        self._store: Any = store
        self._stream = stream

    @property
    def is_alive(self) -> bool:
        """Whether more changes can come."""
        return bool(self._stream.alive)

    @property
    def token(self) -> str | None:
        """The text of the resume token after all that was read."""
        token = self._stream.resume_token
        return None if token is None else str(token["_data"])


class SyncCursor(_Cursor):
    """An open change stream of tasks. Any error means: close it, and open another."""

    @classmethod
    def open(cls, store: SyncStore, opening: Opening) -> Self:
        """Open the stream; raise DatabaseError in its kinds."""
        try:
            with bounded(_OPEN_TIMEOUT):
                return cls(store, store.readable[TASKS].watch(opening.pipeline, **opening.options()))
        except Exception as error:
            raise _told(error, store) from error.__cause__

    def next(self) -> Document | None:
        """Return the next change, or None where none came for a while; raise DatabaseError in its kinds."""
        try:
            with bounded(None):
                change: Document | None = self._stream.try_next()
                return change
        except Exception as error:
            raise _told(error) from error.__cause__

    def with_document_then(self, change: Document) -> Document:
        """Return the change with the task's document as it was then."""
        found: Document = self._store.run(readers.with_document_then(change))
        return found

    def close(self) -> None:
        """Close the stream; raise DatabaseError in its kinds."""
        with bounded(CLOSE_TIMEOUT):
            self._stream.close()


class AsyncCursor(_Cursor):
    """An open change stream of tasks, for asyncio. Any error means: close it, and open another."""

    @classmethod
    async def open(cls, store: AsyncStore | SyncStore, opening: Opening) -> Self:
        """Open the stream; raise DatabaseError in its kinds."""
        try:
            with bounded(_OPEN_TIMEOUT):
                watch = store.readable[TASKS].watch
                return cls(store, await _called(store, watch, opening.pipeline, **opening.options()))
        except Exception as error:
            raise _told(error, store) from error.__cause__

    async def next(self) -> Document | None:
        """Return the next change, or None where none came for a while; raise DatabaseError in its kinds."""
        try:
            with bounded(None):
                change: Document | None = await _called(self._store, self._stream.try_next)
                return change
        except Exception as error:
            raise _told(error) from error.__cause__

    async def with_document_then(self, change: Document) -> Document:
        """Return the change with the task's document as it was then."""
        found: Document = await _called(self._store, self._store.run, readers.with_document_then(change))
        return found

    async def close(self) -> None:
        """Close the stream; raise DatabaseError in its kinds."""
        with bounded(CLOSE_TIMEOUT):
            await _called(self._store, self._stream.close)


async def _called(store: AsyncStore | SyncStore, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call the driver: for a Motor client its sync client, in a thread."""
    if isinstance(store, SyncStore):
        return await asyncio.to_thread(method, *args, **kwargs)
    return await method(*args, **kwargs)


def _told(error: Exception, store: AsyncStore | SyncStore | None = None) -> Exception:
    """Return the error; as one that says what to do where the token is too old, or the right to open is lacking."""
    if isinstance(error, OperationFailed) and error.code in _LOST:
        return EventsLost(error.reason)
    return error if store is None else rights.explained(error, rights.FOLLOWING, store.database.name)
