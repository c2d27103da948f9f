"""Owed tasks: complete tasks that a task is still to publish. They are written together with the cause of them.

A task owes its children from the moment at which a handler adds them, and its next task from its success. Whoever
settles the task publishes them, by `_id`. So each exists once, although a process may die at any point.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from mtask.model.documents import SCHEMA_VERSION
from mtask.model.status import TaskStatus
from mtask.store.statements import expressions as x
from mtask.store.statements.derive import Pipeline
from mtask.store.statements.filters import OWES_VALUE, Filter, held_runs

OWED_TASKS = "$owed_tasks"
#: The most ids of unpublished tasks that a document notes.
MAX_UNPUBLISHED = 100


@dataclass(frozen=True, slots=True)
class OwedTask:
    """A task that another task is to publish, without the times that the server adds."""

    fixed: Mapping[str, Any]  #: the fields of the document that do not depend on the clock
    #: The start of the task: an instant, or a delay in ms. If both are None, the task starts at once.
    start: datetime | None = None
    delay_ms: int | None = None

    @property
    def task_id(self) -> str:
        """The task's `_id`."""
        task_id: str = self.fixed["_id"]
        return task_id

    def parts(self) -> dict[str, Any]:
        """Return the parts from which the server makes the document."""
        return {"fixed": self.fixed, "start": self.start, "delay_ms": self.delay_ms}


def document(parts: str, now: x.Expression) -> x.Expression:
    """Return the document of the owed task whose parts are in this variable.

    A step of a flow is released at once. No other step can watch it before it exists.
    """
    start = {"$ifNull": [f"{parts}.start", x.add_ms(now, f"{parts}.delay_ms"), None]}
    state = {
        "status": TaskStatus.INIT.value,
        "create_time": now,
        "start_time": {"$ifNull": ["$$start", "$$REMOVE"]},
        "next_preempt_time": {"$ifNull": ["$$start", now]},
        "failed_cnt": 0,
        "cancel_requested": False,
        "worker_states": [],
    }
    flow = f"{parts}.fixed.flow"
    released = {"$cond": [flow, {"flow": {"$mergeObjects": [flow, {"release_time": now, "unwatched": True}]}}, {}]}
    made = {"$mergeObjects": [f"{parts}.fixed", released, {"task_state": state, "schema_version": SCHEMA_VERSION}]}
    return {"$let": {"vars": {"start": start}, "in": made}}


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
        "owed_tasks": {"$concatArrays": [_owed(), made]},
        "owed_since": x.later_than(x.OWED_SINCE, now),
        "flow.has_children": True,
        "quiet_time": now,
    }
    return [{"$set": changed}]


def take_out(task_ids: Sequence[str]) -> Pipeline:
    """Take these tasks out of the owed ones: they are published."""
    is_left = {"$not": [{"$in": ["$$one._id", x.literal(list(task_ids))]}]}
    left = {"$filter": {"input": _owed(), "as": "one", "cond": is_left}}
    return [
        {"$set": {"owed_tasks": left}},
        {"$set": {"owed_tasks": {"$cond": [_has_none(), "$$REMOVE", OWED_TASKS]}}},
    ]


def note_unpublished(task_ids: Sequence[str]) -> Pipeline:
    """Note which of the owed tasks are not published, because other tasks have their ids."""
    theirs = {
        "$setIntersection": [{"$map": {"input": _owed(), "as": "one", "in": "$$one._id"}}, x.literal(list(task_ids))]
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


def _owed() -> x.Expression:
    return {"$ifNull": [OWED_TASKS, []]}


def before_derived() -> dict[str, x.Expression]:
    """Return what `go_on` needs of the document as it was before the derived fields were computed."""
    return {"_asked": f"{x.STATE}.cancel_requested"}


def go_on(ids: Sequence[str], nexts: Sequence[OwedTask | None], now: x.Expression = x.NOW) -> Pipeline:
    """Let each of these tasks owe its next task, if it has just become SUCCESS. This comes after the derived fields.

    A task does not go on if somebody wanted to cancel it, although its worker had not heard of that yet.
    A task goes on once a round: with several workers, as the run says that made it final, and not again after a rerun.
    `next_cnt` gives the next task of a later round a key of its own.
    """
    parts = [None if one is None else one.parts() for one in nexts]
    index = x.index_of_id(ids)
    ends_now = [
        {"$eq": [x.STATUS, TaskStatus.SUCCESS.value]},
        {"$eq": [f"{x.STATE}.finish_time", now]},
        {"$not": [f"{x.STATE}.next_id"]},
        {"$not": ["$_asked"]},
    ]
    # The field `_next` holds the parts of the next task, and nothing for a task that does not go on.
    mine = {"$cond": [{"$and": ends_now}, {"$arrayElemAt": [x.literal(parts), index]}, None]}

    def if_going_on(value: x.Expression, otherwise: x.Expression) -> x.Expression:
        return {"$cond": ["$_next", value, otherwise]}

    next_cnt = f"{x.STATE}.next_cnt"
    parent = {"$mergeObjects": [x.FLOW, if_going_on({"has_children": True}, {})]}
    changed = {
        "owed_tasks": if_going_on({"$concatArrays": [_owed(), [document("$_next", now)]]}, OWED_TASKS),
        "owed_since": if_going_on(x.later_than(x.OWED_SINCE, now), x.OWED_SINCE),
        "task_state.next_id": if_going_on("$_next.fixed._id", f"{x.STATE}.next_id"),
        "task_state.next_cnt": if_going_on({"$add": [{"$ifNull": [next_cnt, 0]}, 1]}, next_cnt),
        "flow": {"$cond": [x.FLOW, parent, "$$REMOVE"]},
        # A task stays as long as it owes something.
        "expire_time": if_going_on("$$REMOVE", "$expire_time"),
        "_next": "$$REMOVE",
        "_asked": "$$REMOVE",
    }
    return [{"$set": {"_next": mine}}, {"$set": changed}]
