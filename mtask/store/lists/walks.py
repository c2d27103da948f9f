"""Walks along an index that has the order of a list, from the latest instant to the earliest one."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from mtask.model.listing import Order, Place
from mtask.store.driver.dates import with_zones
from mtask.store.driver.operation import Operation, command, tasks
from mtask.store.statements import views
from mtask.store.statements.filters import LAST_TIME, Filter
from mtask.store.tasks.queries import by_index

Document = dict[str, Any]
Sort = list[tuple[str, int]]
#: The fields of a reply that hold the instant by which the list is sorted, and the time of creation.
_PLACE, _CREATED = "p", "c"


@dataclass(frozen=True, slots=True)
class Walk:
    """A walk along an index."""

    index: str
    ranges: Filter
    order: Order
    #: What the walk tests on each document.
    tested: Filter
    first: datetime | None
    last: datetime | None  #: exclusive
    fields: Sequence[str] | None

    def view(self) -> Document | None:
        """Return the projection of a page."""
        if self.fields is None:
            return None
        created = {_CREATED: f"${Order.CREATED.path}"} if self.order is Order.DUE else {}
        return {**views.only(self.fields), _PLACE: f"${self.order.path}", **created}

    def find(self, part: Filter, limit: int, sort: Sort) -> Operation[list[Document]]:
        """Return the tasks in a part of the walk."""
        conditions = [condition for condition in (self.ranges, part, self.tested) if condition]
        matched: Filter = {"$and": conditions} if conditions else {}
        found: list[Document] = yield from by_index(
            tasks("find_naive", matched, self.view(), sort=sort, limit=limit, batch_size=limit, hint=self.index)
        )
        return with_zones(found)

    def key_at(self, part: Filter, number: int, sort: Sort) -> Operation[Place | None]:
        """Return the place of the task with this number in a part of the walk. It is read from the index alone."""
        kept = {"_id": 1, self.order.path: 1}
        call = tasks("find", {**self.ranges, **part}, kept, sort=sort, skip=number - 1, limit=1, hint=self.index)
        found = yield from by_index(call)
        return None if not found else place_of_row(found[0], self.order)


def place_of_row(document: Mapping[str, Any], order: Order) -> Place | None:
    """Return the place of a task that a walk found; None: the document is malformed."""
    time, task_id = value_at(document, order.path, _PLACE), document.get("_id", "")
    if not isinstance(time, datetime) or not isinstance(task_id, str):
        return None
    if order is not Order.DUE:
        return Place(time, task_id)
    created = value_at(document, Order.CREATED.path, _CREATED)
    return Place(time, task_id, created if isinstance(created, datetime) else None)


def value_at(document: Mapping[str, Any], path: str, kept: str) -> Any:
    """Return a field of a task's state. `kept` is the field of a reply that holds it, if only some fields were read."""
    if _PLACE in document:
        return document.get(kept)
    state = document.get("task_state")
    return state.get(path.removeprefix("task_state.")) if isinstance(state, Mapping) else None


def count_up_to(matched: Filter, limit: int, index: str) -> Operation[int]:
    """Return the number of matching tasks, at most `limit`. The index alone tells it."""
    answer = yield command("count", "tasks", query=matched, limit=limit, hint=index)
    return int(answer["n"])


@dataclass(frozen=True, slots=True)
class _Span:
    """The tasks of a walk between two instants."""

    low: datetime | None
    high: datetime | None  #: exclusive
    is_low_excluded: bool = False

    def part(self, path: str) -> Filter:
        bounds = {} if self.high is None else {"$lt": self.high}
        bounds |= {} if self.low is None else {"$gt" if self.is_low_excluded else "$gte": self.low}
        return {path: bounds} if bounds else {}

    def order(self, path: str) -> Sort:
        return [(path, -1), ("_id", -1)]

    def split(self, at: Place) -> tuple[list[_Part], list[_Part]]:
        """Return the parts up to a place, with the task there, and the parts behind it."""
        done: list[_Part] = [_Span(at.time, self.high, True), _Tie(at.time, None, at.task_id)]
        return done, [_Tie(at.time, at.task_id), _Span(self.low, at.time)]

    def begin(self) -> Place | None:
        return None if self.high is None else Place(self.high, "")


