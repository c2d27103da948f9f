"""Finds what is left undone in flows: changes of which others have not been told, and steps whose holder is gone."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from typing import Any

from mtask.features.flows import statements as flows
from mtask.features.flows.read import BATCH
from mtask.kernel.document.status import TaskStatus
from mtask.kernel.driver.indexes import FLOW_INDEX, HELD_INDEX, OWED_INDEX
from mtask.kernel.driver.operation import Operation, tasks
from mtask.kernel.driver.stores import TASKS

Document = dict[str, Any]
_ID = {"_id": 1}
#: Time limit of a search among the steps of all flows.
_LONG = timedelta(seconds=60)


def is_any() -> Operation[bool]:
    """Whether the database holds a flow, or a task that owes others something."""
    found = yield tasks("find_one", {"flow.key": {"$exists": True}}, _ID, hint=FLOW_INDEX)
    return found is not None or (yield from is_any_owed())


def is_any_owed() -> Operation[bool]:
    """Whether the database holds a task that owes others something."""
    return (yield tasks("find_one", {"owed_since": {"$exists": True}}, _ID, hint=OWED_INDEX)) is not None


def owed(age: timedelta, limit: int = BATCH, besides: Iterable[str] = ()) -> Operation[list[str]]:
    """Return the tasks of whose last change others have not been told for this time, besides these tasks."""
    matched = flows.owed_before(age // timedelta(milliseconds=1))
    if besides:
        matched["_id"] = {"$nin": list(besides)}
    found = yield tasks("find", matched, _ID, sort=[("owed_since", 1)], limit=limit, hint=OWED_INDEX)
    # The `_id` of a malformed document may be something other than text. No task waits for such a document.
    return [document["_id"] for document in found if isinstance(document["_id"], str)]


def orphans(limit: int = BATCH) -> Operation[list[str]]:
    """Return WAITING tasks whose holder does not exist. Somebody has removed the holder by hand."""
    held = {"flow.held_by": {"$exists": True}, "task_state.status": TaskStatus.WAITING.value}
    join = {"from": TASKS, "localField": "_id", "foreignField": "_id", "as": "it"}
    pipeline = [
        {"$match": held},
        {"$group": {"_id": "$flow.held_by"}},
        {"$lookup": {**join, "pipeline": [{"$project": _ID}]}},
        {"$match": {"it": []}},
        {"$limit": limit},
    ]
    rows = yield tasks("rows", pipeline, hint=HELD_INDEX).within(_LONG)
    removed = [row["_id"] for row in rows]
    if not removed:
        return []
    found = yield tasks("find", {**held, "flow.held_by": {"$in": removed}}, _ID, limit=limit, hint=HELD_INDEX)
    return [document["_id"] for document in found]
