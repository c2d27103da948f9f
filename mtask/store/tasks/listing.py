"""Lists of tasks, page by page. The server examines a bounded number of documents for each page.

A list walks along an index that has its order. Conditions that the index cannot meet are tested on the tasks that the
walk passes, at most 3,000 for a page. Then the page ends, though it may not be full, and the list goes on from
there. A few sets of tasks are found by other indexes: if such a set is small, it is sorted as a whole.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

from mtask.model.listing import Order, Place, hidden, order_of
from mtask.model.publishing.tenants import prefix_of
from mtask.model.status import TaskStatus
from mtask.store.driver.operation import Operation, command, tasks
from mtask.store.layout.indexes import (
    DISCOVERY_INDEX,
    FINISHED_INDEX,
    LOOKUP_INDEX,
    RECENT_INDEX,
    STATUS_INDEX,
    TENANT_INDEX,
)
from mtask.store.statements import filters, views
from mtask.store.statements.filters import FIRST_TIME, LAST_TIME, NEXT, Filter
from mtask.store.tasks import names as task_names
from mtask.store.tasks.names import names_of_tasks
from mtask.store.tasks.queries import by_index

Document = dict[str, Any]
_ID_INDEX = "_id_"
_STATUS = "task_state.status"
#: The field of a reply that holds the instant by which the list is sorted.
_PLACE = "p"
#: The steps of a walk that tests documents, in documents. The first one is short: most pages are full after it. A walk
#: along one range takes both as one step, as it is cheap for the server to pass the keys of one range.
STEPS = (1_000, 2_000)
#: The largest set of tasks that is sorted as a whole.
SORTED = 10_000
#: The most ranges of an index that one query merges.
_PAIRS = 200
#: The most ids that are read for a page.
_IDS = 1_000


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
    def of_statuses(self) -> Filter | None:
        """The tasks that `mtask_status` can count, though it does not have the order of the list; None: there are none.

        They are those of some statuses, and of some names if all statuses are final: in this index, the instants of
        open tasks come before their names.
        """
        statuses, names = self.several("status"), self.several("name")
        if statuses and self.order is Order.CREATED:
            return {_STATUS: filters.any_of(statuses)}
        if names and self.order is Order.FINISHED:
            return {_STATUS: filters.any_of(statuses), "name": filters.any_of(names)}
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


@dataclass(frozen=True, slots=True)
class Found:
    """A page of a list."""

    documents: list[Document]
    #: The place behind the page. None: there are no more tasks.
    next: Place | None
    #: The instant up to which the walk has come, if it ended before the page was full.
    looked_to: datetime | None = None


@dataclass(frozen=True, slots=True)
class _Walk:
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
        return None if self.fields is None else {**views.only(self.fields), _PLACE: f"${self.order.path}"}

    def find(self, part: Filter, limit: int, sort: list[tuple[str, int]]) -> Operation[list[Document]]:
        """Return the tasks in a part of the walk."""
        conditions = [condition for condition in (self.ranges, part, self.tested) if condition]
        matched: Filter = {"$and": conditions} if conditions else {}
        found: list[Document] = yield from by_index(
            tasks("find", matched, self.view(), sort=sort, limit=limit, hint=self.index)
        )
        return found

    def key_at(self, part: Filter, number: int, sort: list[tuple[str, int]]) -> Operation[Place | None]:
        """Return the place of the task with this number in a part of the walk. It is read from the index alone."""
        kept = {"_id": 1, self.order.path: 1} if ("_id", -1) in sort else {"_id": 0, self.order.path: 1}
        call = tasks("find", {**self.ranges, **part}, kept, sort=sort, skip=number - 1, limit=1, hint=self.index)
        found = yield from by_index(call)
        return None if not found else _place_of(found[0], self.order)


@dataclass(frozen=True, slots=True)
class _Span:
    """The tasks of a walk that descends between two instants."""

    low: datetime | None
    high: datetime | None  #: exclusive
    is_low_excluded: bool = False

    def part(self, path: str) -> Filter:
        bounds = {} if self.high is None else {"$lt": self.high}
        bounds |= {} if self.low is None else {"$gt" if self.is_low_excluded else "$gte": self.low}
        return {path: bounds} if bounds else {}

    def order(self, path: str) -> list[tuple[str, int]]:
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

    def order(self, path: str) -> list[tuple[str, int]]:
        del path
        return [("_id", -1)]

    def split(self, at: Place) -> tuple[list[_Part], list[_Part]]:
        """Return the parts up to a place, with the task there, and the parts behind it."""
        return [_Tie(self.time, self.below, at.task_id)], [_Tie(self.time, at.task_id)]

    def begin(self) -> Place | None:
        return None if self.below is None else Place(self.time, self.below)


_Part = _Span | _Tie


def page(asked: Asked, limit: int, after: Place | None, fields: Sequence[str] | None) -> Operation[Found]:
    """Return the next page of a list: at most `limit` tasks."""
    rows: list[Document] = []
    stopped: Place | None = None
    small: _Set | None = None
    steps = list(STEPS)
    counted = None if asked.is_led else asked.of_statuses
    if counted is not None:
        if (yield from count_up_to(counted, steps[0] + 1, STATUS_INDEX)) <= steps[0]:
            small = _set_of(counted)
        else:
            # There are many such tasks: the page is probably full after the first step, and no more are counted.
            rows, stopped = yield from _walked(asked, limit + 1, after, fields, [steps.pop(0)])
            if stopped is None or len(rows) > limit or not steps:
                return _found(rows, limit, stopped, asked)
    small = small or (yield from _small_set(asked))
    if small is not None:
        return _found((yield from _sorted(asked, small, limit + 1, after, fields)), limit, None, asked)
    more, stopped = yield from _walked(asked, limit + 1 - len(rows), stopped or after, fields, steps)
    return _found(rows + more, limit, stopped, asked)


def _found(rows: list[Document], limit: int, stopped: Place | None, asked: Asked) -> Found:
    place: Place | None = None
    looked_to = None
    if len(rows) > limit:
        rows = rows[:limit]
        # Malformed documents without an instant come last: no list goes on behind one.
        place = _place_of(rows[-1], asked.order)
    elif stopped is not None:
        place = hidden(stopped, asked.criteria.get("key_prefix"), asked.order)
        looked_to = stopped.time if len(rows) < limit else None
    return Found(rows, place, looked_to)


def _place_of(document: Mapping[str, Any], order: Order) -> Place | None:
    time, task_id = _value(document, order.path), document.get("_id", "")
    return Place(time, task_id) if isinstance(time, datetime) and isinstance(task_id, str) else None


def _at(document: Mapping[str, Any], path: str) -> datetime:
    found = _value(document, path)
    return found if isinstance(found, datetime) else LAST_TIME


def _value(document: Mapping[str, Any], path: str) -> Any:
    if _PLACE in document:
        return document[_PLACE]
    state = document.get("task_state")
    return state.get(path.removeprefix("task_state.")) if isinstance(state, Mapping) else None


# --- small sets -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Set:
    """A small set of tasks, which an index finds."""

    matched: Filter
    index: str
    used: tuple[str, ...] = field(default=())


def _small_set(asked: Asked) -> Operation[_Set | None]:
    """Return the set that holds the tasks, if it is certainly small."""
    if asked.criteria.get("lookup") is not None or asked.is_walk_of_tenant:
        return None
    names, keys, prefix = asked.several("name"), asked.several("key"), asked.criteria.get("key_prefix")
    used = ["key_prefix"]
    if prefix is None and asked.criteria.get("tenant") is not None:
        prefix, used = prefix_of(asked.criteria["tenant"]), ["key_prefix", "tenant"]
    if keys:
        known = names or (yield from names_of_tasks())
        if known is not None and len(known) * len(keys) <= _IDS:
            ids = [f"{name}:{key}" for name in known for key in keys if prefix is None or key.startswith(prefix)]
            return _Set({"_id": {"$in": ids}}, _ID_INDEX, ("name", "key", "key_prefix"))
    elif prefix is not None:
        known = names or (yield from names_of_tasks())
        if known is not None and len(known) <= task_names.MOST:
            ranges = filters.with_key_prefix(known, prefix)
            if (yield from count_up_to(ranges, SORTED + 1, _ID_INDEX)) <= SORTED:
                return _Set(ranges, _ID_INDEX, ("name", *used))
    matched = asked.of_statuses
    if matched is not None and (yield from count_up_to(matched, SORTED + 1, STATUS_INDEX)) <= SORTED:
        return _set_of(matched)
    queues = asked.several("queue")
    if queues and asked.order is Order.DUE:
        # A walk in the order of time reads the tasks of all queues. The index of the workers knows those of one queue.
        matched = {"queue": filters.any_of(queues), NEXT: {"$gte": FIRST_TIME}}
        most = sum(STEPS)
        if (yield from count_up_to(matched, most + 1, DISCOVERY_INDEX)) <= most:
            return _Set(matched, DISCOVERY_INDEX, ("queue",))
    return None


def _set_of(matched: Filter) -> _Set:
    """Return the set of the tasks with some statuses, and perhaps some names."""
    return _Set(matched, STATUS_INDEX, ("status", "name") if "name" in matched else ("status",))


def _sorted(
    asked: Asked, small: _Set, limit: int, after: Place | None, fields: Sequence[str] | None
) -> Operation[list[Document]]:
    order = asked.order
    first, last = asked.since or FIRST_TIME, asked.until
    walk = _Walk(small.index, small.matched, order, asked.rest(*small.used), first, last, fields)
    within: Filter = {order.path: {"$gte": first, **({} if last is None else {"$lt": last})}}
    direction = -1 if order.is_descending else 1
    if after is not None:
        beyond, next_id = ("$gt", "$gte") if order.is_descending else ("$lt", "$lte")
        passed = [{order.path: {beyond: after.time}}, {order.path: after.time, "_id": {next_id: after.task_id}}]
        if order.is_descending and not after.task_id:
            passed[1] = {order.path: after.time}
        # What the server excludes, it does not look for in an index.
        within["$nor"] = passed
    return (yield from walk.find(within, limit, [(order.path, direction), ("_id", direction)]))


def count_up_to(matched: Filter, limit: int, index: str) -> Operation[int]:
    """Return the number of matching tasks, at most `limit`. The index alone tells it."""
    answer = yield command("count", "tasks", query=matched, limit=limit, hint=index)
    return int(answer["n"])


# --- walks ------------------------------------------------------------------------------------------------


def _walked(
    asked: Asked, limit: int, after: Place | None, fields: Sequence[str] | None, steps: Sequence[int]
) -> Operation[tuple[list[Document], Place | None]]:
    """Return the next tasks, and the place at which the walk stopped before their end."""
    order, criteria = asked.order, asked.criteria
    first, last = asked.since or FIRST_TIME, asked.until
    if order is Order.DUE:
        of_statuses = {_STATUS: filters.any_of(asked.several("status"))}
        walk = _Walk(STATUS_INDEX, of_statuses, order, asked.rest("status"), first, last, fields)
        return (yield from _ascend(walk, limit, after, steps))
    if order is Order.FINISHED:
        pairs: list[_Walk] = []
        queues = asked.several("queue") or (yield from queues_of_finished())
        statuses = asked.several("status")
        most = max(1, _PAIRS // len(statuses))
        for start in range(0, len(queues), most):
            some = queues[start : start + most]
            ranges = {"queue": filters.any_of(some), _STATUS: filters.any_of(statuses)}
            pairs.append(_Walk(FINISHED_INDEX, ranges, order, asked.tested("status", "queue"), first, last, fields))
        return (yield from _merged(pairs, limit, after, steps))
    index, ranges, used = RECENT_INDEX, Filter(), "lookup"
    if criteria.get("lookup") is not None:
        index, ranges = LOOKUP_INDEX, filters.looked_up(criteria["lookup"])
    elif asked.is_walk_of_tenant:
        index, ranges, used = TENANT_INDEX, {"tenant": criteria["tenant"]}, "tenant"
    # A malformed document may lack its create_time: it is the last one of a list without a bound.
    walk = _Walk(index, ranges, order, asked.tested(used), asked.since, last, fields)
    return (yield from _descend(walk, limit, after, [sum(steps)]))


def queues_of_finished() -> Operation[list[str]]:
    """Return the queues of finished tasks, by one seek for each."""
    order = {"queue": 1, _STATUS: 1, "task_state.finish_time": -1, "_id": -1}
    one_each = {"_id": "$queue", "queue": {"$first": "$queue"}}
    rows = yield from by_index(tasks("rows", [{"$sort": order}, {"$group": one_each}], hint=FINISHED_INDEX))
    return sorted(row["_id"] for row in rows if isinstance(row["_id"], str))


def _descend(
    walk: _Walk, limit: int, after: Place | None, given: Sequence[int]
) -> Operation[tuple[list[Document], Place | None]]:
    """Walk from the latest instant to the earliest one."""
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


def _merged(
    walks: Sequence[_Walk], limit: int, after: Place | None, steps: Sequence[int]
) -> Operation[tuple[list[Document], Place | None]]:
    """Walk along several parts of an index, and merge what they find."""
    if len(walks) == 1:
        return (yield from _descend(walks[0], limit, after, steps))
    found: list[list[Document]] = []
    stopped: list[Place] = []
    for walk in walks:
        rows, place = yield from _descend(walk, limit, after, steps)
        found.append(rows)
        if place is not None:
            stopped.append(place)

    def rank(row: Mapping[str, Any]) -> tuple[datetime, str]:
        return _at(row, Order.FINISHED.path), row["_id"]

    rows = list(heapq.merge(*found, key=rank, reverse=True))
    if not stopped:
        return rows[:limit], None
    # Behind the place at which the first walk stopped, that walk may have more tasks.
    end = max(stopped, key=lambda place: (place.time, place.task_id))
    return [row for row in rows if rank(row) >= (end.time, end.task_id)][:limit], end


def _ascend(
    walk: _Walk, limit: int, after: Place | None, given: Sequence[int]
) -> Operation[tuple[list[Document], Place | None]]:
    """Walk from the earliest instant to the latest one. The index does not sort the tasks of one instant by id."""
    path = walk.order.path
    rows: list[Document] = []
    low, is_low_excluded = walk.first or FIRST_TIME, False
    steps = list(given)
    if after is not None and after.time >= low:
        low, is_low_excluded = after.time, True
        if walk.last is None or low < walk.last:
            rows, stopped = yield from _tie_of(walk, low, after.task_id, limit, steps)
            if stopped is not None:
                return rows, stopped
    while len(rows) < limit:
        above = {"$gt" if is_low_excluded else "$gte": low}
        whole = {path: {**above, **({} if walk.last is None else {"$lt": walk.last})}}
        mark = None
        if walk.tested:
            if not steps:
                return rows, Place(low, "\U0010ffff")
            mark = yield from walk.key_at(whole, steps.pop(0), [(path, 1)])
        part = whole if mark is None else {path: {**above, "$lt": mark.time}}
        more = yield from walk.find(part, limit - len(rows), [(path, 1)])
        is_cut = len(rows) + len(more) >= limit
        more.sort(key=lambda row: (_at(row, path), row["_id"]))
        if is_cut:
            # The tasks of the last instant may be any of that instant: they are read anew, by id.
            end = _at(more[-1], path)
            rows += [row for row in more if _at(row, path) < end]
        elif mark is not None:
            rows += more
            end = mark.time
        else:
            return rows + more, None
        more, stopped = yield from _tie_of(walk, end, "", limit - len(rows), steps)
        rows += more
        if stopped is not None or is_cut:
            return rows, stopped
        low, is_low_excluded = end, True
    return rows, None


def _tie_of(
    walk: _Walk, time: datetime, after: str, limit: int, steps: list[int]
) -> Operation[tuple[list[Document], Place | None]]:
    """Return the tasks of one instant with ids behind this one, sorted by id, and where the search stopped."""
    tie: Filter = {walk.order.path: time}
    by_id = [("_id", 1)]
    if (yield from count_up_to({**walk.ranges, **tie}, SORTED + 1, walk.index)) <= SORTED:
        return (yield from walk.find({**tie, "_id": {"$gt": after}}, limit, by_id)), None
    # There are so many tasks of this instant that a walk along the ids soon meets them.
    along = replace(walk, index=_ID_INDEX)
    rows: list[Document] = []
    for step in steps or STEPS[:1]:
        ids: Filter = {"$gt": after}
        passed = yield tasks("find", {"_id": ids}, {"_id": 1}, sort=by_id, skip=step - 1, limit=1, hint=_ID_INDEX)
        end = passed[0]["_id"] if passed and isinstance(passed[0]["_id"], str) else None
        part = {**tie, "_id": ids if end is None else {**ids, "$lte": end}}
        rows += yield from along.find(part, limit - len(rows), by_id)
        if len(rows) >= limit or end is None:
            return rows, None
        after = end
    return rows, Place(time, after)
