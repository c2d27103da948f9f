"""The counts of all queues. A queue costs few round trips: in a database of many queues, these are most of the cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from mtask.kernel.document.status import FINAL_STATUSES, TaskStatus
from mtask.kernel.driver.indexes import DISCOVERY_INDEX, FINISHED_INDEX, STATUS_INDEX
from mtask.kernel.driver.operation import Operation, tasks
from mtask.kernel.operations.change import by_index
from mtask.kernel.statements.filters import FIRST_TIME, NEXT
from mtask.search.counts import MOST, Count, count_keys
from mtask.search.lists import queues_of_finished
from mtask.search.walks import STATUS, count_up_to

Document = dict[str, Any]
#: The most seeks for the oldest due task of a queue.
_SEEKS = 200
#: One query counts a status in all queues if there are at most so many of its tasks for each queue. A query for each
#: queue would cost the server and the client more. Tests tune it.
FEW = 200
_FINISHED = "task_state.finish_time"
_PRIORITY, _WORKERS = "task_option.priority", "task_option.specific_worker_ids"
#: A condition by field also matches values inside arrays, which only malformed documents hold.
_NO_ARRAY: Document = {"$not": {"$type": "array"}}


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
    running = yield from _read(TaskStatus.RUNNING, min(most, MOST))
    waiting = yield from _read(TaskStatus.WAITING, min(most, MOST))
    firsts = yield from _firsts()
    names = {*(yield from queues_of_finished()), *firsts, *waiting[0]}
    few: dict[TaskStatus, Mapping[str, int]] = {}
    for status in sorted(FINAL_STATUSES):
        if (yield from count_up_to({STATUS: status.value}, FEW * len(names) + 1, STATUS_INDEX)) <= FEW * len(names):
            few[status] = yield from _finished(status)
    found = []
    for queue in sorted(names):
        counts: dict[TaskStatus, Count] = {}
        for status in sorted(FINAL_STATUSES):
            if status in few:
                number = few[status].get(queue, 0)
                counts[status] = Count(min(number, most), number > most)
                continue
            ranges = {"queue": queue, STATUS: status.value, _FINISHED: {"$gte": FIRST_TIME}}
            counts[status] = yield from count_keys(ranges, FINISHED_INDEX, most)
        is_open, oldest, is_rough = Count(0), None, False
        if queue in firsts:
            is_open = yield from count_keys({"queue": queue, NEXT: {"$gte": FIRST_TIME}}, DISCOVERY_INDEX, most)
            oldest, is_rough = yield from oldest_due(queue, firsts[queue])
        for status, (of_queues, is_more) in ((TaskStatus.RUNNING, running), (TaskStatus.WAITING, waiting)):
            counts[status] = Count(of_queues.get(queue, 0), is_more)
        held = counts[TaskStatus.RUNNING]
        counts[TaskStatus.INIT] = Count(max(0, is_open.count - held.count), is_open.is_more or held.is_more)
        found.append(QueueCounts(queue, counts, oldest, is_rough))
    return found


def _read(status: TaskStatus, most: int) -> Operation[tuple[dict[str, int], bool]]:
    """Count the tasks with a status by queue, at most `most`. The second result is whether there are more."""
    stages = [{"$match": {STATUS: status.value}}, {"$limit": most + 1}, {"$sortByCount": "$queue"}]
    rows = yield from by_index(tasks("rows", stages, hint=STATUS_INDEX))
    # A document without a queue is malformed: it is in none.
    counts = {row["_id"]: row["count"] for row in rows if isinstance(row["_id"], str)}
    return counts, sum(row["count"] for row in rows) > most


def _finished(status: TaskStatus) -> Operation[dict[str, int]]:
    """Count the tasks with a final status by queue. The index alone tells it."""
    ranges = {"queue": {"$gte": ""}, STATUS: status.value, _FINISHED: {"$gte": FIRST_TIME}}
    stages = [{"$match": ranges}, {"$group": {"_id": "$queue", "count": {"$sum": 1}}}]
    rows = yield from by_index(tasks("rows", stages, hint=FINISHED_INDEX))
    return {row["_id"]: row["count"] for row in rows if isinstance(row["_id"], str)}


def _firsts() -> Operation[dict[str, Document]]:
    """Return the first task of each queue in the index of due tasks, by one seek for each."""
    found: dict[str, Document] = {}
    view = {"_id": 0, "queue": 1, _WORKERS: 1, _PRIORITY: 1, NEXT: 1}
    after = ""
    while True:
        beyond = {"queue": {"$gt": after, **_NO_ARRAY}, NEXT: {"$gte": FIRST_TIME}}
        call = tasks("find", beyond, view, sort=[("queue", 1)], limit=1, hint=DISCOVERY_INDEX)
        rows = yield from by_index(call)
        if not rows:
            return found
        after = rows[0]["queue"]
        found[after] = rows[0]


def oldest_due(queue: str, first: Document | None = None) -> Operation[tuple[datetime | None, bool]]:
    """Return the earliest next_preempt_time of a queue, by one seek for each priority. At most 200 are looked at.

    Tasks that name their workers are left out. The second result is whether there are more priorities. `first` is the
    queue's first task in the index, if it is known: if it names no workers, it saves the first seek.
    """
    oldest: datetime | None = None
    below: Document = {"$lte": 2**63 - 1}
    highest = first if first is not None and _is_sound(first) else None
    for _ in range(_SEEKS):
        highest = highest or (yield from _highest(queue, below))
        if highest is None:
            return oldest, False
        time = highest["task_state"]["next_preempt_time"]
        if isinstance(time, datetime):
            oldest = time if oldest is None else min(oldest, time)
        below, highest = {"$lt": highest["task_option"]["priority"]}, None
    return oldest, True


def _is_sound(first: Document) -> bool:
    """Whether the first task of a queue is its most urgent one that any worker may take, and is not malformed."""
    option = first.get("task_option")
    if not isinstance(option, dict) or option.get("specific_worker_ids") != []:
        return False
    return isinstance(option.get("priority"), int | float) and isinstance(first.get("task_state"), dict)


def _highest(queue: str, below: Document) -> Operation[Document | None]:
    """Return the earliest task of the highest priority in a range."""
    level: Document = {"queue": queue, _WORKERS: [], _PRIORITY: {**below, **_NO_ARRAY}, NEXT: {"$gte": FIRST_TIME}}
    level |= {"task_option": _NO_ARRAY, "task_state": _NO_ARRAY}
    view, sort = {"_id": 0, _PRIORITY: 1, NEXT: 1}, [(_PRIORITY, -1), (NEXT, 1)]
    rows = yield from by_index(tasks("find", level, view, sort=sort, limit=1, hint=DISCOVERY_INDEX))
    return rows[0] if rows else None
