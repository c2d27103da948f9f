"""Statements of flows: the rules of `mtask.model.flows` as server expressions, the changes of steps, and their guards.

The reads that decide are aggregations. With read concern "snapshot", an aggregation reads a step and all tasks for
which it waits at one moment.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from mtask.model.flows import Verdict, end_reason, fail_fast_reason
from mtask.model.status import FINAL_STATUSES, TaskStatus
from mtask.store.statements import expressions as x
from mtask.store.statements import requests
from mtask.store.statements.derive import Pipeline, Stage, close_lapsed, derive
from mtask.store.statements.filters import Filter, by_ids

STATUS = "task_state.status"
_WAITING = TaskStatus.WAITING.value
_FAILED = [TaskStatus.CANCELED.value, TaskStatus.FAIL.value]
_OPEN = sorted(status.value for status in TaskStatus if status not in FINAL_STATUSES)
#: No task has this id. A `$lookup` from an empty array would match every document that lacks the field.
_NOBODY = "\0"


def is_open() -> x.Expression:
    """Whether the task has not ended. This is the server's form of `flows.is_open`."""
    owes = {"$gt": [{"$size": {"$ifNull": ["$owed_tasks", []]}}, 0]}
    return {"$or": [{"$not": [x.is_final()]}, owes]}


def has_failed() -> x.Expression:
    """Whether the task is FAIL or CANCELED. This is the server's form of `flows.has_failed` for a task that exists."""
    return {"$in": [x.STATUS, _FAILED]}


def verdict(on_failed: x.Expression, has_open: x.Expression, any_failed: x.Expression) -> x.Expression:
    """Return what becomes of a WAITING step. This is the server's form of `flows.verdict`."""
    return {
        "$switch": {
            "branches": [
                {"case": has_open, "then": Verdict.WAIT.value},
                {"case": {"$eq": [on_failed, "run"]}, "then": Verdict.RELEASE.value},
                {"case": {"$not": [any_failed]}, "then": Verdict.RELEASE.value},
                {"case": {"$eq": [on_failed, "cancel"]}, "then": Verdict.CANCEL.value},
            ],
            "default": Verdict.FAIL.value,
        }
    }


def look(task_ids: Sequence[str], collection: str) -> Pipeline:
    """Return the stages that decide on the WAITING tasks among these.

    A row holds `_id`, `held_by`, `owed_since`, `verdict` and `other`. For the verdict "wait", `other` is an open task:
    the present holder, if it is open. For "cancel" and "fail", it is a task that has failed.
    """
    brief: Stage = {"$project": {"open": is_open(), "failed": has_failed(), "parent": "$flow.has_children"}}
    among = {"from": collection, "localField": "flow.after", "foreignField": "_id", "as": "own", "pipeline": [brief]}
    parents = _ids_where("$own", "$$one.parent")
    below = {
        "from": collection,
        "localField": "parents",
        "foreignField": "flow.ancestors",
        "as": "below",
        # With this condition, the server uses the index on ancestors.
        "pipeline": [{"$match": {"flow.ancestors": {"$exists": True}}}, brief],
    }
    missing = {"$cond": [_are_all_there(), [], {"$setDifference": ["$flow.after", "$own._id"]}]}
    return [
        {"$match": {**by_ids(task_ids), STATUS: _WAITING}},
        {"$project": {"flow": 1, "owed_since": 1}},
        {"$lookup": among},
        {"$set": {"parents": {"$concatArrays": [[_NOBODY], parents]}}},
        {"$lookup": below},
        {"$set": {"all": {"$concatArrays": ["$own", "$below"]}}},
        {
            "$set": {
                "open": _ids_where("$all", "$$one.open"),
                "failed": {"$concatArrays": [_ids_where("$all", "$$one.failed"), missing]},
            }
        },
        {"$set": {"verdict": verdict("$flow.on_failed", _has_any("$open"), _has_any("$failed"))}},
        {
            "$project": {
                "held_by": "$flow.held_by",
                "owed_since": 1,
                "verdict": 1,
                "other": {
                    "$switch": {
                        "branches": [
                            {"case": {"$in": ["$flow.held_by", "$open"]}, "then": "$flow.held_by"},
                            {"case": _has_any("$open"), "then": _any_of("$open")},
                            {"case": _has_any("$failed"), "then": {"$first": "$failed"}},
                        ],
                        "default": None,
                    }
                },
            }
        },
    ]


