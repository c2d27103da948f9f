"""Looks for flows that cannot end by themselves. Only somebody who writes documents by hand makes such a flow.

Each search reads a partial index, which holds only tasks of flows.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from mtask.features.flows import statements as flows
from mtask.kernel.document.status import TaskStatus
from mtask.kernel.driver.indexes import FLOW_INDEX, HELD_INDEX, OWED_INDEX
from mtask.kernel.driver.operation import Operation, tasks
from mtask.kernel.driver.stores import TASKS
from mtask.kernel.statements import expressions as x
from mtask.kernel.statements import filters

Document = dict[str, Any]
#: Time limit of each search, in ms.
SCAN_MS = 5_000
_ID = {"_id": 1}
_WAITING = {flows.STATUS: TaskStatus.WAITING.value}
_UNMARKED = {"owed_since": None}


def without_holder(limit: int) -> Operation[list[str]]:
    """Return WAITING steps that no task holds and that are not marked: nobody looks at them again."""
    lost = {"flow.key": {"$exists": True}, **_WAITING, "flow.held_by": None, **_UNMARKED}
    return _ids((yield tasks("find", lost, _ID, limit=limit, hint=FLOW_INDEX, max_time_ms=SCAN_MS)))


def with_ended_holder(limit: int) -> Operation[list[Document]]:
    """Return unmarked WAITING steps whose holder has ended unmarked, or does not exist.

    Each row has the field `holder`: the holder's status, or None if there is no such task.
    """
    found = yield from _with_ended_holder({}, limit)
    if not found:
        return []
    # The server reads a step before its holder. The holder may have ended and released the step in between. Such a step
    # is no longer found by a second search.
    again = yield from _with_ended_holder(filters.by_ids([row["_id"] for row in found]), limit)
    return again


def _with_ended_holder(among: filters.Filter, limit: int) -> Operation[list[Document]]:
    held = {**among, "flow.held_by": {"$exists": True}, **_WAITING, **_UNMARKED}
    is_open = {"$or": [{"$not": [x.is_final()]}, flows.owes()]}
    will_tell = {"$and": [is_open, {"$ne": ["$flow.unwatched", True]}]}
    holder = {"open": will_tell, "owed": {"$gt": ["$owed_since", None]}, "status": f"${flows.STATUS}"}
    join = {"from": TASKS, "localField": "held_by", "foreignField": "_id", "as": "it"}
    stages = [
        {"$match": held},
        {"$project": {"held_by": "$flow.held_by"}},
        {"$lookup": {**join, "pipeline": [{"$project": holder}]}},
        {"$match": {"it.open": {"$ne": True}, "it.owed": {"$ne": True}}},
        {"$limit": limit},
        {"$project": {"held_by": 1, "holder": {"$first": "$it.status"}}},
    ]
    found: list[Document] = yield tasks("rows", stages, hint="_id_" if among else HELD_INDEX, maxTimeMS=SCAN_MS)
    return found


def held_though_released(limit: int) -> Operation[list[str]]:
    """Return open steps that a task holds although they are not WAITING, and that nobody asked to stop."""
    open_and_released = {"$in": [TaskStatus.INIT.value, TaskStatus.RUNNING.value]}
    held = {"flow.held_by": {"$exists": True}, flows.STATUS: open_and_released, "task_state.cancel_requested": False}
    return _ids((yield tasks("find", held, _ID, limit=limit, hint=HELD_INDEX, max_time_ms=SCAN_MS)))


def owed_for(age: timedelta, limit: int) -> Operation[list[str]]:
    """Return the tasks of whose last change others have not been told for this time."""
    matched = flows.owed_before(age // timedelta(milliseconds=1))
    order = [("owed_since", 1)]
    return _ids((yield tasks("find", matched, _ID, sort=order, limit=limit, hint=OWED_INDEX, max_time_ms=SCAN_MS)))


def headless(limit: int) -> Operation[list[str]]:
    """Return the keys of flows whose first task was removed, and that have steps whose retention waits for the end."""
    unended = {"flow.key": {"$exists": True}, "$or": [flows.open_steps(), flows.without_retention()]}
    head = {
        "from": TASKS,
        "localField": "_id",
        "foreignField": "flow.head",
        "as": "head",
        "pipeline": [{"$project": _ID}],
    }
    stages = [
        {"$match": unended},
        {"$group": {"_id": "$flow.key"}},
        {"$lookup": head},
        {"$match": {"head": []}},
        {"$limit": limit},
    ]
    return _ids((yield tasks("rows", stages, hint=FLOW_INDEX, maxTimeMS=SCAN_MS)))


def _ids(rows: list[Document]) -> list[str]:
    return [str(row["_id"]) for row in rows]
