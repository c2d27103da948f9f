# Generated from mtask/features/events/events_aio.py: edit that one, then run `make generate`.
"""The iterator over events for sync code: it continues after failovers, and can begin at a token."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from datetime import timedelta
from types import TracebackType
from typing import Self

from mtask.errors import DatabaseUnavailable, DocumentTooLarge
from mtask.features.events.following import SyncReader, end_of
from mtask.features.events.readers import SyncCursor
from mtask.features.events.task_events import TaskEvent

logger = logging.getLogger("mtask.client")

_PAUSE, _MAX_PAUSE = 0.1, 2.0


class Events(SyncReader):
    """An iterator over the events of tasks. Use it in a `with` block, or call `poll` and `close`.

    The iteration continues by itself after a failover, without a gap. It raises EventsLost if the oplog no longer
    reaches back to the point where the iteration begins.
    """

    def __enter__(self) -> Self:
        return self.open()

    def open(self) -> Self:
        """Open the change stream now, so that no later event is missed."""
        if self._cursor is None and not self._is_closed:
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
        """Return the next event, or None if no event came within `timeout`.

        `timeout`: a timedelta or seconds; None means no limit.
        """
        end = end_of(timeout)
        pause = _PAUSE
        while not self._found and not self._is_closed:
            try:
                self._read_on(self._read)
                pause = _PAUSE
            except DatabaseUnavailable as error:
                logger.warning("reading events failed and begins again: %s", error)
                self._sleep(min(pause, max(0.0, end - time.monotonic())))
                pause = min(2 * pause, _MAX_PAUSE)
            if not self._found and time.monotonic() >= end:
                return None
        return self._next()

    def close(self) -> None:
        """End the iteration."""
        self._is_closed = True
        self._end_reading()
        self._drop()

    def _open(self) -> SyncCursor:
        self._prepare()
        while True:
            try:
                self._cursor = SyncCursor.open(self._store, self._following.opening)
            except DocumentTooLarge as error:
                self._following.ask_for_less(error)
            else:
                self._following.opened(self._cursor.token)
                return self._cursor

    def _read(self) -> None:
        is_whole = False
        try:
            is_whole = self._read_one(self._cursor or self._open())
        finally:
            # After a partial read, the cursor's position is unknown. A new cursor begins after the last change that was
            # taken.
            if not is_whole:
                self._drop()

    def _read_one(self, cursor: SyncCursor) -> bool:
        """Read at most one change. Return whether the stream may stay open. If False, it must be opened again."""
        try:
            change = cursor.next()
        except DocumentTooLarge as error:
            self._following.ask_for_less(error)
            return False
        if change is not None and self._following.is_in_doubt(change):
            change = cursor.with_document_then(change)
        is_whole = self._take(change, cursor.token, is_alive=cursor.is_alive)
        self._decode()
        return is_whole

    def _drop(self) -> None:
        cursor, self._cursor = self._cursor, None
        if cursor is not None:
            try:
                cursor.close()
            except Exception as error:
                logger.debug("cursor not closed: %s", error)
