"""Short statements for simple tasks.

A simple task needs one worker, admits any worker, and has no earlier run in this round and no next round. A step of a
flow is simple only after its release.

The general statements contain every rule. A general claim has 17 KB. If it is sent for a single task, most of its cost
is the server's parsing. A simple task needs few of the rules, so a short statement has a tenth of the size.

The guards of a short statement check everything that it assumes. A task that is not simple, or is no longer simple,
does not match the guards. Such a task needs a general statement.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mtask.kernel.document.status import RunStatus, TaskStatus
from mtask.kernel.statements import expressions as x
from mtask.kernel.statements import outbox, rules
from mtask.kernel.statements.claim import new_run
from mtask.kernel.statements.derive import NEAR_MS, Pipeline
from mtask.kernel.statements.filters import NEXT, RUNS, Filter, by_ids, fence_of
from mtask.kernel.statements.finish import Outcome, reported_progress

_WANTS_ONE = [
    # The end of the run begins the next round.
    {"$not": [x.AGAIN]},
    {"$eq": [f"{x.OPTION}.concurrent_worker_cnt", 1]},
    {"$eq": [f"{x.STATE}.failed_cnt", 0]},
]
#: The end of a task with a receiver is to be told: that is left to the general statement.
_TELLS_NONE = {"$not": [outbox.CALLBACK]}
#: The end of a step concerns other tasks of its flow.
_OF_NO_FLOW = [{"$not": [x.FLOW]}, {"$not": [x.OWED_SINCE]}]
#: A task that owes others tasks, and a task that already has a finish_time, are left to the general statement.
_OF_FLOW = [x.FLOW, f"{x.FLOW}.release_time", {"$not": ["$owed_tasks"]}, {"$not": [f"{x.STATE}.finish_time"]}]


def looks_simple(document: str) -> x.Expression:
    """Whether the inserted document at this path looks simple.

    This can be wrong. The guards of the short statements check the task again.
    """
    return {
        "$and": [
            {"$eq": [f"{document}.task_option.concurrent_worker_cnt", 1]},
            {"$eq": [f"{document}.task_option.specific_worker_ids", []]},
            {"$eq": [f"{document}.task_state.status", TaskStatus.INIT.value]},
        ]
    }


def unbegun(task_ids: Sequence[str], now: x.Expression = x.NOW) -> Filter:
    """Match these tasks if they are simple and due, and have no runs, not even runs of an earlier round."""
    # The conditions are expressions, because a match by field would also match values inside arrays.
    conditions = [
        {"$lte": [f"${NEXT}", now]},
        {"$lte": [rules.due_time(), now]},
        # A step must have been released, and the claim must be no change that other steps hear of.
        {"$or": [{"$not": [x.FLOW]}, {"$and": [f"{x.FLOW}.release_time", {"$not": [f"{x.STATE}.finish_time"]}]}]},
        {"$eq": [x.STATUS, TaskStatus.INIT.value]},
        {"$eq": [x.RUNS, []]},
        {"$eq": [f"{x.OPTION}.specific_worker_ids", []]},
        {"$eq": [f"{x.STATE}.cancel_requested", False]},
        {"$gte": [f"{x.OPTION}.worker_timeout_ms", 1]},
        *_WANTS_ONE,
    ]
    return {**by_ids(task_ids), NEXT: {"$exists": True}, "$expr": {"$and": conditions}}


def claim(worker_id: str, run_id: x.Expression, now: x.Expression = x.NOW) -> Pipeline:
    """Claim a task that matches `unbegun`, with the same change as `claim.claim`."""
    lease = x.add_ms(now, f"{x.OPTION}.worker_timeout_ms")
    is_far = {"$gt": [lease, x.add_ms(now, NEAR_MS)]}
    changed = {
        RUNS: [new_run(run_id, x.literal(worker_id), 1, now)],
        "task_state.status": TaskStatus.RUNNING.value,
        NEXT: lease,
        "task_state.finish_time": "$$REMOVE",
        "task_state.reason": "$$REMOVE",
        "expire_time": "$$REMOVE",
        "quiet_time": {"$cond": [is_far, now, "$quiet_time"]},
    }
    return [{"$set": changed}]


def held_alone(outcomes: Sequence[Outcome], now: x.Expression = x.NOW, *, has_steps: bool = False) -> Filter:
    """Match these tasks if they are simple and their only run is the run of the outcome, with a live lease.

    `has_steps` says that steps of flows match, too.
    """
    task_ids, run_ids = [outcome.task_id for outcome in outcomes], [outcome.run_id for outcome in outcomes]
    # A matching task has just one run, so the conditions need not search the array.
    conditions = [
        {"$eq": [{"$size": x.RUNS}, 1]},
        {"$eq": [f"{x.RUNS}.run_id", [_of_task(outcomes, run_ids)]]},
        {"$eq": [f"{x.RUNS}.status", [RunStatus.RUNNING.value]]},
        {"$gt": [{"$arrayElemAt": [f"{x.RUNS}.ping_expire_time", 0]}, now]},
        {"$eq": [f"{x.RUNS}.past", []]},  # the run is of this round
        {"$eq": [x.STATUS, TaskStatus.RUNNING.value]},
        *([{"$or": [{"$and": _OF_NO_FLOW}, {"$and": _OF_FLOW}]}] if has_steps else _OF_NO_FLOW),
        _TELLS_NONE,
        *_WANTS_ONE,
    ]
    return {**fence_of(task_ids, run_ids), "$expr": {"$and": conditions}}


def succeed(outcomes: Sequence[Outcome], now: x.Expression = x.NOW, *, has_steps: bool = False) -> Pipeline:
    """Close the only run of each task that matches `held_alone`, as a SUCCESS. `outcomes` has one success per task.

    This makes the same change as `claim.finish`. The end of a step is marked if it concerns other steps. The
    retention of a step begins later, at the end of its flow.
    """
    retain = f"{x.OPTION}.retain_success_ms"
    is_kept_for_ever = {"$eq": [{"$ifNull": [retain, None]}, None]}
    # Where all fields are equal, the server need not look up those of each task.
    distinct = outcomes if any(outcome.returns is not None for outcome in outcomes) else outcomes[:1]
    merged = _of_task(outcomes, [outcome.fields() for outcome in distinct])
    closed = {"$mergeObjects": ["$$run", merged, {"success_time": now}, *reported_progress(outcomes, now)]}
    changed = {
        RUNS: [{"$let": {"vars": {"run": {"$arrayElemAt": [x.RUNS, 0]}}, "in": closed}}],
        "task_state.status": TaskStatus.SUCCESS.value,
        "task_state.cancel_requested": False,
        "task_state.finish_time": x.finish_time(now),
        NEXT: "$$REMOVE",
        "expire_time": {"$cond": [is_kept_for_ever, "$$REMOVE", x.add_ms(x.finish_time(now), retain)]},
        "quiet_time": now,
    }
    if has_steps:
        changed["expire_time"] = {"$cond": [x.FLOW, "$$REMOVE", changed["expire_time"]]}
        must_tell = {"$and": [x.FLOW, x.must_tell(x.literal(TaskStatus.SUCCESS.value))]}
        changed["owed_since"] = {"$cond": [must_tell, x.later_than(x.OWED_SINCE, now), x.OWED_SINCE]}
    return [{"$set": changed}]


def _of_task(outcomes: Sequence[Outcome], values: list[Any]) -> x.Expression:
    """Return the value that belongs to the task. `values` holds one value for each outcome, in the same order."""
    if len(values) == 1:
        return x.literal(values[0])
    index = x.index_of_id([outcome.task_id for outcome in outcomes])
    return {"$arrayElemAt": [x.literal(values), index]}
