"""The order of a list of tasks, and the cursors with which a list goes on."""

from __future__ import annotations

import base64
import json
from collections.abc import Collection
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Any

from mtask.errors import InvalidInput
from mtask.kernel.document.status import TaskStatus

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MS = timedelta(milliseconds=1)
_NEVER = datetime.min.replace(tzinfo=UTC)
#: The longest cursor: a place whose task has the longest name and key, of characters that JSON escapes.
_LONGEST = 8192
#: Of the code points, these are no characters.
_SURROGATES = range(0xD800, 0xE000)


class Order(StrEnum):
    """The instant by which a list is sorted."""

    CREATED = "created"  #: the newest first
    FINISHED = "finished"  #: the last finished first
    DUE = "due"  #: the earliest due first

    @property
    def path(self) -> str:
        """The path of the instant in a task's document."""
        field = {Order.CREATED: "create_time", Order.FINISHED: "finish_time", Order.DUE: "next_preempt_time"}
        return f"task_state.{field[self]}"

    @property
    def is_descending(self) -> bool:
        """Whether the latest instant comes first."""
        return self is not Order.DUE


def order_of(statuses: Collection[TaskStatus] | None) -> Order:
    """Return the order of a list of tasks with these statuses. None: with any status."""
    if not statuses or TaskStatus.WAITING in statuses:
        return Order.CREATED
    if all(status.is_final for status in statuses):
        return Order.FINISHED
    return Order.CREATED if any(status.is_final for status in statuses) else Order.DUE


@dataclass(frozen=True, slots=True)
class Place:
    """A place in a list. The list goes on with the tasks behind it.

    The newest comes first among the tasks of one instant: they are sorted by their ids, which descend. Due tasks of one
    instant are sorted by their names first, and then by their time of creation, which descends.
    """

    time: datetime
    #: The id, or a text in its place: no id lies behind the empty text or behind `name:`, which is the end of the
    #: name's tasks. In the order of due tasks, the empty text lies before all tasks of the instant, and `LAST` behind
    #: them.
    task_id: str
    #: In the order of due tasks, the time of creation. None: the place lies behind all tasks of the name.
    create_time: datetime | None = None

    @property
    def name(self) -> str:
        """The name of the task."""
        return self.task_id.partition(":")[0]


#: Behind all names.
LAST = chr(0x10FFFF)


def cursor_of(order: Order, place: Place) -> str:
    """Return the text of a place."""
    parts: list[Any] = [order.value, _ms_of(place.time), place.task_id]
    if order is Order.DUE:
        parts.append(None if place.create_time is None else _ms_of(place.create_time))
    text = json.dumps(parts, ensure_ascii=False)
    return base64.urlsafe_b64encode(text.encode()).decode().rstrip("=")


def place_of(cursor: object, order: Order) -> Place:
    """Return the place that a cursor names; raise InvalidInput."""
    try:
        if not isinstance(cursor, str) or len(cursor) > _LONGEST:
            raise ValueError
        padded = cursor + "=" * (-len(cursor) % 4)
        text = base64.b64decode(padded.encode("ascii"), altchars=b"-_", validate=True)
        named, milliseconds, task_id, *more = json.loads(text.decode("utf-8"))
        if type(task_id) is not str or named not in list(Order) or len(more) > (named == Order.DUE):
            raise ValueError
        task_id.encode("utf-8")
        if named == Order.DUE and not more:
            task_id = ""  # an earlier cursor, without the time of creation: the list begins the instant once more
        place = Place(_instant(milliseconds), task_id, _instant(more[0]) if more and more[0] is not None else None)
    except (ValueError, TypeError, OverflowError, RecursionError):
        raise InvalidInput("cursor: use the next_cursor of an earlier page.", field="cursor") from None
    if named != order:
        raise InvalidInput(
            f"cursor: it belongs to a list that is sorted by {named} time, this list by {order.value} time. Use a "
            "cursor with the criteria of the page that gave it.",
            field="cursor",
        )
    return place


def leads_on(place: Place, other: Place, order: Order) -> bool:
    """Tell whether the other place lies behind this one."""
    if other.time != place.time:
        return (other.time < place.time) == order.is_descending
    if order.is_descending:
        return other.task_id < place.task_id
    if place.name != other.name:
        return other.name > place.name
    created, others = (one.create_time or _NEVER for one in (place, other))
    return others < created or (others == created and other.task_id < place.task_id)


def _ms_of(instant: datetime) -> int:
    return (instant - _EPOCH) // _MS


def _instant(milliseconds: object) -> datetime:
    if type(milliseconds) is not int:
        raise ValueError
    return _EPOCH + milliseconds * _MS


def end_of_prefix(prefix: str) -> str | None:
    """Return the first text behind all texts with this beginning, by code points. None: there is none."""
    while prefix:
        point = ord(prefix[-1]) + 1
        if point <= ord(LAST):
            return prefix[:-1] + chr(_SURROGATES.stop if point in _SURROGATES else point)
        prefix = prefix[:-1]
    return None


def hidden(place: Place, key_prefix: str | None) -> Place:
    """Return a place that means the same in a list of keys with this prefix, and that names no other task's key.

    It never lies before the given place: else the list would pass the same tasks again.
    """
    if key_prefix is None or not place.task_id:
        return place
    name, _, key = place.task_id.partition(":")
    if key.startswith(key_prefix):
        return place
    end = end_of_prefix(key_prefix)
    # Ids descend: behind the end of the prefix, all tasks of the prefix are still to come. Before it, none is.
    is_behind = end is not None and key >= end
    return replace(place, task_id=f"{name}:{end}" if is_behind else f"{name}:")
