"""Owed tasks: a task owes its children as soon as a handler adds them, and its next task from its success.

Whoever settles the task publishes them, by `_id`, and takes them out of `mtask.kernel.statements.outbox`. So each
exists once, although a process may die at any point.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from mtask.kernel.statements import expressions as x
from mtask.kernel.statements.derive import Pipeline
from mtask.kernel.statements.filters import OWES_VALUE, Filter, held_runs
from mtask.kernel.statements.outbox import OWED_TASKS, OwedTask, document, tasks_owed

#: The most ids of unpublished tasks that a document notes.
MAX_UNPUBLISHED = 100


def may_add(task_id: str, run_id: str) -> Filter:
    """Match the task if this run holds it, nobody wants to cancel it, and no change of it is still to be settled.

    While another run of the task owes its value, the mark stays anyway, so no change is forgotten.
    """
    held = held_runs([task_id], [run_id])
    is_free = [{"owed_since": None}, {OWES_VALUE: {"$exists": True}}]
    return {**held, "task_state.cancel_requested": False, "$or": is_free}


def add(children: Sequence[OwedTask], now: x.Expression = x.NOW) -> Pipeline:
    """Let the task owe these children. Its dependents wait for them from now on."""
    parts = x.literal([child.parts() for child in children])
    made = {"$map": {"input": parts, "as": "new", "in": document("$$new", now)}}
    changed = {
        "owed_tasks": {"$concatArrays": [tasks_owed(), made]},
        "owed_since": x.later_than(x.OWED_SINCE, now),
        "flow.has_children": True,
        "quiet_time": now,
    }
    return [{"$set": changed}]


def take_out(task_ids: Sequence[str]) -> Pipeline:
    """Take these tasks out of the owed ones: they are published."""
    is_left = {"$not": [{"$in": ["$$one._id", x.literal(list(task_ids))]}]}
    left = {"$filter": {"input": tasks_owed(), "as": "one", "cond": is_left}}
    return [
        {"$set": {"owed_tasks": left}},
        {"$set": {"owed_tasks": {"$cond": [_has_none(), "$$REMOVE", OWED_TASKS]}}},
    ]


def note_unpublished(task_ids: Sequence[str]) -> Pipeline:
    """Note which of the owed tasks are not published, because other tasks have their ids."""
    theirs = {
        "$setIntersection": [
            {"$map": {"input": tasks_owed(), "as": "one", "in": "$$one._id"}},
            x.literal(list(task_ids)),
        ]
    }
    noted = {"$setUnion": [{"$ifNull": [f"{x.STATE}.unpublished", []]}, theirs]}
    return [{"$set": {"task_state.unpublished": {"$slice": [noted, -MAX_UNPUBLISHED]}}}]


def added(task_ids: Sequence[str], mark: datetime, now: x.Expression = x.NOW) -> Pipeline:
    """Take out these children: they are published. Remove the mark if it is as read, and nothing else is owed.

    The change concerns no other worker.
    """
    is_done = {"$and": [{"$not": [OWED_TASKS]}, {"$eq": [x.OWED_SINCE, mark]}, {"$eq": [x.OWED_VALUES, []]}]}
    crossed_off = {"$cond": [is_done, "$$REMOVE", x.OWED_SINCE]}
    return [*take_out(task_ids), {"$set": {"owed_since": crossed_off, "quiet_time": now}}]


def _has_none() -> x.Expression:
    return {"$eq": [OWED_TASKS, []]}
