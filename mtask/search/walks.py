"""Walks along an index that has the order of a list, from the latest instant to the earliest one."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from bson.datetime_ms import DatetimeMS

from mtask.kernel.document.identity import prefix_of
from mtask.kernel.document.status import TaskStatus
from mtask.kernel.driver.bson import with_zones
from mtask.kernel.driver.indexes import STATUS_INDEX
from mtask.kernel.driver.operation import Call, Operation, command, tasks
from mtask.kernel.operations.change import by_index
from mtask.kernel.statements import filters, views
from mtask.kernel.statements.filters import LAST_TIME, Filter
from mtask.search.order import Order, Place, order_of

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
    #: Whether `ranges` are one range of the index: one value for each of its keys before the instant.
    is_one_range: bool = True
    #: Whether the reader may see some of the tasks only. Then the walk stops at the ends of instants alone, as a place
    #: within one names a task that the reader may not see.
    is_discreet: bool = False

    def view(self) -> Document | None:
        """Return the projection of a page."""
        if self.fields is None:
            return None
        created = {_CREATED: f"${Order.CREATED.path}"} if self.order is Order.DUE else {}
        return {**views.only(self.fields), _PLACE: f"${self.order.path}", **created}

    def find(self, parts: Sequence[Filter], limit: int, sort: Sort) -> Operation[list[Document]]:
        """Return the tasks in some parts of the walk, which follow one another."""
        alternatives = [_all_of(self.ranges, part, self.tested) for part in parts]
        found: list[Document] = yield from by_index(
            tasks(
                "find_naive",
                _any_of(alternatives),
                self.view(),
                sort=sort,
                limit=limit,
                batch_size=limit,
                hint=self.index,
            )
        )
        return with_zones(found)

    def key_at(self, parts: Sequence[Filter], number: int, sort: Sort) -> Operation[Place | None]:
        """Return the place of the task with this number in some parts. It is read from the index alone."""
        kept = {"_id": 1, self.order.path: 1}
        matched = _any_of([_all_of(self.ranges, part) for part in parts])
        call = tasks("find", matched, kept, sort=sort, skip=number - 1, limit=1, hint=self.index)
        found = yield from by_index(call.for_everybody())
        place = None if not found else place_of_row(found[0], self.order)
        return place if place is None or not self.is_discreet else Place(place.time, "")


def _all_of(*conditions: Filter) -> Filter:
    given = [condition for condition in conditions if condition]
    return {"$and": given} if given else {}


def _any_of(alternatives: Sequence[Filter]) -> Filter:
    return alternatives[0] if len(alternatives) == 1 else {"$or": list(alternatives)}


def place_of_row(document: Mapping[str, Any], order: Order) -> Place | None:
    """Return the place of a task that a walk found; None: the document is malformed.

    A date may lie behind the years that Python knows. The walk goes on behind all of these tasks.
    """
    time, task_id = value_at(document, order.path, _PLACE), document.get("_id", "")
    if isinstance(time, DatetimeMS) and int(time) > 0 and order.is_descending:
        return Place(LAST_TIME, "")
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
    """Return the number of matching tasks, at most `limit`. The index alone tells it.

    Several statuses are counted one after the other. In one count the server would look at each key, which takes three
    times as long.
    """
    several = matched.get(STATUS)
    if index == STATUS_INDEX and isinstance(several, Mapping):
        found = 0
        for status in several["$in"]:
            found += yield from count_up_to({**matched, STATUS: status}, limit - found, index)
            if found >= limit:
                break
        return found
    answer = yield command("count", "tasks", query=matched, limit=limit, hint=index)
    return int(answer["n"])


def descend(
    walk: Walk, limit: int, after: Place | None, steps: Sequence[int]
) -> Operation[tuple[list[Document], Place | None]]:
    """Return the next tasks of a walk, and the place at which it stopped before their end.

    `steps` are those of a walk that tests documents, in documents. When the last step is done, the walk stops.
    """
    if not walk.tested:
        return (yield from _find(walk, _between(walk, after, None), limit)), None
    rows: list[Document] = []
    for step in steps:
        mark = yield from _key_at(walk, _between(walk, after, None), step)
        rows += yield from _find(walk, _between(walk, after, mark), limit - len(rows))
        if mark is None or len(rows) >= limit:
            return rows, None
        after = mark
    return rows, after


def _between(walk: Walk, after: Place | None, to: Place | None) -> list[Filter]:
    """Return the parts of a walk behind a place and up to another one, which it includes. Each is a range of the index.

    A range of two keys is a range of instants, with a range of ids within its first instant and one within its last.
    """
    path, high = walk.order.path, walk.last
    parts: list[Filter] = []
    if after is not None and (high is None or after.time < high):
        high = after.time
        if after.task_id and (walk.first is None or after.time >= walk.first):
            least = {"$gte": to.task_id} if to is not None and to.time == after.time else {}
            parts.append({path: after.time, "_id": {"$lt": after.task_id, **least}})
            if least:
                return parts
    low = {"$gt": to.time} if to is not None else {} if walk.first is None else {"$gte": walk.first}
    bounds = {**({} if high is None else {"$lt": high}), **low}
    parts.append({path: bounds} if bounds else {})
    return parts if to is None else [*parts, {path: to.time, "_id": {"$gte": to.task_id}}]


def _find(walk: Walk, parts: Sequence[Filter], limit: int) -> Operation[list[Document]]:
    """Return the tasks in some parts of a walk.

    One query finds the few tasks of a page in all parts of one range. It would sort the tasks of several ranges. Where
    the walk tests many documents, the merge would take longer than a query for each part.
    """
    rows: list[Document] = []
    together = [parts] if walk.is_one_range and not walk.tested else [[part] for part in parts]
    for some in together:
        if len(rows) < limit:
            rows += yield from walk.find(some, limit - len(rows), _sort(walk, some))
    return rows


def _key_at(walk: Walk, parts: Sequence[Filter], number: int) -> Operation[Place | None]:
    """Return the place of the task with this number in some parts of a walk."""
    if not walk.is_one_range:
        for part in parts[:-1]:
            passed = yield from count_up_to({**walk.ranges, **part}, number, walk.index)
            if passed == number:
                return (yield from walk.key_at([part], number, _sort(walk, [part])))
            number -= passed
        parts = parts[-1:]
    return (yield from walk.key_at(parts, number, _sort(walk, parts)))


def _sort(walk: Walk, parts: Sequence[Filter]) -> Sort:
    # With a key that is equal in all, the server would sort the tasks itself.
    is_instant = len(parts) == 1 and isinstance(parts[0].get(walk.order.path), datetime)
    return [("_id", -1)] if is_instant else [(walk.order.path, -1), ("_id", -1)]


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


# --- asked -----------------------------------------------------------------------------------------------

# What a list or a count of tasks is to hold.

STATUS = "task_state.status"


@dataclass(frozen=True, slots=True)
class Asked:
    """What a list is to hold. The criteria are those of `filters.search`."""

    criteria: Mapping[str, Any]
    #: The list holds the tasks from `since` on and before `until`, by the instant of the order.
    since: datetime | None = None
    until: datetime | None = None
    #: The order, if it is not the usual one of these criteria.
    by: Order | None = None

    @property
    def statuses(self) -> list[TaskStatus]:
        """The statuses that were asked for."""
        return [TaskStatus(status) for status in self.several("status")]

    @property
    def order(self) -> Order:
        """The order of the list."""
        if self.by is not None:
            return self.by
        return Order.CREATED if self.criteria.get("lookup") is not None else order_of(self.statuses)

    @property
    def is_of_tenant(self) -> bool:
        """Whether a tenant is given, and nothing that leads to fewer tasks than the tenant has."""
        narrower = [self.criteria.get(name) for name in ("key", "key_prefix", "lookup")]
        return self.criteria.get("tenant") is not None and narrower == [None, None, None]

    @property
    def is_walk_of_tenant(self) -> bool:
        """Whether the list walks along the index of tenants, by the time of creation."""
        return self.is_of_tenant and self.order is Order.CREATED

    @property
    def is_discreet(self) -> bool:
        """Whether the reader may see the tasks of a tenant, or with a prefix, alone."""
        return self.prefix is not None

    @property
    def prefix(self) -> str | None:
        """The beginning of the keys of all tasks, by the prefix that was given, or by the tenant."""
        prefix, tenant = self.criteria.get("key_prefix"), self.criteria.get("tenant")
        return prefix if prefix is not None or tenant is None else prefix_of(tenant)

    @property
    def of_statuses(self) -> Filter | None:
        """The tasks that `mtask_status` can count, though it does not have the order of the list; None: there are none.

        They are those of some statuses, and of some names if all statuses are final: in this index, the instants of
        open tasks come before their names.
        """
        statuses, names = self.several("status"), self.several("name")
        if statuses and self.order is Order.CREATED:
            return {STATUS: filters.any_of(statuses)}
        if names and self.order is Order.FINISHED:
            return {STATUS: filters.any_of(statuses), "name": filters.any_of(names)}
        return None

    @property
    def is_led(self) -> bool:
        """Whether a criterion is given that mostly leads to few tasks."""
        return any(self.criteria.get(name) is not None for name in ("key", "key_prefix", "lookup", "tenant"))

    def several(self, name: str) -> list[str]:
        """Return the values of a criterion."""
        wanted = self.criteria.get(name)
        return [] if wanted is None else [wanted] if isinstance(wanted, str) else list(wanted)

    def rest(self, *used: str) -> Filter:
        """Return the filter of the criteria that no index meets."""
        left = {name: wanted for name, wanted in self.criteria.items() if name not in used}
        return filters.search(left)

    def tested(self, *used: str) -> Filter:
        """Return the same filter for a walk along an index with `_id`, which tells the name: no document is read."""
        names, queues = self.several("name"), self.several("queue")
        matched: Filter = {}
        if names:
            matched |= filters.has_key_prefix(self.criteria.get("key_prefix") or "", names)
            used = (*used, "name", "key_prefix")
        if queues and "queue" not in used:
            matched |= filters.is_of_queues(queues)
            used = (*used, "queue")
        return {**self.rest(*used), **matched}


# --- names -----------------------------------------------------------------------------------------------

# The names of all tasks. No index begins with the name, but `_id` does, so one seek finds the next name.
#
# A store remembers the names that it has found. So the next search asks the server once: for an id that has none of
# these names. A name that no task has any more does no harm: nothing is found under it.

#: The most names that are looked for.
MOST = 50


def names_of_tasks() -> Operation[list[str] | None]:
    """Return the names of all tasks, perhaps with names that tasks had before. None: there are too many."""
    remembered: set[str] = yield Call("names", "get")
    names = set(remembered)
    #: Each id that has no name, as it is malformed.
    nameless: set[str] = set()
    while len(names) + len(nameless) <= MOST:
        unknown = _with_none_of(names, nameless)
        found = yield tasks("find", unknown, {"_id": 1}, sort=[("_id", 1)], limit=1, hint="_id_").for_everybody()
        if not found:
            remembered |= names
            return sorted(names)
        name, colon, _ = found[0]["_id"].partition(":")
        known = names if colon else nameless
        if name in known:  # an id that is no UTF-8: what was read of it is not what the server compares
            break
        known.add(name)
    remembered.clear()  # of these names, some may be gone
    return None


def _with_none_of(names: set[str], nameless: set[str]) -> dict[str, Any]:
    """Match the tasks whose ids lie between the ranges of these names, and are none of the others."""
    # The ids of a name lie between its colon and the character behind the colon.
    passed = sorted([*((f"{name}:", f"{name};") for name in names), *((one, f"{one}\0") for one in nameless)])
    starts = ["", *(high for _, high in passed)]
    gaps: Sequence[dict[str, Any]] = [
        {"_id": {"$gte": start, "$lt": low}} for start, (low, _) in zip(starts, passed, strict=False)
    ]
    return {"$or": [*gaps, {"_id": {"$gte": starts[-1]}}]}
