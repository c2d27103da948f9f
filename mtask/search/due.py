"""The list of open tasks, the earliest due first: a walk along `mtask_status`.

The index sorts the tasks of one instant by name, and those of one name by their time of creation, the newest first.
Tasks that are equal in all three are a batch: one call has published them. The index does not sort a batch by id. A
batch that is small is sorted by the server. A large one is found by `mtask_recent`, which sorts tasks of one creation
by their ids, the last one first. So that is the order of a batch. It serves a reader best, too: workers take a batch in
the order in which it was published, so its last ids stay longest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from itertools import groupby
from typing import Any

from mtask.kernel.driver.indexes import DISCOVERY_INDEX, RECENT_INDEX, STATUS_INDEX, TENANT_INDEX
from mtask.kernel.driver.operation import Operation, tasks
from mtask.kernel.operations.change import by_index
from mtask.kernel.statements import filters
from mtask.kernel.statements.filters import FIRST_TIME, LAST_TIME, NEXT, Filter
from mtask.search import walks as task_names
from mtask.search.order import LAST, Order, Place, leads_on
from mtask.search.walks import Asked, Document, Sort, Walk, count_up_to, names_of_tasks, place_of_row

_CREATED = Order.CREATED.path
#: The keys of the index behind the status.
_KEYS = (NEXT, "name", _CREATED)
_SORT: Sort = [(NEXT, 1), ("name", 1), (_CREATED, -1)]
#: The order of the list.
SORT: Sort = [*_SORT, ("_id", -1)]
#: The order of a batch, as `mtask_recent` has it.
_BY_ID: Sort = [(_CREATED, -1), ("_id", -1)]
#: What the walk takes for a task: a document without it has no place in this order.
SOUND: Filter = {"name": {"$gte": ""}, _CREATED: {"$gte": FIRST_TIME, "$lte": LAST_TIME}}
#: The most tasks with equal first keys that are sorted as a whole.
TIED = 2_000


def not_passed(after: Place, level: int = 0) -> Filter:
    """Return the filter of the tasks behind a place, among those that are equal to it in the first keys.

    It excludes the others. What the server excludes, it does not look for in an index.
    """
    if not after.task_id:  # before all tasks of the instant
        return {NEXT: {"$gte": after.time}} if level == 0 else {}
    values = _values(after)
    passed: list[Filter] = []
    for key in range(level, len(_KEYS)):
        equal = dict(zip(_KEYS[level:key], values[level:key], strict=True))
        if key == 1 and after.create_time is None:  # behind all tasks of the name
            return {"$nor": [*passed, {**equal, "name": {"$lte": after.name}}]}
        passed.append({**equal, _KEYS[key]: {"$gt" if key == 2 else "$lt": values[key]}})
    equal = dict(zip(_KEYS[level:], values[level:], strict=True))
    return {"$nor": [*passed, {**equal, "_id": {"$gte": after.task_id}}]}


@dataclass(frozen=True, slots=True)
class _Range:
    """The tasks that are equal in their first keys, and whose next key lies in a range."""

    equal: tuple[Any, ...]
    #: The bounds, in the order of the index. None: there is no bound.
    begin: Any = None
    end: Any = None  #: exclusive
    is_begin_excluded: bool = True

    @property
    def key(self) -> str:
        return _KEYS[len(self.equal)]

    def part(self) -> Filter:
        is_descending = self.key == _CREATED
        least = (FIRST_TIME, "", LAST_TIME)[len(self.equal)]
        first, more, less = (least, "$gte", "$lt") if not is_descending else (least, "$lte", "$gt")
        if self.begin is not None:
            first = self.begin
            more = more if not self.is_begin_excluded else more.removesuffix("e")
        bounds = {more: first, **({} if self.end is None else {less: self.end})}
        return {**_equal(self.equal), self.key: bounds}

    def sort(self) -> Sort:
        """Return the order of the index. With a key that is equal in all, the server would sort the tasks itself."""
        return _SORT[len(self.equal) :]

    def split(self, at: Any) -> tuple[_Range, _Point, _Range]:
        """Return the part before a value of the key, the part with it, and the part behind it."""
        return replace(self, end=at), _Point((*self.equal, at)), _Range(self.equal, at, self.end)

    def behind(self, batch: Place) -> list[_Part]:
        """Return the parts behind a batch of the range."""
        level = len(self.equal)
        rest = _Range(self.equal, _values(batch)[level], self.end)
        if level == 2 or (level == 1 and batch.create_time is None):
            return [rest]
        done = Place(batch.time, f"{batch.name}:", batch.create_time)
        return [_Point(_values(batch)[: level + 1], done), rest]

    def place(self) -> Place:
        """Return the place before the range."""
        if not self.equal:
            return Place(self.begin, LAST if self.is_begin_excluded else "")
        time, *names = self.equal
        if not names:
            return Place(time, "" if self.begin is None else f"{self.begin}:")
        # The newest comes first: so the tasks of a name begin behind the last possible creation.
        return Place(time, f"{names[0]}:", self.begin or LAST_TIME)


@dataclass(frozen=True, slots=True)
class _Point:
    """The tasks that are equal in some of their first keys. If a place is given, those behind it."""

    equal: tuple[Any, ...]
    after: Place | None = None

    def deeper(self) -> list[_Part]:
        """Return the same tasks in parts that are equal in one key more."""
        if self.after is None:
            return [_Range(self.equal)]
        value = (self.after.name, self.after.create_time)[len(self.equal) - 1]
        rest = _Range(self.equal, value)
        return [rest] if self.after.create_time is None else [_Point((*self.equal, value), self.after), rest]


_Part = _Range | _Point


def _values(place: Place) -> tuple[Any, ...]:
    return place.time, place.name, place.create_time


def _equal(values: tuple[Any, ...]) -> Filter:
    return dict(zip(_KEYS, values, strict=False))


def ascend(
    walk: Walk, limit: int, after: Place | None, given: Sequence[int]
) -> Operation[tuple[list[Document], Place | None]]:
    """Return the next tasks of a walk, and the place at which it stopped before their end.

    `given` are the steps of a walk that tests documents, in documents. A walk that tests none takes them for large
    batches alone.
    """
    rows: list[Document] = []
    left = sum(given)
    pending = _begin(walk, after)
    while pending and len(rows) < limit:
        part = pending.pop(0)
        if isinstance(part, _Point):
            # A step is left for these in any case: else a walk of short steps could end before them again and again.
            most = min(TIED, left or given[0]) if walk.tested else TIED
            found = yield from count_up_to({**walk.ranges, **_equal(part.equal)}, most + 1, walk.index)
            if found <= most:
                left = max(0, left - found)
                rows += (yield from _tied(walk, part, limit - len(rows))) if found else []
            elif len(part.equal) < len(_KEYS):
                pending[:0] = part.deeper()
            else:
                more, passed, stopped = yield from _batch(
                    walk, part, limit - len(rows), _steps(given, left or given[0])
                )
                left = max(0, left - passed)
                rows += more
                if stopped is not None:
                    return rows, stopped
            continue
        if walk.tested:
            if not left:
                stop = part.place()
                if after is None or leads_on(after, stop, Order.DUE):
                    return rows, stop
                left = given[0]  # nothing has been passed yet
            step = _steps(given, left)[0]
            value = yield from _key_at(walk, part, step)
            if value is not None:
                # Behind the last instant there are only dates that Python cannot hold: malformed documents.
                is_last = not part.equal and not isinstance(value, datetime)
                part, tie, rest = part.split(LAST_TIME if is_last else value)
                pending[:0] = [tie] if is_last else [tie, rest]
                step = yield from count_up_to({**walk.ranges, **part.part()}, step, walk.index)
            left -= step
            if not step:
                continue
        more = yield from walk.find([{**SOUND, **part.part()}], limit - len(rows), part.sort())
        batches = [list(batch) for _, batch in groupby(more, key=_batch_of)]
        if len(rows) + len(more) >= limit and (len(batches) == 1 or len(batches[-1]) > 1):
            # The last batch may go on behind the page. Its tasks may be any of the batch: they are read anew, by id.
            place = place_of_row(batches[-1][0], Order.DUE)
            if place is not None:
                batches.pop()
                # The batch may be gone by then: so the rest of the range follows, too.
                pending[:0] = [_Point(_values(place)), *part.behind(place)]
        for batch in batches:
            rows += sorted(batch, key=_id_of, reverse=True)
    return rows, None


def _begin(walk: Walk, after: Place | None) -> list[_Part]:
    first = walk.first or FIRST_TIME
    if after is None or after.time < first:
        return [_Range((), first, walk.last, is_begin_excluded=False)]
    rest = _Range((), after.time, walk.last)
    if after.task_id == LAST or (walk.last is not None and after.time >= walk.last):
        return [rest]
    return [_Point((after.time,), after if after.task_id else None), rest]


def _steps(given: Sequence[int], left: int) -> list[int]:
    """Return the next steps of a walk that may pass so many more documents."""
    return [given[0], left - given[0]] if left > given[0] else [left]


def _tied(walk: Walk, point: _Point, limit: int) -> Operation[list[Document]]:
    """Return the tasks that are equal in their first keys, sorted as a whole."""
    after = {} if point.after is None else not_passed(point.after, len(point.equal))
    return (yield from walk.find([{**SOUND, **_equal(point.equal), **after}], limit, SORT))


def _batch(
    walk: Walk, point: _Point, limit: int, steps: Sequence[int]
) -> Operation[tuple[list[Document], int, Place | None]]:
    """Return the tasks of a large batch, by their ids; how many were passed at most; and where the search stopped."""
    time, name, created = point.equal
    along = replace(walk, index=RECENT_INDEX, ranges={**walk.ranges, NEXT: time})
    below = f"{name};" if point.after is None else point.after.task_id  # ";" comes behind ":"
    rows: list[Document] = []
    passed = 0
    for step in steps:
        ids = {"$gte": f"{name}:", "$lt": below}
        call = tasks(
            "find", {_CREATED: created, "_id": ids}, {"_id": 1}, sort=_BY_ID, skip=step - 1, limit=1, hint=RECENT_INDEX
        )
        mark = yield from by_index(call)
        if mark:
            ids["$gte"] = mark[0]["_id"]
        rows += yield from along.find([{_CREATED: created, "_id": ids}], limit - len(rows), _BY_ID)
        passed += step
        if not mark or len(rows) >= limit:
            return rows, passed, None
        below = mark[0]["_id"]
    return rows, passed, Place(time, below, created)


def _key_at(walk: Walk, part: _Range, number: int) -> Operation[Any]:
    """Return the key of the task with this number in a range. It is read from the index alone."""
    kept = {"_id": 0, part.key: 1}
    matched = {**walk.ranges, **part.part()}
    found = yield from by_index(
        tasks("find", matched, kept, sort=part.sort(), skip=number - 1, limit=1, hint=walk.index)
    )
    if not found:
        return None
    value: Any = found[0]
    for name in part.key.split("."):
        value = value[name]
    return value


def _batch_of(row: Mapping[str, Any]) -> tuple[Any, ...] | None:
    place = place_of_row(row, Order.DUE)
    return None if place is None else _values(place)


def _id_of(row: Mapping[str, Any]) -> str:
    return str(row["_id"])


# --- small -----------------------------------------------------------------------------------------------

# Small sets of tasks, which an index finds: such a set is sorted as a whole.

_ID_INDEX = "_id_"
#: The largest set of tasks that is sorted as a whole.
SORTED = 10_000
#: The largest set of due tasks of some queues that is: as many as a walk may pass.
_OF_QUEUES = 2_000
#: The most ids that are read for a page.
_IDS = 1_000


@dataclass(frozen=True, slots=True)
class Small:
    """A small set of tasks, which an index finds."""

    matched: Filter
    index: str
    used: tuple[str, ...] = field(default=())


def small_set(asked: Asked) -> Operation[Small | None]:
    """Return the set that holds the tasks, if it is certainly small."""
    if asked.criteria.get("lookup") is not None or asked.is_walk_of_tenant:
        return None
    names, keys, prefix = asked.several("name"), asked.several("key"), asked.prefix
    if asked.is_of_tenant and (small := (yield from _all_of_tenant(asked))) is not None:
        return small
    if keys:
        known = names or (yield from names_of_tasks())
        if known is not None and len(known) * len(keys) <= _IDS:
            ids = [f"{name}:{key}" for name in known for key in keys if prefix is None or key.startswith(prefix)]
            return Small({"_id": {"$in": ids}}, _ID_INDEX, ("name", "key", "key_prefix"))
    elif prefix is not None:
        known = names or (yield from names_of_tasks())
        if known is not None and len(known) <= task_names.MOST:
            ranges = filters.with_key_prefix(known, prefix)
            if (yield from count_up_to(ranges, SORTED + 1, _ID_INDEX)) <= SORTED:
                return Small(ranges, _ID_INDEX, ("name", "key_prefix"))
    if not asked.is_of_tenant and (small := (yield from _all_of_tenant(asked))) is not None:
        return small
    matched = asked.of_statuses
    if matched is not None and (yield from count_up_to(matched, SORTED + 1, STATUS_INDEX)) <= SORTED:
        return set_of(matched)
    queues = asked.several("queue")
    if queues and asked.order is Order.DUE:
        # A walk in the order of time reads the tasks of all queues. The index of the workers knows those of one queue.
        matched = {"queue": filters.any_of(queues), NEXT: {"$gte": FIRST_TIME}}
        if (yield from count_up_to(matched, _OF_QUEUES + 1, DISCOVERY_INDEX)) <= _OF_QUEUES:
            return Small(matched, DISCOVERY_INDEX, ("queue",))
    return None


def _all_of_tenant(asked: Asked) -> Operation[Small | None]:
    """Return the set of all tasks of the tenant, if it is small. A walk would pass those of others."""
    matched = {"tenant": asked.criteria.get("tenant")}
    if matched["tenant"] is None or (yield from count_up_to(matched, SORTED + 1, TENANT_INDEX)) > SORTED:
        return None
    return Small(matched, TENANT_INDEX, ("tenant",))


def set_of(matched: Filter) -> Small:
    """Return the set of the tasks with some statuses, and perhaps some names."""
    return Small(matched, STATUS_INDEX, ("status", "name") if "name" in matched else ("status",))


def sorted_page(
    asked: Asked, small: Small, limit: int, after: Place | None, fields: Sequence[str] | None
) -> Operation[list[Document]]:
    """Return the next tasks of a small set."""
    order = asked.order
    first, last = asked.since or FIRST_TIME, asked.until
    walk = Walk(small.index, small.matched, order, asked.rest(*small.used), first, last, fields)
    within: Filter = {order.path: {"$gte": first, **({} if last is None else {"$lt": last})}}
    if order is Order.DUE:
        behind = {} if after is None else not_passed(after)
        return (yield from walk.find([{"$and": [within, SOUND, behind]}], limit, SORT))
    if after is not None:
        passed = {} if not after.task_id else {"_id": {"$gte": after.task_id}}
        # What the server excludes, it does not look for in an index.
        within["$nor"] = [{order.path: {"$gt": after.time}}, {order.path: after.time, **passed}]
    return (yield from walk.find([within], limit, [(order.path, -1), ("_id", -1)]))
