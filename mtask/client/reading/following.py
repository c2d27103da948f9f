"""Where a reader of events stands in the stream of changes: what it asked for, its tokens, what was read; no I/O."""

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
    """Up to where a reader's token says that all was read. The stream begins at that instant of the oplog."""

    #: The token of the last change of which something was read. Tokens are ordered as their changes are.
    change: str
    count: int | None  #: how many of its events were, whoever asked for them; None: all
    #: Of the next one so many. That is all that tokens of earlier versions say of a change that was read in part.
    count_of_next: int = 0

    def unread(self, here: str, found: list[tuple[TaskEvent, str]]) -> list[tuple[TaskEvent, str]]:
        """Return what was not read of what the change with this token tells."""
        if here < self.change:
            return []
        if here == self.change:
            return [] if self.count is None else found[self.count :]
        # It told more than were read. If this one does not it is another, and the task of the former is gone.
        return found[self.count_of_next :] if len(found) > self.count_of_next else found

    def is_behind(self, here: str) -> bool:
        """Whether whatever comes after this token was not read."""
        return here > self.change or (here == self.change and not self.count_of_next)


@dataclass(slots=True)
class Following:
    """Where a reader stands in the stream of changes, and what it wants of it. No input or output."""

    wanted: Wanted
    since: Any = None  #: the place in the oplog at which to begin, as the driver takes it
    #: From there on some was read already.
    begun: Begun | None = None
    #: Where to go on by what was taken.
    token: str | None = None
    #: The change, or the place between changes, after which to open the stream anew: a resume token's text.
    after: str | None = None
    #: Less than usual where a change is too large.
    detail: Detail = Detail.FULL

    @property
    def opening(self) -> Opening:
        """How to open the change stream where it stands."""
        return Opening(self.wanted, self.detail, self.after, self.since)

    def opened(self, token: str | None) -> None:
        """Take down where the stream begins, so that it can be opened anew there."""
        if self.after is None and token is not None:
            self.after = token
            self.token = self.token or self.after

    def is_in_doubt(self, change: Document) -> bool:
        """Whether the task's document must be looked up as it was at the change."""
        if self.detail is Detail.WITHOUT_DOCUMENT:
            return self.wanted.needs_document and change["operationType"] == "update"
        return _understood(events.is_in_doubt, change, False)

    def take(self, change: Document) -> tuple[list[TaskEvent], bool]:
        """Return the events of a change that were not read before, and go on after it.

        And whether the stream may stay as it is: else it is to be opened anew.
        """
        here = str(change["_id"]["_data"])
        place = change["clusterTime"]
        # Counted before anything is left out: another reader may ask for other tasks.
        nothing: list[TaskEvent] = []
        found = _understood(events.events_of, change, nothing)
        pairs = [(event, f"{here}.{count}.{place.time}-{place.inc}") for count, event in enumerate(found, start=1)]
        unread = pairs if self.begun is None else self.begun.unread(here, pairs)
        if self.begun is None or self.begun.is_behind(here):
            self.begun, self.token = None, f"{here}.{len(found)}.{place.time}-{place.inc}"
        self.after = here
        queues = self.wanted.queues
        told = [replace(event, token=token) for event, token in unread if queues is None or event.queue in queues]
        return told, self._is_usual_again()

    def passed(self, token: str | None) -> bool:
        """Go on after what was left out: the server tells how far it has looked.

        Return whether the stream may stay as it is: else it is to be opened anew.
        """
        if token is not None:
            self.after = token
            if self.begun is None or (self.begun.is_behind(self.after) and not self.begun.count_of_next):
                self.begun, self.token = None, self.after
        return self._is_usual_again()

    def ask_for_less(self, error: DocumentTooLarge) -> None:
        """Ask for the next change in less detail; raise the error where there is no less."""
        if self.detail is Detail.NAME:
            raise error
        self.detail = Detail(self.detail + 1)
        if self.detail is Detail.NAME:
            logger.warning("a change of a task is too large to be told: what happened to it then is left out")

    def _is_usual_again(self) -> bool:
        is_as_before = self.detail is Detail.FULL
        self.detail = Detail.FULL
        return is_as_before


def _understood(read: Callable[[Mapping[str, Any]], T], change: Document, otherwise: T) -> T:
    """Return what is read out of a change: a document may hold anything, and ends no reader."""
    try:
        return read(change)
    except Exception:
        logger.exception("a change is not understood, and left out: of task %s", shown(change["documentKey"]["_id"]))
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
    """Return the request for what happens to one task."""
    return Following(Wanted(task_id=task_id, needs_document=False))


def _going_on(wanted: Wanted, after: str) -> Following:
    """Return the request to go on after the event with this token.

    It names the change, how many events of it were read, and its place in the oplog. There the stream begins: where the
    server is given a resume token it must find the change, and it does not if another name or key is asked for now.
    Where nothing was told yet it is the server's alone, as all were in earlier versions; there a change that was read
    in part was told by the one before it, and the count.
    """
    change, *counted = after.split(".") if isinstance(after, str) else [""]
    try:
        bytes.fromhex(change)
        if len(counted) == 2:
            begun = Begun(change, _number(counted[0]))
            seconds, ordinal = map(_number, counted[1].split("-"))
        else:
            begun = Begun(change, None, *map(_number, counted))
            # It begins with its place, as the server orders it: a mark, and 4 bytes each.
            seconds, ordinal = int(change[2:10], 16), int(change[10:18], 16)
        return Following(wanted, readers.place_in_oplog(seconds, ordinal), begun, token=after)
    except (TypeError, ValueError):
        raise InvalidInput(
            f"after {shown(after)} is no token: use that of an event (`event.token`, or mtask tail --json).",
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
        raise InvalidInput(f"since {since} lies outside of what the oplog can hold.", field="since") from None