def _are_all_there() -> x.Expression:
    return {"$eq": [{"$size": "$own"}, {"$size": "$flow.after"}]}


def _ids_where(array: str, condition: x.Expression) -> x.Expression:
    matching = {"$filter": {"input": array, "as": "one", "cond": condition}}
    return {"$map": {"input": matching, "as": "one", "in": "$$one._id"}}


def _has_any(array: str) -> x.Expression:
    return {"$gt": [{"$size": array}, 0]}


def _any_of(array: str) -> x.Expression:
    """Return a random element. So the holders of many dependents differ, and none is moved many times."""
    return {"$arrayElemAt": [array, {"$toInt": {"$floor": {"$multiply": [{"$rand": {}}, {"$size": array}]}}}]}


def holders(task_ids: Sequence[str], collection: str) -> Pipeline:
    """Return the stages that read these WAITING tasks and whether their holders are open."""
    brief: Stage = {"$project": {"open": is_open()}}
    among = {"from": collection, "localField": "flow.held_by", "foreignField": "_id", "as": "own", "pipeline": [brief]}
    return [
        {"$match": {**by_ids(task_ids), STATUS: _WAITING}},
        {"$project": {"flow.held_by": 1, "owed_since": 1}},
        {"$lookup": among},
        {"$project": {"held_by": "$flow.held_by", "owed_since": 1, "is_open": {"$in": [True, "$own.open"]}}},
    ]


def waiting(task_ids: Sequence[str], held_by: str | None) -> Filter:
    """Match these tasks if they are WAITING and the same task holds them as before. None: no task holds them."""
    return {**by_ids(task_ids), STATUS: _WAITING, "flow.held_by": held_by}


def ended_by(task_ids: Sequence[str], held_by: str) -> Filter:
    """Match these tasks if this task caused their end."""
    return {**by_ids(task_ids), STATUS: {"$in": _FAILED}, "flow.held_by": held_by}


def held_or_ended_by(ended: Sequence[str], recovered: Sequence[str]) -> Filter:
    """Match the WAITING tasks that tasks in `ended` hold, and the tasks whose end tasks in `recovered` caused."""
    return {
        "$or": [
            {"flow.held_by": {"$in": list(ended)}, STATUS: _WAITING},
            {"flow.held_by": {"$in": list(recovered)}, STATUS: {"$in": _FAILED}},
        ]
    }


def open_in_flow(key: str) -> Filter:
    """Match the open tasks of the flow that a fail-fast end cancels. Tasks that run after failures stay."""
    return {
        "flow.key": key,
        STATUS: {"$in": _OPEN},
        "flow.on_failed": {"$ne": "run"},
        "task_state.cancel_requested": False,
    }


def cancelable(key: str, *, everything: bool) -> Filter:
    """Match the open steps that a cancel of the flow changes.

    Without `everything`, steps stay that depend on others and run also after failures. They stay after their release,
    too: so a cancel that is sent twice does what it does when it is sent once. A step whose run a fail-fast end asked
    to stop is changed, too: from then on, its end is the user's.
    """
    asked_by_none = [{"task_state.cancel_requested": False}, {"flow.held_by": {"$exists": True}}]
    matched: Filter = {"flow.key": key, STATUS: {"$in": _OPEN}, "$or": asked_by_none}
    if not everything:
        matched["$nor"] = [{"flow.on_failed": "run", "flow.after": {"$nin": [None, []]}}]
    return matched


def failed_steps() -> Filter:
    """Match the tasks that are FAIL or CANCELED. The caller adds the flow."""
    return {STATUS: {"$in": _FAILED}}


def ended_by_any(culprits: Sequence[str]) -> Filter:
    """Match the tasks whose end one of these tasks caused."""
    return {"flow.held_by": {"$in": list(culprits)}, STATUS: {"$in": _FAILED}}


def disown() -> Pipeline:
    """Make the end of a step a user's: no other step has caused it."""
    return [{"$unset": "flow.held_by"}]


def owed_as_read(marks: Mapping[str, datetime], statuses: Mapping[str, str]) -> Filter:
    """Match these tasks if their mark and their status are as they were read."""
    ids = list(marks)
    index = {"$indexOfArray": [x.literal(ids), "$_id"]}

    def as_read(values: list[Any]) -> x.Expression:
        return {"$arrayElemAt": [x.literal(values), index]}

    same = [
        {"$eq": ["$owed_since", as_read([marks[task_id] for task_id in ids])]},
        {"$eq": [x.STATUS, as_read([statuses[task_id] for task_id in ids])]},
    ]
    return {**by_ids(ids), "owed_since": {"$exists": True}, "$expr": {"$and": same}}


