"""Counts of tasks that stop at a bound, so that they are fast in a collection of any size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from mtask.model.status import FINAL_STATUSES, TaskStatus
from mtask.store.driver.operation import Operation, tasks
from mtask.store.layout.indexes import (
    DISCOVERY_INDEX,
    FINISHED_INDEX,
    LOOKUP_INDEX,
    RECENT_INDEX,
    STATUS_INDEX,
    TENANT_INDEX,
)
from mtask.store.lists import listing
from mtask.store.lists.asked import Asked
from mtask.store.lists.walks import count_up_to
from mtask.store.statements import filters
from mtask.store.statements.filters import FIRST_TIME, NEXT, Filter
from mtask.store.tasks.names import names_of_tasks
from mtask.store.tasks.queries import by_index

#: The most tasks that a count counts.
MOST = 10_000
#: The most documents that a count examines, and the most keys of an index where these suffice.
_DOCUMENTS, _KEYS = 3_000, 20_000
#: The most seeks for the oldest due task of a queue.
_SEEKS = 200
_STATUS, _FINISHED = "task_state.status", "task_state.finish_time"
_PRIORITY, _WORKERS = "task_option.priority", "task_option.specific_worker_ids"
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
    total, is_more, left = 0, False, _DOCUMENTS
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
        return (yield from _count_keys(part.ranges, part.index, most)), 0
    bound = _KEYS if part.is_in_index else documents
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


def _count_keys(ranges: Filter, index: str, most: int) -> Operation[Count]:
    """Count the tasks in a range of an index, at most `most`. The index alone tells it."""
    found = yield from count_up_to(ranges, most + 1, index)
    return Count(min(found, most), found > most)


def _parts(criteria: Mapping[str, Any]) -> Operation[list[_Part]]:
    """Return the parts that together hold the tasks, each by the index that bounds it best."""
    asked = Asked(criteria)
    names, keys, prefix = asked.several("name"), asked.several("key"), criteria.get("key_prefix")
    if criteria.get("lookup") is not None:
        is_in_index = not (asked.several("worker_id") or criteria.get("params"))
        return [_Part(filters.looked_up(criteria["lookup"]), LOOKUP_INDEX, asked.rest("lookup"), is_in_index)]
    if asked.is_of_tenant:
        ranges = {"tenant": criteria["tenant"]}
        return [_Part(ranges, TENANT_INDEX, asked.rest("tenant"))]
    if keys or prefix is not None:
        known = names or (yield from names_of_tasks())
        if known is not None and keys:
            return [
                _Part({"_id": {"$in": [f"{n}:{k}" for n in known for k in keys]}}, "_id_", asked.rest("name", "key"))
            ]
        if known is not None and prefix is not None:
            tested = asked.rest("name", "key_prefix")
            return [_Part(filters.with_key_prefix([name], prefix), "_id_", tested) for name in known]
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


@dataclass(frozen=True, slots=True)
class QueueCounts:
    """The tasks of a queue, counted up to a bound."""

    queue: str
    counts: Mapping[TaskStatus, Count]
    #: The time at which the oldest due or future task of the queue is due, of those that any worker may take. None:
    #: there is none.
    oldest_preempt_time: datetime | None
    #: Whether the queue has so many priorities that not all were looked at.
    is_oldest_rough: bool = False


def queues(most: int = MOST) -> Operation[list[QueueCounts]]:
    """Count the tasks of each queue, by status, up to `most`.

    RUNNING and WAITING tasks are read, not only counted in an index: of these, at most `MOST` are counted.
    """
    running = yield from _by_queue(TaskStatus.RUNNING, min(most, MOST))
    waiting = yield from _by_queue(TaskStatus.WAITING, min(most, MOST))
    names = {*(yield from listing.queues_of_finished()), *(yield from _queues_of_open()), *waiting[0]}
    found = []
    for queue in sorted(names):
        counts: dict[TaskStatus, Count] = {}
        for status in sorted(FINAL_STATUSES):
            ranges = {"queue": queue, _STATUS: status.value, _FINISHED: {"$gte": FIRST_TIME}}
            counts[status] = yield from _count_keys(ranges, FINISHED_INDEX, most)
        open_ones = {"queue": queue, NEXT: {"$gte": FIRST_TIME}}
        is_open = yield from _count_keys(open_ones, DISCOVERY_INDEX, most)
        for status, (of_queues, is_more) in ((TaskStatus.RUNNING, running), (TaskStatus.WAITING, waiting)):
            counts[status] = Count(of_queues.get(queue, 0), is_more)
        held = counts[TaskStatus.RUNNING]
        counts[TaskStatus.INIT] = Count(max(0, is_open.count - held.count), is_open.is_more or held.is_more)
        oldest, is_rough = yield from oldest_due(queue)
        found.append(QueueCounts(queue, counts, oldest, is_rough))
    return found


def _by_queue(status: TaskStatus, most: int) -> Operation[tuple[dict[str, int], bool]]:
    """Count the tasks with a status by queue, at most `most`. The second result is whether there are more."""
    stages = [{"$match": {_STATUS: status.value}}, {"$limit": most + 1}, {"$sortByCount": "$queue"}]
    rows = yield from by_index(tasks("rows", stages, hint=STATUS_INDEX))
    return {str(row["_id"]): row["count"] for row in rows}, sum(row["count"] for row in rows) > most


def statistics(most: int) -> Operation[list[dict[str, Any]]]:
    """Count the tasks by queue, name and status, as `queries.statistics` does, but at most `most` of each status.

    If a status has more tasks, its rows have `is_more`.
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
    return sorted(found, key=lambda row: tuple(str(row["_id"].get(part)) for part in ("queue", "name", "status")))


def _queues_of_open() -> Operation[list[str]]:
    names: list[str] = []
    after = ""
    while True:
        beyond = {"queue": {"$gt": after}, NEXT: {"$gte": FIRST_TIME}}
        found = yield from by_index(
            tasks("find", beyond, {"_id": 0, "queue": 1}, sort=[("queue", 1)], limit=1, hint=DISCOVERY_INDEX)
        )
        if not found:
            return names
        after = found[0]["queue"]
        names.append(after)


def oldest_due(queue: str) -> Operation[tuple[datetime | None, bool]]:
    """Return the earliest next_preempt_time of a queue, by one seek for each priority. At most 200 are looked at.

    Tasks that name their workers are left out. The second result is whether there are more priorities.
    """
    oldest: datetime | None = None
    below: dict[str, Any] = {"$lte": 2**63 - 1}
    for _ in range(_SEEKS):
        level = {"queue": queue, _WORKERS: [], _PRIORITY: below, NEXT: {"$gte": FIRST_TIME}}
        call = tasks(
            "find",
            level,
            {"_id": 0, _PRIORITY: 1, NEXT: 1},
            sort=[(_PRIORITY, -1), (NEXT, 1)],
            limit=1,
            hint=DISCOVERY_INDEX,
        )
        found = yield from by_index(call)
        if not found:
            return oldest, False
        time = found[0]["task_state"]["next_preempt_time"]
        if isinstance(time, datetime):
            oldest = time if oldest is None else min(oldest, time)
        below = {"$lt": found[0]["task_option"]["priority"]}
    return oldest, True
