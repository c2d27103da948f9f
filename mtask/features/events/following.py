"""A reader of events: its request, and its position in the stream of changes. This module does no input or output."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any, TypeVar

from mtask.arguments.criteria import FindCriteria, checked
from mtask.errors import DatabaseError, DocumentTooLarge, InvalidInput, shown
from mtask.features.events import readers
from mtask.features.events import task_events as events
from mtask.features.events.readers import CLOSE_TIMEOUT, AsyncCursor, Detail, Opening, SyncCursor, Wanted
from mtask.features.events.task_events import TaskEvent
from mtask.kernel.document.parts import Sealed
from mtask.kernel.driver.codec import Codec, Owner
from mtask.kernel.driver.failover import cancel
from mtask.kernel.driver.operation import Operation
from mtask.kernel.driver.stores import AsyncStore, SyncStore

T = TypeVar("T")
logger = logging.getLogger("mtask.client")

Document = dict[str, Any]
Texts = str | Sequence[str] | None
#: The most ids by which the server selects events. With more ids, it selects them by the names of the tasks.
MOST_IDS = 10_000


@dataclass(frozen=True, slots=True)
class Begun:
    """The position that a token names. All changes before it were read. The stream begins at its oplog time."""

    #: The token of the last change that was read, at least in part. Tokens sort in the order of their changes.
    change: str
    count: int | None  #: the number of events of `change` that were read, selected or not; None: all
    #: Only tokens of earlier versions contain this number. Their `change` was read whole, and the next change in part:
    #: this is the number of events of the next change that were read.
    count_of_next: int = 0

    def unread(self, here: str, found: list[tuple[TaskEvent, str]]) -> list[tuple[TaskEvent, str]]:
        """Return the unread events of a change. `here`: the token of the change; `found`: all its events."""
        if here < self.change:
            return []
        if here == self.change:
            return [] if self.count is None else found[self.count :]
        # The change that was read in part had more than `count_of_next` events. If this change has no more, it is
        # another one, because the task of the first one was removed.
        return found[self.count_of_next :] if len(found) > self.count_of_next else found

    def is_behind(self, here: str) -> bool:
        """Whether all later changes are unread. `here`: the token of the current change."""
        return here > self.change or (here == self.change and not self.count_of_next)


@dataclass(slots=True)
class Following:
    """A reader's position in the stream of changes, and the events that the reader wants."""

    wanted: Wanted
    since: Any = None  #: the oplog time at which the stream begins, in the driver's type
    #: The position up to which the changes after `since` were read already.
    begun: Begun | None = None
    #: The token of the position after the events that were taken.
    token: str | None = None
    #: The resume token, as text. If the stream is opened again, it begins after this token.
    after: str | None = None
    #: How much of the next change is read. It is less than usual if that change is too large.
    detail: Detail = Detail.FULL

    @property
    def opening(self) -> Opening:
        """The arguments that open the change stream at this position."""
        return Opening(self.wanted, self.detail, self.after, self.since)

    def opened(self, token: str | None) -> None:
        """Remember where the stream begins, so that it can be opened there again."""
        if self.after is None and token is not None:
            self.after = token
            self.token = self.token or self.after

    def is_in_doubt(self, change: Document) -> bool:
        """Whether the task's document must be looked up, as it was at the time of the change."""
        if self.detail is Detail.WITHOUT_DOCUMENT:
            return self.wanted.needs_document and change["operationType"] == "update"
        return _understood(events.is_in_doubt, change, False)

    def take(self, change: Document) -> tuple[list[TaskEvent], bool]:
        """Return the unread events of a change, and move the position behind the change.

        The second result is whether the stream may stay open. If False, the stream must be opened again.
        """
        here = str(change["_id"]["_data"])
        instant = change["clusterTime"]
        # Events are counted before they are selected, because another reader may use this token and ask for other
        # tasks.
        nothing: list[TaskEvent] = []
        found = _understood(events.events_of, change, nothing)
        pairs = [(event, f"{here}.{count}.{instant.time}-{instant.inc}") for count, event in enumerate(found, start=1)]
        unread = pairs if self.begun is None else self.begun.unread(here, pairs)
        if self.begun is None or self.begun.is_behind(here):
            self.begun, self.token = None, f"{here}.{len(found)}.{instant.time}-{instant.inc}"
        self.after = here
        tenant = self.wanted.tenant
        selected = [
            replace(event if tenant is None else events.as_told_to(event, tenant), token=token)
            for event, token in unread
            if self._is_wanted(event)
        ]
        return selected, self._is_usual_again()

    def _is_wanted(self, event: TaskEvent) -> bool:
        queues, tenant = self.wanted.queues, self.wanted.tenant
        return (queues is None or event.queue in queues) and (tenant is None or event.is_of(tenant))

    def passed(self, token: str | None) -> bool:
        """Move the position to this token. The server has left out the changes before it.

        Return whether the stream may stay open. If False, the stream must be opened again.
        """
        if token is not None:
            self.after = token
            if self.begun is None or (self.begun.is_behind(self.after) and not self.begun.count_of_next):
                self.begun, self.token = None, self.after
        return self._is_usual_again()

    def ask_for_less(self, error: DocumentTooLarge) -> None:
        """Ask for the next change in less detail. If no lower level of detail exists, raise the error."""
        if self.detail is Detail.NAME:
            raise error
        self.detail = Detail(self.detail + 1)
        if self.detail is Detail.NAME:
            logger.warning("a change of a task is too large to read: its events are left out")

    def _is_usual_again(self) -> bool:
        is_as_before = self.detail is Detail.FULL
        self.detail = Detail.FULL
        return is_as_before