@dataclass(frozen=True, slots=True)
class _Tie:
    """The tasks of one instant with ids below one id, from another id on."""

    time: datetime
    below: str | None
    least: str | None = None

    def part(self, path: str) -> Filter:
        ids = {} if self.below is None else {"$lt": self.below}
        ids |= {} if self.least is None else {"$gte": self.least}
        return {path: self.time, "_id": ids}

    def order(self, path: str) -> Sort:
        del path
        return [("_id", -1)]

    def split(self, at: Place) -> tuple[list[_Part], list[_Part]]:
        """Return the parts up to a place, with the task there, and the parts behind it."""
        return [_Tie(self.time, self.below, at.task_id)], [_Tie(self.time, at.task_id)]

    def begin(self) -> Place | None:
        return None if self.below is None else Place(self.time, self.below)


_Part = _Span | _Tie


def descend(
    walk: Walk, limit: int, after: Place | None, given: Sequence[int]
) -> Operation[tuple[list[Document], Place | None]]:
    """Return the next tasks of a walk, and the place at which it stopped before their end.

    `given` are the steps of a walk that tests documents, in documents. When the last step is done, the walk stops.
    """
    path = walk.order.path
    last = after.time if after is not None and (walk.last is None or after.time < walk.last) else walk.last
    pending: list[_Part] = [_Span(walk.first, last)]
    if after is not None and after.task_id and after.time == last and (walk.first is None or after.time >= walk.first):
        pending.insert(0, _Tie(after.time, after.task_id))
    rows: list[Document] = []
    steps = list(given)
    while pending and len(rows) < limit:
        part = pending.pop(0)
        now: list[_Part] = [part]
        if walk.tested:
            if not steps:
                return rows, part.begin()
            if pending:
                # The walk goes on behind the tasks of this instant: they count as a part of the step.
                tied = yield from count_up_to({**walk.ranges, **part.part(path)}, steps[0], walk.index)
                if not tied:
                    continue
                if tied < steps[0]:
                    steps[0] -= tied
                    rows += yield from walk.find(part.part(path), limit - len(rows), part.order(path))
                    continue
            mark = yield from walk.key_at(part.part(path), steps[0], part.order(path))
            if mark is not None:
                steps.pop(0)
                now, behind = part.split(mark)
                pending = [*behind, *pending]
        for each in now:
            if len(rows) < limit:
                rows += yield from walk.find(each.part(path), limit - len(rows), each.order(path))
    return rows, None


def merged(
    walks: Sequence[Walk], limit: int, after: Place | None, steps: Sequence[int]
) -> Operation[tuple[list[Document], Place | None]]:
    """Walk along several parts of an index by the time of the end, and merge what they find."""
    if len(walks) == 1:
        return (yield from descend(walks[0], limit, after, steps))
    found: list[list[Document]] = []
    stopped: list[Place] = []
    for walk in walks:
        rows, place = yield from descend(walk, limit, after, steps)
        found.append(rows)
        if place is not None:
            stopped.append(place)

    def rank(row: Mapping[str, Any]) -> tuple[datetime, str]:
        time = value_at(row, Order.FINISHED.path, _PLACE)
        return time if isinstance(time, datetime) else LAST_TIME, str(row["_id"])

    rows = list(heapq.merge(*found, key=rank, reverse=True))
    if not stopped:
        return rows[:limit], None
    # Behind the place at which the first walk stopped, that walk may have more tasks.
    end = max(stopped, key=lambda place: (place.time, place.task_id))
    return [row for row in rows if rank(row) >= (end.time, end.task_id)][:limit], end
