"""Sync and async cursors on the change streams that readers of events open.

Motor runs the driver's sync client in threads. If an asyncio reader uses a Motor client, this module also runs the sync
client in threads.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Self

from mtask.errors import EventsLost, OperationFailed
from mtask.features.events import readers
from mtask.features.events.readers import Opening
from mtask.kernel.driver import roles as rights
from mtask.kernel.driver.stores import TASKS, AsyncStore, SyncStore, bounded

Document = dict[str, Any]
_OPEN_TIMEOUT, CLOSE_TIMEOUT = timedelta(seconds=10), timedelta(seconds=2)
#: Codes of the errors ChangeStreamHistoryLost and ChangeStreamFatalError. A stream also fails with these errors if it
#: begins at an instant before the first entry of the oplog.
_LOST = frozenset({286, 280})


class _Cursor:
    """The common part of the two cursors."""

    def __init__(self, store: AsyncStore | SyncStore, stream: Any) -> None:
        self._store: Any = store
        self._stream = stream

    @property
    def is_alive(self) -> bool:
        """Whether more changes can come."""
        return bool(self._stream.alive)

    @property
    def token(self) -> str | None:
        """The text of the resume token. A stream that starts with it continues after all changes read so far."""
        token = self._stream.resume_token
        return None if token is None else str(token["_data"])


class SyncCursor(_Cursor):
    """An open change stream of tasks. After any error, the caller must close it and open another."""

    @classmethod
    def open(cls, store: SyncStore, opening: Opening) -> Self:
        """Open the stream; raise a kind of DatabaseError."""
        try:
            with bounded(_OPEN_TIMEOUT):
                return cls(store, store.readable[TASKS].watch(opening.pipeline, **opening.options()))
        except Exception as error:
            raise _told(error, store) from error.__cause__

    def next(self) -> Document | None:
        """Return the next change, or None if no change came for a while; raise a kind of DatabaseError."""
        try:
            with bounded(None):
                change: Document | None = self._stream.try_next()
                return change
        except Exception as error:
            raise _told(error) from error.__cause__

    def with_document_then(self, change: Document) -> Document:
        """Return the change with the task's document as it was at the time of the change."""
        found: Document = self._store.run(readers.with_document_then(change))
        return found

    def close(self) -> None:
        """Close the stream; raise a kind of DatabaseError."""
        with bounded(CLOSE_TIMEOUT):
            self._stream.close()


class AsyncCursor(_Cursor):
    """An open change stream of tasks, for asyncio. After any error, the caller must close it and open another."""

    @classmethod
    async def open(cls, store: AsyncStore | SyncStore, opening: Opening) -> Self:
        """Open the stream; raise a kind of DatabaseError."""
        try:
            with bounded(_OPEN_TIMEOUT):
                watch = store.readable[TASKS].watch
                return cls(store, await _called(store, watch, opening.pipeline, **opening.options()))
        except Exception as error:
            raise _told(error, store) from error.__cause__

    async def next(self) -> Document | None:
        """Return the next change, or None if no change came for a while; raise a kind of DatabaseError."""
        try:
            with bounded(None):
                change: Document | None = await _called(self._store, self._stream.try_next)
                return change
        except Exception as error:
            raise _told(error) from error.__cause__

    async def with_document_then(self, change: Document) -> Document:
        """Return the change with the task's document as it was at the time of the change."""
        found: Document = await _called(self._store, self._store.run, readers.with_document_then(change))
        return found

    async def close(self) -> None:
        """Close the stream; raise a kind of DatabaseError."""
        with bounded(CLOSE_TIMEOUT):
            await _called(self._store, self._stream.close)


async def _called(store: AsyncStore | SyncStore, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call the driver. For a Motor client, call its sync client in a thread."""
    if isinstance(store, SyncStore):
        return await asyncio.to_thread(method, *args, **kwargs)
    return await method(*args, **kwargs)


def _told(error: Exception, store: AsyncStore | SyncStore | None = None) -> Exception:
    """Return the error. If the token is too old or a right is missing, return an error with a remedy instead."""
    if isinstance(error, OperationFailed) and error.code in _LOST:
        return EventsLost(error.reason)
    return error if store is None else rights.explained(error, rights.FOLLOWING, store.database.name)