def _understood(read: Callable[[Mapping[str, Any]], T], change: Document, otherwise: T) -> T:
    """Return the result of `read` for a change. If `read` raises an error, log the error and return `otherwise`."""
    try:
        return read(change)
    except Exception:
        logger.exception("a change of task %s is not understood, and is left out", shown(change["documentKey"]["_id"]))
        return otherwise


def follow(
    name: Texts, queue: Texts, key: Texts, after: str | None, since: datetime | None, tenant: str | None = None
) -> Following:
    """Check the arguments and return the request for events; raise InvalidInput."""
    criteria = checked(FindCriteria, {"name": name, "queue": queue, "key": key}, tenant)

    def several(field: str) -> list[str] | None:
        wanted = criteria[field]
        return [wanted] if isinstance(wanted, str) else wanted

    wanted = Wanted(several("name"), several("queue"), several("key"), tenant=tenant)
    if after is not None and since is not None:
        raise InvalidInput("give after or since, not both.", field="after")
    if after is not None:
        return _going_on(wanted, after)
    return Following(wanted, since=_in_oplog(since))


def follow_task(task_id: str) -> Following:
    """Return the request for the events of one task."""
    return Following(Wanted(task_id=task_id, needs_document=False))


def follow_tasks(task_ids: Sequence[str]) -> Following:
    """Return the request for the ends and removals of several tasks. Of very many tasks, it selects them by name."""
    if len(task_ids) > MOST_IDS:
        names = sorted({task_id.partition(":")[0] for task_id in task_ids})
        return Following(Wanted(names=names, ends_only=True, needs_document=False))
    return Following(Wanted(task_ids=task_ids, ends_only=True, needs_document=False))


def follow_flow(key: str) -> Following:
    """Return the request for the ends and removals of the steps of a flow."""
    return Following(Wanted(flow_key=key, ends_only=True, needs_document=False))


def _going_on(wanted: Wanted, after: str) -> Following:
    """Return the request that continues after the event with this token.

    The token contains the change, the number of the change's events that were read, and the change's oplog time. The
    stream begins at this time. It cannot begin after a resume token: the server would have to find the token's change,
    and it does not find the change if the request now selects another name or key.

    Before the first event, the token is only the server's resume token. Tokens of earlier versions have no oplog time,
    either. For a change that was read in part, such a token contains the change before it and the number of events that
    were read.
    """
    change, *counted = after.split(".") if isinstance(after, str) else [""]
    try:
        bytes.fromhex(change)
        if len(counted) == 2:
            begun = Begun(change, _number(counted[0]))
            seconds, ordinal = map(_number, counted[1].split("-"))
        else:
            begun = Begun(change, None, *map(_number, counted))
            # The server's token begins with a marker byte and the oplog time: 4 bytes for the seconds, 4 bytes for the
            # ordinal.
            seconds, ordinal = int(change[2:10], 16), int(change[10:18], 16)
        return Following(wanted, readers.place_in_oplog(seconds, ordinal), begun, token=after)
    except (TypeError, ValueError):
        raise InvalidInput(
            f"after {shown(after)} is no token: use the token of an event (`event.token`, or mtask tail --json).",
            field="after",
        ) from None


def _number(digits: str) -> int:
    if not digits.isascii() or not digits.isdecimal():
        raise ValueError(digits)
    return int(digits)


def _in_oplog(since: datetime | None) -> Any:
    if since is None:
        return None
    if not isinstance(since, datetime) or since.utcoffset() is None:
        raise InvalidInput(f"since {shown(since)}: give an aware datetime, such as datetime.now(UTC).", field="since")
    try:
        return readers.in_oplog(since)
    except (ValueError, OverflowError):
        raise InvalidInput(f"since {since} lies outside the times that an oplog can hold.", field="since") from None


# --- iterator --------------------------------------------------------------------------------------------

# The hand-written part of the event iterators: their state, and how each iterator reads and waits.


def _opened(event: TaskEvent, codec: Codec) -> Operation[TaskEvent]:
    """Return the event with its texts decoded, if its queue or its tenant is certain."""
    owner = Owner(event.name, event.key, [] if event.queue is None else [event.queue])
    if codec.is_readable_refused(owner):
        event = events.without_readable(event)
    texts: dict[str, Any] = {"reason": event.reason, "message": event.message}  # encoded under these names, too
    closed = {name: text for name, text in texts.items() if isinstance(text, Sealed) and not text.is_final}
    opened = yield from codec.open_values([(owner, name, text) for name, text in closed.items()])
    return replace(event, **dict(zip(closed, opened, strict=True)))


class _Reader:
    """The state that the sync and the asyncio iterator have in common."""

    def __init__(self, following: Following, codec: Codec) -> None:
        self._following = following
        self._codec = codec
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
        """Return the operation that decodes the texts of the events that wait; None: it is not needed."""
        if self._codec.is_plain or not any(isinstance(e.reason, Sealed) or e.message for e in self._found):
            return None
        return self._opened()

    def _opened(self) -> Operation[None]:
        opened: deque[TaskEvent] = deque()
        for event in self._found:
            opened.append((yield from _opened(event, self._codec)))
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
        super().__init__(following, store.codec)
        self._store = store
        self._prepare = prepare
        self._cursor: SyncCursor | None = None

    def _read_on(self, read: Callable[[], None]) -> None:
        read()

    def _decode(self) -> None:
        """Decode the texts of the events that wait."""
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
        super().__init__(following, store.codec)
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

    async def _decode(self) -> None:
        """Decode the texts of the events that wait."""
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
