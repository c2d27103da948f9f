"""The order of a list of tasks, and the cursors with which a list goes on."""

from __future__ import annotations

import base64
import json
from collections.abc import Collection
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import StrEnum

from mtask.errors import InvalidInput
from mtask.model.status import TaskStatus

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MS = timedelta(milliseconds=1)
#: The longest cursor: a place whose task has the longest name and key.
_LONGEST = 4096
#: Of the code points, these are no characters.
_SURROGATES = range(0xD800, 0xE000)
_LAST = 0x10FFFF


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

    Tasks of one instant are sorted by their ids, in the direction of the order. The empty id lies before all ids. So a
    list that descends goes on with the next instant behind it.
    """

    time: datetime
    task_id: str


def cursor_of(order: Order, place: Place) -> str:
    """Return the text of a place."""
    text = json.dumps([order.value, (place.time - _EPOCH) // _MS, place.task_id], ensure_ascii=False)
    return base64.urlsafe_b64encode(text.encode()).decode().rstrip("=")


def place_of(cursor: object, order: Order) -> Place:
    """Return the place that a cursor names; raise InvalidInput."""
    try:
        if not isinstance(cursor, str) or len(cursor) > _LONGEST:
            raise ValueError
        padded = cursor + "=" * (-len(cursor) % 4)
        text = base64.b64decode(padded.encode("ascii"), altchars=b"-_", validate=True)
        named, milliseconds, task_id = json.loads(text.decode("utf-8"))
        if type(milliseconds) is not int or type(task_id) is not str or named not in list(Order):
            raise ValueError
        task_id.encode("utf-8")
        place = Place(_EPOCH + milliseconds * _MS, task_id)
    except (ValueError, TypeError, OverflowError, RecursionError):
        raise InvalidInput("cursor: use the next_cursor of an earlier page.", field="cursor") from None
    if named != order:
        raise InvalidInput(
            f"cursor: it belongs to a list that is sorted by {named} time, this list by {order.value} time. Use a "
            "cursor with the criteria of the page that gave it.",
            field="cursor",
        )
    return place


def end_of_prefix(prefix: str) -> str | None:
    """Return the first text behind all texts with this beginning, by code points. None: there is none."""
    while prefix:
        point = ord(prefix[-1]) + 1
        if point <= _LAST:
            return prefix[:-1] + chr(_SURROGATES.stop if point in _SURROGATES else point)
        prefix = prefix[:-1]
    return None


def _before_prefix(prefix: str) -> str:
    """Return a text before all texts with this beginning, with next to none between: by code points."""
    point = ord(prefix[-1])
    if not point:
        return prefix[:-1]
    return prefix[:-1] + chr(_SURROGATES.start - 1 if point == _SURROGATES.stop else point - 1) + chr(_LAST)


def hidden(place: Place, key_prefix: str | None, order: Order) -> Place:
    """Return a place that means the same in a list of keys with this prefix, and that names no other task's key.

    It never lies before the given place, in the direction of the order: else the list would pass the same ids again.
    """
    if key_prefix is None or not place.task_id:
        return place
    name, _, key = place.task_id.partition(":")
    if key.startswith(key_prefix):
        return place
    end = end_of_prefix(key_prefix)
    is_behind = end is not None and key >= end
    if order.is_descending:
        return Place(place.time, f"{name}:{end}" if is_behind else f"{name}:")
    # The character behind the colon begins what comes after all keys of the name.
    return Place(place.time, f"{name};" if is_behind else f"{name}:{_before_prefix(key_prefix)}")
