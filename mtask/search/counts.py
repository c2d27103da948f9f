"""Counts of tasks that stop at a bound, so that they are fast in a collection of any size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mtask.kernel.document.status import FINAL_STATUSES, TaskStatus
from mtask.kernel.driver.indexes import (
    DISCOVERY_INDEX,
    FINISHED_INDEX,
    LOOKUP_INDEX,
    RECENT_INDEX,
    STATUS_INDEX,
    TENANT_INDEX,
)
from mtask.kernel.driver.operation import Operation, tasks
from mtask.kernel.operations.change import by_index
from mtask.kernel.statements import filters
from mtask.kernel.statements.filters import FIRST_TIME, NEXT, Filter
from mtask.search.walks import Asked, count_up_to, names_of_tasks

#: The most tasks that a count counts.
MOST = 10_000
#: The most documents that a count examines, and the most keys of an index where these suffice. Tests tune both.
DOCUMENTS, KEYS = 2_000, 20_000
_STATUS, _FINISHED = "task_state.status", "task_state.finish_time"
_DUE = frozenset({TaskStatus.INIT, TaskStatus.RUNNING})


@dataclass(frozen=True, slots=True)
class Count:
    """A number of tasks. If `is_more`, the count stopped there, and there may be more."""

    count: int
    is_more: bool = False

    def __str__(self) -> str:
        return f"{self.count:,}+" if self.is_more else f"{self.count:,}"


@dataclass(frozen=True, slots=True)
class _Part:
    """A range of an index, and what is tested on the tasks in it."""

    ranges: Filter
    index: str
    tested: Filter
    #: Whether the index holds the fields that are tested.
    is_in_index: bool = False


def count(criteria: Mapping[str, Any], most: int = MOST) -> Operation[Count]:
    """Count the tasks that match, at most `most`."""
    if not any(wanted is not None for wanted in criteria.values()):
        estimated: int = yield tasks("estimated_document_count")
        return Count(estimated)
    total, is_more, left = 0, False, DOCUMENTS
    for part in (yield from _parts(criteria)):
        found, examined = yield from _count(part, most - total, left)
        left -= examined
        total += found.count
        is_more |= found.is_more
        if total >= most and is_more:
            break
    return Count(total, is_more)


def _count(part: _Part, most: int, documents: int) -> Operation[tuple[Count, int]]:
    """Count the tasks of a part, at most `most`, and return the number of documents examined: at most `documents`."""
    if not part.tested:
        return (yield from count_keys(part.ranges, part.index, most)), 0
    bound = KEYS if part.is_in_index else documents
    size = yield from count_up_to(part.ranges, bound + 1, part.index)
    examined = 0 if part.is_in_index else min(size, bound)
    if not size or not bound:
        return Count(0, size > 0), examined
    # The first limit comes before the test, because it bounds what the server examines.
    stages: list[dict[str, Any]] = [
        {"$match": part.ranges},
        {"$limit": bound},
        {"$match": part.tested},
        {"$limit": most + 1},
        {"$count": "n"},
    ]
    rows = yield from by_index(tasks("rows", stages, hint=part.index))
    found = rows[0]["n"] if rows else 0
    return Count(min(found, most), found > most or size > bound), examined


def count_keys(ranges: Filter, index: str, most: int) -> Operation[Count]:
    """Count the tasks in a range of an index, at most `most`. The index alone tells it."""
    found = yield from count_up_to(ranges, most + 1, index)
    return Count(min(found, most), found > most)


def _parts(criteria: Mapping[str, Any]) -> Operation[list[_Part]]:
    """Return the parts that together hold the tasks, each by the index that bounds it best."""
    asked = Asked(criteria)
    names, keys, prefix = asked.several("name"), asked.several("key"), criteria.get("key_prefix")
    # What bounds the count of a tenant are its own tasks, so it does not tell how many others have.
    of_tenant = _Part({"tenant": criteria.get("tenant")}, TENANT_INDEX, asked.rest("tenant"))
    is_of_tenant = criteria.get("tenant") is not None
    if criteria.get("lookup") is not None:
        is_in_index = not (asked.several("worker_id") or criteria.get("params"))
        looked_up = filters.looked_up(criteria["lookup"])
        if is_of_tenant and (yield from count_up_to(looked_up, KEYS + 1, LOOKUP_INDEX)) > KEYS:
            return [of_tenant]
        return [_Part(looked_up, LOOKUP_INDEX, asked.rest("lookup"), is_in_index)]
    if asked.is_of_tenant:
        return [of_tenant]
    if keys or prefix is not None:
        known = names or (yield from names_of_tasks())
        if known is not None and keys:
            return [
                _Part({"_id": {"$in": [f"{n}:{k}" for n in known for k in keys]}}, "_id_", asked.rest("name", "key"))
            ]
        if known is not None and prefix is not None:
            tested = asked.rest("name", "key_prefix")
            return [_Part(filters.with_key_prefix([name], prefix), "_id_", tested) for name in known]
    if is_of_tenant:
        return [of_tenant]
    if not asked.statuses and not names and not asked.several("queue"):
        is_in_index = not (asked.several("worker_id") or criteria.get("params"))
        begun = {"task_state.create_time": {"$gte": FIRST_TIME}}
        return [_Part(begun, RECENT_INDEX, asked.rest(), is_in_index)]
    return _by_status(asked, set(asked.statuses) or set(TaskStatus), names)


def _by_status(asked: Asked, statuses: set[TaskStatus], names: Sequence[str]) -> list[_Part]:
    parts: list[_Part] = []
    queues = asked.several("queue")
    final, due = sorted(statuses & FINAL_STATUSES), sorted(statuses & _DUE)
    of_final = {_STATUS: filters.any_of(final)} if final else {}
    if final and names:
        ranges = {**of_final, "name": filters.any_of(names)}
        parts.append(_Part(ranges, STATUS_INDEX, asked.rest("status", "name")))
    elif final and queues:
        ranges = {"queue": filters.any_of(queues), **of_final, _FINISHED: {"$gte": FIRST_TIME}}
        parts.append(_Part(ranges, FINISHED_INDEX, asked.rest("status", "queue")))
    elif final:
        parts.append(_Part(of_final, STATUS_INDEX, asked.rest("status")))
    if queues and set(due) == _DUE:
        ranges = {"queue": filters.any_of(queues), NEXT: {"$gte": FIRST_TIME}}
        tested = asked.rest("status", "queue")
        parts.append(_Part(ranges, DISCOVERY_INDEX, tested, is_in_index=set(tested) <= {"name"}))
        due = []
    for status in [*due, *(statuses & {TaskStatus.WAITING})]:
        # The instants stand before the names in this index, so the names are tested on its keys.
        tested = asked.rest("status")
        parts.append(_Part({_STATUS: status.value}, STATUS_INDEX, tested, is_in_index=set(tested) <= {"name"}))
    return parts


def statistics(most: int) -> Operation[list[dict[str, Any]]]:
    """Count the tasks by queue, name and status, as `queries.statistics` does, but at most `most` of each status.

    If a status has more tasks, its rows have `is_more`. A malformed document that holds several statuses in an array is
    in no count.
    """
    group = {
        "_id": {"queue": "$queue", "name": "$name", "status": "$task_state.status"},
        "count": {"$sum": 1},
        "oldest_preempt_time": {"$min": f"${NEXT}"},
    }
    found: list[dict[str, Any]] = []
    for status in TaskStatus:
        stages = [{"$match": {_STATUS: status.value}}, {"$limit": most + 1}, {"$group": group}]
        rows = yield from by_index(tasks("rows", stages, hint=STATUS_INDEX))
        is_more = sum(row["count"] for row in rows) > most
        found += [{**row, "is_more": is_more} for row in rows]
    return found
