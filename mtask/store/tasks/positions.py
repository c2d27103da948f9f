"""Counts the due tasks that go before a task, and finds when tasks of its queue finished lately.

The counts examine at most KEYS keys of the index, however long the backlog is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from mtask.model.status import TaskStatus
from mtask.store.driver.operation import Operation, tasks
from mtask.store.layout.indexes import DISCOVERY_INDEX, STATUS_INDEX
from mtask.store.statements import expressions as x
from mtask.store.statements.filters import NEXT, Filter

#: The most keys of the index that the counts of one position examine.
KEYS = 10_000
#: The most keys that seeks may take, and the keys left for the reads beside the counts.
_SEEKS, _RESERVE = 1_000, 600
#: The number of finished tasks by which the rate of a queue is estimated, and the most names whose tasks are read.
_SAMPLE, _NAMES = 200, 16
_PRIORITY, _WORKERS = "task_option.priority", "task_option.specific_worker_ids"


@dataclass(frozen=True, slots=True)
class Standing:
    """The fields of a task by which workers order it among the due tasks of its queue."""

    task_id: str
    queue: str
    worker_ids: Sequence[str]
    priority: int
    next_preempt_time: datetime
    #: The names of tasks that the same workers run. None: any name.
    names: Sequence[str] | None


@dataclass(frozen=True, slots=True)
class Ahead:
    """The due tasks that go before a task. If `is_more`, the count stopped, and there may be more of them."""

    count: int
    is_more: bool
    names: frozenset[str]


def count_ahead(standing: Standing, now: datetime) -> Operation[Ahead]:
    """Count the due tasks that go before this one. `now`: the server's time."""
    named = len(standing.worker_ids)
    # A document that names several workers has a key for each of them.
    left = (KEYS - _RESERVE - 4 * (named + 2)) // max(1, named)
    same_workers = {"queue": standing.queue, _WORKERS: {"$in": [[], *standing.worker_ids]}, NEXT: {"$exists": True}}
    higher: Filter = {**same_workers, _PRIORITY: {"$gt": standing.priority}}
    found = Ahead(0, False, frozenset())
    highest = yield tasks("find", higher, {_PRIORITY: 1}, sort=[(_PRIORITY, -1)], limit=1, hint=DISCOVERY_INDEX)
    if highest:
        spread = _spread(highest[0]["task_option"]["priority"], standing.priority)
        seeks = 2 * (named + 2) * (spread + 1)
        if seeks <= _SEEKS:
            # Within each priority, the due tasks are one range of the index. The server seeks from range to range.
            higher[NEXT] = {"$exists": True, "$lte": now}
            left = max(1, left - seeks)
        found, examined = yield from _counted(higher, {"$lte": [f"${NEXT}", now]}, standing, left)
        left -= examined
        if found.is_more or left <= 0:
            return Ahead(found.count, True, found.names)
    own = standing.next_preempt_time
    level: Filter = {**same_workers, _PRIORITY: standing.priority, NEXT: {"$exists": True, "$lte": min(now, own)}}
    is_before = {"$or": [{"$lt": [f"${NEXT}", own]}, {"$lt": ["$_id", x.literal(standing.task_id)]}]}
    also, _ = yield from _counted(level, is_before, standing, left)
    return Ahead(found.count + also.count, also.is_more, found.names | also.names)


def _spread(highest: Any, own: int) -> int:
    """Return how many priorities lie above this one. A malformed task may have a priority of any type of number."""
    is_plain = isinstance(highest, int | float) and highest - own <= _SEEKS
    return int(highest - own) if is_plain else _SEEKS


def _counted(matched: Filter, condition: x.Expression, standing: Standing, most: int) -> Operation[tuple[Ahead, int]]:
    """Examine at most `most` matching tasks. Count those for which the condition holds. Return both numbers."""
    is_ours = [] if standing.names is None else [{"$in": ["$name", x.literal([*standing.names])]}]
    is_ahead = {"$and": [condition, *is_ours]}
    group = {
        "_id": None,
        "examined": {"$sum": 1},
        "count": {"$sum": {"$cond": [is_ahead, 1, 0]}},
        "names": {"$addToSet": {"$cond": [is_ahead, "$name", None]}},
    }
    # The limit comes before the condition, because it bounds what the server examines.
    rows = yield tasks("rows", [{"$match": matched}, {"$limit": most}, {"$group": group}], hint=DISCOVERY_INDEX)
    if not rows:
        return Ahead(0, False, frozenset()), 0
    names = frozenset(name for name in rows[0]["names"] if isinstance(name, str))
    return Ahead(rows[0]["count"], rows[0]["examined"] >= most, names), rows[0]["examined"]


def finished_lately(queue: str, names: Sequence[str]) -> Operation[list[datetime]]:
    """Return the times at which tasks of this queue finished. Only the newest tasks of the first names are read."""
    ended = [TaskStatus.SUCCESS.value, TaskStatus.FAIL.value]
    newest = {"task_state.status": {"$in": ended}, NEXT: None, "name": {"$in": list(dict.fromkeys(names))[:_NAMES]}}
    found = yield tasks(
        "find",
        newest,
        {"queue": 1, "task_state.finish_time": 1},
        sort=[("task_state.create_time", -1)],
        limit=_SAMPLE,
        hint=STATUS_INDEX,
    )
    times = [document["task_state"].get("finish_time") for document in found if document.get("queue") == queue]
    return [time for time in times if isinstance(time, datetime)]
