"""A reader of events: its request, and its position in the stream of changes. This module does no input or output."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, TypeVar

from mtask.client.reading import views
from mtask.errors import DocumentTooLarge, InvalidInput, shown
from mtask.store.streams import events, readers
from mtask.store.streams.events import TaskEvent
from mtask.store.streams.readers import Detail, Opening, Wanted

T = TypeVar("T")
logger = logging.getLogger("mtask.client")

Document = dict[str, Any]
Texts = str | Sequence[str] | None


@dataclass(frozen=True, slots=True)
class Begun:
    """The position that a token names. The reader has read everything before it, and the stream begins at its time."""

    #: The token of the last change that was read, at least in part. Tokens sort in the order of their changes.
    change: str
    count: int | None  #: the number of that change's events that were read, before any selection; None: all
    #: The number of events of the next change that were read. Only tokens of earlier versions give this number: for a
    #: change that was read in part, they hold the change before it and the number.
    count_of_next: int = 0

    def unread(self, here: str, found: list[tuple[TaskEvent, str]]) -> list[tuple[TaskEvent, str]]:
        """Return the unread events among those of the change with this token."""
        if here < self.change:
            return []
        if here == self.change:
            return [] if self.count is None else found[self.count :]
        # The change that was read in part had more events than were read. If this change does not, it is another one:
        # the task of the first was removed.
        return found[self.count_of_next :] if len(found) > self.count_of_next else found

    def is_behind(self, here: str) -> bool:
        """Whether all events after the change with this token are unread."""
        return here > self.change or (here == self.change and not self.count_of_next)


@dataclass(slots=True)
class Following:
    """A reader's position in the stream of changes, and the events that the reader wants."""

    wanted: Wanted
    since: Any = None  #: the oplog time at which to begin, as the driver takes it
    #: The changes after that time that were read already.
    begun: Begun | None = None
    #: The token from which to continue after the events that were taken.
    token: str | None = None
    #: The text of the resume token after which to open the stream again.
    after: str | None = None
    #: The detail in which changes are read. It is less than usual if a change is too large.
    detail: Detail = Detail.FULL

    @property
    def opening(self) -> Opening:
        """How to open the change stream at this position."""
        return Opening(self.wanted, self.detail, self.after, self.since)

    def opened(self, token: str | None) -> None:
        """Note where the stream begins, so that it can be opened there again."""
        if self.after is None and token is not None:
            self.after = token
            self.token = self.token or self.after

    def is_in_doubt(self, change: Document) -> bool:
        """Whether to look up the task's document as it was at the change."""
        if self.detail is Detail.WITHOUT_DOCUMENT:
            return self.wanted.needs_document and change["operationType"] == "update"
        return _understood(events.is_in_doubt, change, False)

    def take(self, change: Document) -> tuple[list[TaskEvent], bool]:
        """Return the unread events of a change, and move behind it.

        Also return whether the stream may stay open. If not, it must be opened again.
        """
        here = str(change["_id"]["_data"])
        instant = change["clusterTime"]
        # Events are counted before the selection, because another reader of this token may ask for other tasks.
        nothing: list[TaskEvent] = []
        found = _understood(events.events_of, change, nothing)
        pairs = [(event, f"{here}.{count}.{instant.time}-{instant.inc}") for count, event in enumerate(found, start=1)]
        unread = pairs if self.begun is None else self.begun.unread(here, pairs)
        if self.begun is None or self.begun.is_behind(here):
            self.begun, self.token = None, f"{here}.{len(found)}.{instant.time}-{instant.inc}"
        self.after = here
        queues = self.wanted.queues
        selected = [replace(event, token=token) for event, token in unread if queues is None or event.queue in queues]
        return selected, self._is_usual_again()

    def passed(self, token: str | None) -> bool:
        """Move behind the changes that the server has left out, up to this token.

        Return whether the stream may stay open. If not, it must be opened again.
        """
        if token is not None:
            self.after = token
            if self.begun is None or (self.begun.is_behind(self.after) and not self.begun.count_of_next):
                self.begun, self.token = None, self.after
        return self._is_usual_again()

    def ask_for_less(self, error: DocumentTooLarge) -> None:
        """Ask for the next change in less detail; raise the error if there is no lower level of detail."""
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
    """Return what `read` finds in a change. A document may hold anything. So an error of `read` is only logged."""
    try:
        return read(change)
    except Exception:
        logger.exception("a change of task %s is not understood, and is left out", shown(change["documentKey"]["_id"]))
        return otherwise


def follow(name: Texts, queue: Texts, key: Texts, after: str | None, since: datetime | None) -> Following:
    """Return the checked request; raise InvalidInput."""
    criteria = views.criteria(status=None, name=name, queue=queue, key=key, worker_id=None)

    def several(field: str) -> list[str] | None:
        wanted = criteria[field]
        return [wanted] if isinstance(wanted, str) else wanted

    wanted = Wanted(several("name"), several("queue"), several("key"))
    if after is not None and since is not None:
        raise InvalidInput("give after or since, not both.", field="after")
    if after is not None:
        return _going_on(wanted, after)
    return Following(wanted, since=_in_oplog(since))


def follow_task(task_id: str) -> Following:
    """Return the request for the events of one task."""
    return Following(Wanted(task_id=task_id, needs_document=False))


def _going_on(wanted: Wanted, after: str) -> Following:
    """Return the request that continues after the event with this token.

    The token holds the change, the number of its events that were read, and its oplog time. The stream begins at that
    time. A resume token would not work instead: the server must find its change, and it does not find the change if the
    request now selects another name or key.

    Before the first event, the token is only that of the server. Tokens of earlier versions also lack the oplog time.
    For a change that was read in part, they hold the change before it and the number of events.
    """
    change, *counted = after.split(".") if isinstance(after, str) else [""]
    try:
        bytes.fromhex(change)
        if len(counted) == 2:
            begun = Begun(change, _number(counted[0]))
            seconds, ordinal = map(_number, counted[1].split("-"))
        else:
            begun = Begun(change, None, *map(_number, counted))
            # The server's token begins with the oplog time: one byte as a mark, then 4 bytes each for the seconds and
            # the ordinal.
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
