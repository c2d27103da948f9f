"""The iterators over events, sync and async: they go on after failovers, and can be taken up again by a token."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from types import TracebackType
from typing import Any, Self

from mtask.client import views
from mtask.errors import DatabaseUnavailable, EventsLost, InvalidInput, OperationFailed, shown
from mtask.store import events
from mtask.store.driver import AsyncStore, SyncStore, bounded
from mtask.store.events import TaskEvent

logger = logging.getLogger("mtask.client")

#: How long one request waits for events on the server, in ms.
_MAX_AWAIT_MS = 1_000
_BATCH = 500
_STEP = 3600.0
_PAUSE, _MAX_PAUSE = 0.1, 2.0
_OPEN_TIMEOUT = timedelta(seconds=10)
#: ChangeStreamHistoryLost, ChangeStreamFatalError, and an instant before the oplog's first.
_LOST = frozenset({286, 280})
Document = dict[str, Any]
Texts = str | Sequence[str] | None


@dataclass(slots=True)
class Following:
    """Where a reader stands in the stream of changes, and what it wants of it. No input or output."""

    pipeline: list[Document]
    #: The change after which to go on: a resume token's text.
    after: str | None
    since: Any  #: an instant as the driver takes it
    #: Events of the next change that were read before.
    skip: int
    needs_document: bool = True

    def options(self) -> dict[str, Any]:
        """Return the arguments with which to open the change stream."""
        options: dict[str, Any] = {"max_await_time_ms": _MAX_AWAIT_MS, "batch_size": _BATCH}
        if self.needs_document:
            options["full_document"] = "updateLookup"
        if self.after is not None:
            options["start_after"] = {"_data": self.after}
        elif self.since is not None:
            options["start_at_operation_time"] = self.since
        return options

    def opened(self, token: Mapping[str, Any] | None) -> None:
        """Take down where the stream begins, so that it can be opened anew there."""
        if self.after is None and token is not None:
            self.after = str(token["_data"])

    @property
    def token(self) -> str | None:
        """Where to go on after all that was taken."""
        return f"{self.after}.{self.skip}" if self.after is not None and self.skip else self.after

    def take(self, change: Document) -> list[TaskEvent]:
        """Return the events of a change that were not read before, and go on after it."""
        here = str(change["_id"]["_data"])
        before = self.after
        found = events.events_of(change)
        last = len(found) - 1
        # In the middle of a change: the one before it, and how many of this one's were read.
        tokens = [here if place == last or before is None else f"{before}.{place + 1}" for place in range(len(found))]
        read, self.skip = self.skip, 0
        self.after = here
        pairs = list(zip(found, tokens, strict=True))[read:]
        return [replace(event, token=token) for event, token in pairs]

    def passed(self, token: Mapping[str, Any] | None) -> None:
        """Go on after what was left out: the server tells how far it has looked."""
        if token is not None and not self.skip:
            self.after = str(token["_data"])

    def translated(self, error: Exception) -> Exception:
        """Return the error, as one that says what to do where the token is too old."""
        if isinstance(error, OperationFailed) and error.code in _LOST:
            return EventsLost(error.reason)
        return error


def follow(name: Texts, queue: Texts, key: Texts, after: str | None, since: datetime | None) -> Following:
    """Return the checked request; raise InvalidInput."""
    criteria = views.criteria(status=None, name=name, queue=queue, key=key, worker_id=None)

    def several(field: str) -> list[str] | None:
        wanted = criteria[field]
        return [wanted] if isinstance(wanted, str) else wanted

    if after is not None and since is not None:
        raise InvalidInput("give after or since, not both.", field="after")
    token, skip = _parsed(after)
    stages = events.pipeline(several("name"), several("queue"), several("key"))
    return Following(stages, token, _timestamp(since), skip)


def follow_task(task_id: str) -> Following:
    """Return the request for what happens to one task."""
    return Following(events.pipeline(None, None, None, task_id), None, None, 0, needs_document=False)


def _parsed(after: str | None) -> tuple[str | None, int]:
    if after is None:
        return None, 0
    token, dot, skip = after.partition(".") if isinstance(after, str) else ("", "", "")
    try:
        bytes.fromhex(token)
        count = int(skip) if dot else 0
    except ValueError:
        token, count = "", 0
    if not token or count < 0:
        raise InvalidInput(
            f"after {shown(after)} is no token: use that of an event (`event.token`, or mtask tail --json).",
            field="after",
        )
    return token, count


def _timestamp(since: datetime | None) -> Any:
    if since is None:
        return None
    if not isinstance(since, datetime) or since.utcoffset() is None:
        raise InvalidInput(f"since {shown(since)}: give an aware datetime, such as datetime.now(UTC).", field="since")
    try:
        return events.in_oplog(since)
    except (ValueError, OverflowError):
        raise InvalidInput(f"since {since} lies outside of what the oplog can hold.", field="since") from None


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

    def _take(self, change: Document | None, resume_token: Mapping[str, Any] | None) -> None:
        if change is None:
            self._following.passed(resume_token)
            return
        if not self._found:
            self._returned = self._following.token
        self._found.extend(self._following.take(change))


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
                self._cursor = self._store.readable.watch(self._following.pipeline, **self._following.options())
        except Exception as error:
            raise self._following.translated(error) from error
        self._following.opened(self._cursor.resume_token)

    def _read(self) -> None:
        try:
            with bounded(None):
                change = self._cursor.try_next()
        except Exception as error:
            raise self._following.translated(error) from error
        self._take(change, self._cursor.resume_token)
        if change is None and not self._cursor.alive:
            self._drop()

    def _drop(self) -> None:
        cursor, self._cursor = self._cursor, None
        if cursor is not None:
            try:
                with bounded(timedelta(seconds=2)):
                    cursor.close()
            except Exception as error:
                logger.debug("cursor not closed: %s", error)


class AsyncEvents(_Reader):
    """What happens to tasks, as it happens: `async for` over it in an `async with` block, or `poll`. See `Events`."""

    def __init__(
        self, store: AsyncStore | SyncStore, following: Following, prepare: Callable[[], Awaitable[None]]
    ) -> None:
        super().__init__(following)
        self._store = store
        self._prepare = prepare
        #: For a Motor client, whose own way it is: the driver's sync client, in threads.
        self._in_threads: Events | None = None

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
                await self._read()
                pause = _PAUSE
            except DatabaseUnavailable as error:
                logger.warning("events broke off, and are taken up again: %s", error)
                await self._drop()
                await asyncio.sleep(min(pause, max(0.0, end - time.monotonic())))
                pause = min(2 * pause, _MAX_PAUSE)
            if not self._found and time.monotonic() >= end:
                return None
        return self._next()

    @property
    def token(self) -> str | None:
        """Where to go on after the last event that was returned, and what was left out since."""
        if self._in_threads is None:
            return super().token
        return self._returned if self._found else self._in_threads.token

    async def close(self) -> None:
        """End the iteration."""
        self._is_closed = True
        await self._drop()

    async def _open(self) -> None:
        await self._prepare()
        if isinstance(self._store, SyncStore):
            self._in_threads = await asyncio.to_thread(Events(self._store, self._following).open)
            return
        try:
            with bounded(_OPEN_TIMEOUT):
                self._cursor = await self._store.readable.watch(self._following.pipeline, **self._following.options())
        except Exception as error:
            raise self._following.translated(error) from error
        self._following.opened(self._cursor.resume_token)

    async def _read(self) -> None:
        if self._in_threads is None and self._cursor is None:
            await self._open()
        if self._in_threads is not None:
            event = await asyncio.to_thread(self._in_threads.poll, 0.0)
            if event is not None:
                self._found.append(event)
            return
        try:
            with bounded(None):
                change = await self._cursor.try_next()
        except Exception as error:
            raise self._following.translated(error) from error
        self._take(change, self._cursor.resume_token)
        if change is None and not self._cursor.alive:
            await self._drop()

    async def _drop(self) -> None:
        if self._in_threads is not None:
            await asyncio.to_thread(self._in_threads.close)
        cursor, self._cursor = self._cursor, None
        if cursor is not None:
            try:
                with bounded(timedelta(seconds=2)):
                    await cursor.close()
            except Exception as error:
                logger.debug("cursor not closed: %s", error)


def _end(timeout: timedelta | float | None) -> float:
    if timeout is None:
        return float("inf")
    return time.monotonic() + (timeout.total_seconds() if isinstance(timeout, timedelta) else timeout)
