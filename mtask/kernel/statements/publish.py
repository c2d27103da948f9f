"""Builds the documents of new tasks, and the update pipelines with which clients change task documents.

A pipeline that changes an existing task closes lapsed runs, makes its one change, and derives the other fields.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from mtask.kernel.document.options import TaskOption
from mtask.kernel.document.parts import OPTIONAL
from mtask.kernel.document.status import RunStatus, TaskStatus
from mtask.kernel.document.task import MAX_FORMER_BYTES, MAX_FORMER_PARAMS, SCHEMA_VERSION
from mtask.kernel.statements import expressions as x
from mtask.kernel.statements.derive import Pipeline, close_lapsed, derive, trimmed
from mtask.kernel.statements.rounds import moved_to, without_calls

_INIT = TaskStatus.INIT.value


def task_document(
    fixed: Mapping[str, Any], start: x.Expression, now: x.Expression, not_after: x.Expression = None
) -> dict[str, Any]:
    """Return a new task's document, or the expression that makes the document.

    `fixed` holds _id, name, key, queue, params and task_option, and lookup where it is given. `start` is its
    start_time. If `start` is None, the task starts at once. If `not_after` is None, it never expires.
    """
    state: dict[str, Any] = {"status": _INIT, "create_time": now}
    if start is not None:
        state["start_time"] = start
    if not_after is not None:
        state["not_after"] = not_after
    state |= {
        "next_preempt_time": now if start is None else start,
        "failed_cnt": 0,
        "cancel_requested": False,
        "worker_states": [],
    }
    return {**fixed, "task_state": state, "schema_version": SCHEMA_VERSION}


def publish(
    fixed: Mapping[str, Any],
    start: x.Expression,
    released: x.Expression = None,
    gather: x.Expression = None,
    not_after: x.Expression = None,
) -> Pipeline:
    """Insert the task if it does not exist. Leave an existing task exactly as it is.

    The caller must send this pipeline as an upsert by `_id`. `released` is the release_time of a flow's first step.
    `gather` is the part of a task that gathers calls.
    """
    is_new = {"$eq": ["$$ROOT", {"_id": "$_id"}]}
    # All fields are in one literal, so that the server does not parse each value as an expression.
    step = {"flow": {"$mergeObjects": [x.literal(fixed["flow"]), {"release_time": released}]}} if released else {}
    if gather is not None:
        step["gather"] = gather
    made = {"$mergeObjects": [x.literal(fixed), task_document(step, start, x.NOW, not_after)]}
    return [{"$replaceWith": {"$cond": [is_new, made, "$$ROOT"]}}]


def republish(
    *,
    replacement: Mapping[str, Any] | None,
    start: x.Expression,
    clean_failed: bool,
    clean_success: bool,
    not_after: x.Expression = None,
    now: x.Expression = x.NOW,
) -> Pipeline:
    """Change an existing task.

    `replacement` and `start` replace queue, params, task_option, lookup and start_time. `clean_failed` drops closed
    runs without a SUCCESS. `clean_success` drops runs with a SUCCESS. The task expires as this publish says.
    """
    pipeline = close_lapsed(now)
    expiry = {"task_state.not_after": "$$REMOVE" if not_after is None else not_after}
    if replacement is not None:
        queue = x.literal(replacement["queue"])
        pipeline.append(
            {
                "$set": {
                    **{name: x.literal(value) for name, value in replacement.items() if name not in OPTIONAL},
                    **{
                        name: "$$REMOVE" if (value := replacement.get(name)) is None else x.literal(value)
                        for name in OPTIONAL
                    },
                    "task_state.start_time": "$$REMOVE" if start is None else start,
                    **expiry,
                    **{f"task_state.{name}": moved for name, moved in moved_to(queue, now).items()},
                    # The calls that the task has gathered are replaced, too.
                    "gather": without_calls(),
                    "again": "$$REMOVE",
                }
            }
        )
    dropped = [RunStatus.FAIL.value, RunStatus.TIMEOUT.value, RunStatus.CANCELED.value] if clean_failed else []
    reopened = [TaskStatus.FAIL.value] if clean_failed else []
    if clean_success:
        dropped.append(RunStatus.SUCCESS.value)
        reopened.append(TaskStatus.SUCCESS.value)
    if dropped:
        change: dict[str, Any] = {
            **expiry,
            "task_state.worker_states": x.runs_where({"$not": [{"$in": ["$$run.status", dropped]}]}),
            "task_state.status": {"$cond": [{"$in": [x.STATUS, reopened]}, TaskStatus.INIT.value, x.STATUS]},
        }
        if clean_failed:
            change["task_state.failed_cnt"] = 0
        if clean_success:
            # What the task does now, it does anew, so it also goes on anew.
            change["task_state.next_id"] = "$$REMOVE"
        change["task_state.clean_cnt"] = _one_more_if_any(dropped)
        pipeline.append({"$set": change})
    return [*pipeline, *derive(now)]


def _one_more_if_any(dropped: list[str]) -> x.Expression:
    """Return the number of publishes that dropped runs. Add 1 if the task has runs with the statuses in `dropped`."""
    count = f"{x.STATE}.clean_cnt"
    one_more = {"$add": [{"$ifNull": [count, 0]}, 1]}
    has_any = {"$gt": [{"$size": x.runs_where({"$in": ["$$run.status", dropped]})}, 0]}
    return {"$cond": [has_any, one_more, {"$ifNull": [count, "$$REMOVE"]}]}


def cancel(now: x.Expression = x.NOW) -> Pipeline:
    """Request the end of a task.

    If no run holds the task, it ends at once. If a run holds the task, the run's worker ends it.
    """
    is_open = {"$not": [x.is_final()]}
    return [
        *close_lapsed(now),
        # What was published while a run held the task is canceled, too.
        {"$set": {"task_state.cancel_requested": is_open, "flow": _without_holder(is_open), "again": "$$REMOVE"}},
        *derive(now),
    ]


def _without_holder(condition: x.Expression) -> x.Expression:
    """Return `flow`, without `held_by` if the condition holds.

    A step without a holder was ended or opened again by a user: no change of another step revives it. A task of no flow
    gets no field.
    """
    return _without(["held_by"], condition)


def _without(names: Sequence[str], condition: x.Expression) -> x.Expression:
    return {"$cond": [{"$and": [x.FLOW, condition]}, x.without(x.FLOW, *names), {"$ifNull": [x.FLOW, "$$REMOVE"]}]}


class NewParams(NamedTuple):
    """New params of a task that exists, as they are to be stored."""

    params: Any
    sealed: str | None = None  #: the name of the data key that encrypts them
    #: The lookups of the task, encrypted with the same data key. None: they stay as they are.
    lookup: list[dict[str, Any]] | None = None
    #: The handler of which the publisher knew, and the version for which the params are made.
    declared: str | None = None
    version: int | None = None


def change_params(new: NewParams, now: x.Expression = x.NOW) -> Pipeline:
    """Replace the params, and keep the former ones: the newest few, up to a size."""
    former = {"$ifNull": ["$former_params", []]}
    pushed = {"$concatArrays": [[{"params": "$params", "until": now}], former]}
    newest = {"$slice": [pushed, MAX_FORMER_PARAMS]}
    size = {"$bsonSize": {"kept": {"$concatArrays": ["$$value.kept", ["$$this"]]}}}
    # The first ones that together fit: after one that does not fit, none is kept.
    has_room = {"$and": ["$$value.has_room", {"$lte": [size, MAX_FORMER_BYTES]}]}
    fitting = {
        "$reduce": {
            "input": newest,
            "initialValue": {"kept": [], "has_room": True},
            "in": {
                "$cond": [
                    has_room,
                    {"kept": {"$concatArrays": ["$$value.kept", ["$$this"]]}, "has_room": True},
                    {"kept": "$$value.kept", "has_room": False},
                ]
            },
        }
    }
    is_same = {"$eq": ["$params", x.literal(new.params)]}
    kept = {"$let": {"vars": {"fitting": fitting}, "in": "$$fitting.kept"}}
    return [
        {
            "$set": {
                "former_params": {"$cond": [is_same, {"$ifNull": ["$former_params", "$$REMOVE"]}, kept]},
                "params": x.literal(new.params),
                **{
                    name: "$$REMOVE" if (value := getattr(new, name)) is None else x.literal(value)
                    for name in ("sealed", "declared", "version")
                },
                **({} if new.lookup is None else {"lookup": x.literal(new.lookup)}),
                # The params no longer are what the task has gathered.
                "gather": without_calls(),
            }
        }
    ]


def run_again(*, everything: bool, waits: bool = False, now: x.Expression = x.NOW) -> Pipeline:
    """Open a finished task for a new round.

    Failed, timed-out and canceled runs become past. Successes become past only with `everything`. With `waits`, a step
    of a flow is WAITING again, also if it was released before.

    A finished task can still have live runs if concurrent_worker_cnt was lowered. These runs belong to the new round.
    """
    staying = [RunStatus.RUNNING.value, *([] if everything else [RunStatus.SUCCESS.value])]
    aged = {"$cond": [{"$in": ["$$run.status", staying]}, "$$run", {"$mergeObjects": ["$$run", {"past": True}]}]}
    return [
        *close_lapsed(now),
        {
            "$set": {
                "task_state.worker_states": {"$map": {"input": x.RUNS, "as": "run", "in": aged}},
                "task_state.failed_cnt": 0,
                "task_state.cancel_requested": False,
                "task_state.not_after": "$$REMOVE",  # who asks for another round wants it now
                "task_state.status": TaskStatus.INIT.value,
                "flow": _without(["held_by", *(["release_time"] if waits else [])], True),
            }
        },
        {"$set": {"task_state.worker_states": trimmed()}},
        *derive(now),
    ]


def update_option(option: TaskOption, now: x.Expression = x.NOW, *, following: TaskOption | None = None) -> Pipeline:
    """Replace the options, and those of the next round where `following` gives them."""
    changes = {"task_option": x.literal(option.stored())}
    if following is not None:
        changes["again.task_option"] = x.literal(following.stored())
    return [{"$set": changes}, *close_lapsed(now), *derive(now)]
