"""The outbox: what a task owes others. It is written in the update that causes it, and retention waits for it.

A task owes each end that is to be told to its callback, a task as which it goes on, the tasks that its handler adds,
news for the others of its flow, and a value that its handler is still to return. So a process that dies right after the
update loses nothing: whoever finds the mark settles it, and crosses it off.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from mtask.kernel.document.parts import MAX_OWED
from mtask.kernel.document.status import TaskStatus
from mtask.kernel.document.task import SCHEMA_VERSION
from mtask.kernel.statements import expressions as x
from mtask.kernel.statements.filters import Filter

#: The receiver of the task's ends. As a condition, it is false for a task without a receiver.
CALLBACK = "$callback"
#: The fields that hold the ends which are still to be told, and their number so far.
OWED_FIELD, COUNTER_FIELD = "callback_owed", "callback_cnt"
OWED_ENDS = f"${OWED_FIELD}"
OWED_TASKS = "$owed_tasks"


def tells(status: x.Expression, was_final: x.Expression) -> x.Expression:
    """Whether a change to this status is to be told."""
    on = f"{CALLBACK}.on"
    # A malformed document may hold anything there.
    is_wanted = {"$in": [status, {"$cond": [{"$isArray": [on]}, on, []]}]}
    return {"$and": [CALLBACK, {"$not": [was_final]}, x.is_final(status), is_wanted]}


def owe_end(is_told: x.Expression, status: x.Expression, now: x.Expression) -> dict[str, x.Expression]:
    """Return the fields with which a task owes one more end, if `is_told`; else they stay."""
    number = {"$add": [{"$cond": [{"$isNumber": f"${COUNTER_FIELD}"}, f"${COUNTER_FIELD}", 0]}, 1]}
    entry = {"number": number, "status": status, "time": now}
    entry |= {name: f"{CALLBACK}.{name}" for name in ("url", "secret", "tenant")}
    more = {"$concatArrays": [{"$cond": [{"$isArray": [OWED_ENDS]}, OWED_ENDS, []]}, [entry]]}
    return {
        COUNTER_FIELD: {"$cond": [is_told, number, f"${COUNTER_FIELD}"]},
        OWED_FIELD: {"$cond": [is_told, {"$slice": [more, -MAX_OWED]}, OWED_ENDS]},
    }


def owing_ends() -> Filter:
    """Match the tasks with ends that are still to be told. The index on the mark holds only these."""
    return {OWED_FIELD: {"$exists": True}}


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


def tasks_owed() -> x.Expression:
    """Return the owed tasks as an array, also of a task that owes none."""
    return {"$ifNull": [OWED_TASKS, []]}


def before_derived() -> dict[str, x.Expression]:
    """Return what `go_on` needs of the document as it was before the derived fields were computed."""
    return {"_asked": f"{x.STATE}.cancel_requested"}


def go_on(ids: Sequence[str], nexts: Sequence[OwedTask | None], now: x.Expression = x.NOW) -> list[Mapping[str, Any]]:
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
        "owed_tasks": if_going_on({"$concatArrays": [tasks_owed(), [document("$_next", now)]]}, OWED_TASKS),
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


def retention_alone(now: x.Expression) -> x.Expression:
    """Return the expire_time of a task of no flow that owes no task and no value."""
    is_kept = {"$or": [{"$not": [x.is_final()]}, OWED_ENDS, {"$eq": [retention(), None]}]}
    return {"$cond": [is_kept, "$$REMOVE", x.add_ms(x.finish_time(now), retention())]}


def retention() -> x.Expression:
    """Return the retention of a task in ms. It is null for a task that is kept for ever."""
    return {"$ifNull": [retain_ms(), None]}


def retain_ms(status: x.Expression = x.STATUS) -> x.Expression:
    """Return the retention in ms that the options of a task set for an end with this status, or nothing."""
    is_success = {"$eq": [status, TaskStatus.SUCCESS.value]}
    return {"$cond": [is_success, f"{x.OPTION}.retain_success_ms", f"{x.OPTION}.retain_fail_ms"]}
