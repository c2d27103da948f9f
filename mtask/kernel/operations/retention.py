"""Removes tasks: either all tasks that match a filter, or all finished tasks of a queue except the newest.

Tasks are removed in batches. For each batch, the ids of the tasks are read first. Then the tasks that still match are
deleted. So a task stays if it is run again in between. Tasks of flows stay, too, because other tasks may need them. So
do tasks that are still to publish their next task, and tasks whose end is still to be told.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from mtask.database import setup
from mtask.kernel.document.status import FINAL_STATUSES, TaskStatus
from mtask.kernel.driver.operation import Operation, tasks
from mtask.kernel.operations.change import NEEDED_BY_NONE
from mtask.kernel.statements import expressions as x
from mtask.kernel.statements import filters, rules

#: The most tasks that one command removes.
BATCH = 500


def purgeable(criteria: Mapping[str, Any], older_than_ms: int | None) -> filters.Filter:
    """Match the tasks to purge. They match the criteria, have no live run, and are old enough."""
    matched = filters.search(criteria)
    conditions: list[x.Expression] = [{"$eq": [{"$size": rules.live_runs(x.NOW)}, 0]}]
    if older_than_ms is not None:
        ended = {"$ifNull": [f"{x.STATE}.finish_time", f"{x.STATE}.create_time"]}
        conditions.append({"$lte": [ended, {"$subtract": [x.NOW, older_than_ms]}]})
    return {**matched, **NEEDED_BY_NONE, "$expr": {"$and": [{"$isArray": [x.RUNS]}, *conditions]}}


def count(matched: filters.Filter) -> Operation[int]:
    """Return the number of tasks that match."""
    counted: int = yield tasks("count_documents", matched)
    return counted


def remove_batch(matched: filters.Filter, limit: int) -> Operation[tuple[int, bool]]:
    """Remove up to `limit` matching tasks; return their number, and whether more may match."""
    most = min(limit, BATCH)
    found = yield tasks("find", matched, {"_id": 1}, limit=most)
    ids = [document["_id"] for document in found]
    if not ids:
        return 0, False
    result = yield tasks("delete_many", {**matched, "_id": {"$in": ids}})
    return int(result.deleted_count), len(ids) >= most


def prepare_keep() -> Operation[None]:
    """Make the index that finds the newest finished tasks of a queue, if a database of an earlier mtask lacks it."""
    yield from setup.make_finished_index()


def remove_older(
    queue: str, statuses: Sequence[TaskStatus], keep: int, also: Sequence[filters.Filter] = ()
) -> Operation[int]:
    """Remove a batch of a queue's finished tasks, but keep the newest `keep` tasks. Return the number of found tasks.

    `also` holds further guards for the removal.
    """
    assert set(statuses) <= FINAL_STATUSES
    finished = {"queue": queue, "task_state.status": {"$in": [status.value for status in statuses]}, **NEEDED_BY_NONE}
    order = [("task_state.finish_time", -1), ("_id", -1)]
    view = {"_id": 1, "task_state.finish_time": 1}
    has_ended = {**finished, "task_state.finish_time": {"$exists": True}}
    found = yield tasks("find", has_ended, view, sort=order, skip=keep, limit=BATCH)
    times = [when for when in (finish_time_of(document) for document in found) if when is not None]
    if not times:
        return 0
    # A task may have been run again and finished again since the read. Such a task is now one of the newest, so it
    # stays.
    ids = [document["_id"] for document in found]
    guard = {**finished, "_id": {"$in": ids}, "task_state.finish_time": {"$lte": max(times)}}
    yield tasks("delete_many", filters.with_guards(guard, also))
    return len(found)


def finish_time_of(document: Mapping[str, Any]) -> datetime | None:
    """Return the time at which a task finished, or None if a malformed document has no valid time."""
    state = document.get("task_state")
    when = state.get("finish_time") if isinstance(state, Mapping) else None
    return when if isinstance(when, datetime) else None