def owed_before(age_ms: int) -> Filter:
    """Match the tasks of whose last change others have not been told for this time."""
    return {"owed_since": {"$exists": True}, "$expr": {"$lte": ["$owed_since", {"$subtract": [x.NOW, age_ms]}]}}


def cross_off() -> Pipeline:
    """Remove the mark: others have been told."""
    return [{"$unset": "owed_since"}]


def move(holder: str, now: x.Expression = x.NOW) -> Pipeline:
    """Let another open task hold the step. The mark stays until the new holder has been read again."""
    return [{"$set": {"flow.held_by": x.literal(holder), "owed_since": x.later_than(x.OWED_SINCE, now)}}]


def release(now: x.Expression = x.NOW) -> Pipeline:
    """Let the step start. A delay is counted from now."""
    delayed = {"$max": [f"{x.STATE}.start_time", x.add_ms(now, "$flow.delay_ms")]}
    released = {"$mergeObjects": [_unheld(), {"release_time": now}]}
    return [{"$set": {"flow": released, "task_state.start_time": {"$ifNull": [delayed, "$$REMOVE"]}}}, *derive(now)]


def end(outcome: Verdict, culprit: str, now: x.Expression = x.NOW) -> Pipeline:
    """End the WAITING step as CANCELED or FAIL, because another task has failed."""
    status = TaskStatus.CANCELED if outcome is Verdict.CANCEL else TaskStatus.FAIL
    return [
        {
            "$set": {
                "flow.held_by": x.literal(culprit),
                "task_state.status": status.value,
                "task_state.reason": x.literal(end_reason(culprit)),
            }
        },
        *derive(now),
    ]


def reopen(now: x.Expression = x.NOW) -> Pipeline:
    """Open a step again whose end another task caused. A step that was never released is WAITING again."""
    return requests.run_again(everything=False, now=now)


def fail_fast(culprit: str, now: x.Expression = x.NOW) -> Pipeline:
    """Cancel a step because this task has failed. If a run holds the step, the run's worker ends it."""
    return [
        *close_lapsed(now),
        {
            "$set": {
                "flow.held_by": x.literal(culprit),
                "task_state.cancel_requested": True,
                "task_state.reason": x.literal(fail_fast_reason(culprit)),
            }
        },
        *derive(now),
    ]


def _unheld() -> x.Expression:
    return {"$unsetField": {"field": "held_by", "input": "$flow"}}


def unended() -> Filter:
    """Match the first steps of flows that have not ended. Such a step has the end_time null, not a missing one."""
    return {"flow.end_time": {"$type": "null"}}


def open_steps() -> Filter:
    """Match the tasks that are open. The caller adds the flow."""
    return {STATUS: {"$in": _OPEN}}


def owed_steps() -> Filter:
    """Match the tasks that still owe others something. The caller adds the flow."""
    return {"owed_since": {"$exists": True}}


def without_retention() -> Filter:
    """Match the tasks whose retention has not begun, although their options ask for it. The caller adds the flow."""
    return {"expire_time": None, "$expr": {"$ne": [_retain(), None]}}


def begin_retention(now: x.Expression = x.NOW) -> Pipeline:
    """Begin the retention of a step, if it has ended. The retention of a flow's steps begins at the flow's end."""
    has_ended = {"$and": [x.is_final(), {"$not": [x.OWED_SINCE]}, {"$ne": [_retain(), None]}]}
    return [{"$set": {"expire_time": {"$cond": [has_ended, x.add_ms(now, _retain()), "$$REMOVE"]}}}]


def end_flow(now: x.Expression = x.NOW) -> Pipeline:
    """Record in its first step that the flow has ended."""
    return [{"$set": {"flow.end_time": now}}]


def _retain() -> x.Expression:
    is_success = {"$eq": [x.STATUS, TaskStatus.SUCCESS.value]}
    retain = {"$cond": [is_success, f"{x.OPTION}.retain_success_ms", f"{x.OPTION}.retain_fail_ms"]}
    return {"$ifNull": [retain, None]}
