"""Update pipelines of a worker: claim, ping, settle and quarantine.

A claim and a settlement first close lapsed runs. All pipelines except `quarantine` end with the stages that derive the
other fields.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from functools import lru_cache
from typing import Any

from mtask.kernel.document.status import RunStatus, TaskStatus
from mtask.kernel.driver.bson import as_sent
from mtask.kernel.statements import expressions as x
from mtask.kernel.statements import outbox, rules
from mtask.kernel.statements.derive import NEAR_MS, Pipeline, Stage, close_lapsed, derive, derive_routinely, trimmed
from mtask.kernel.statements.filters import NEXT, RUNS, Filter, by_ids, fence_of
from mtask.kernel.statements.finish import Outcome, progress_of, reported_progress
from mtask.kernel.statements.rounds import is_ready, open_next

_CLOSED_WITHOUT_RESULT = [RunStatus.FAIL.value, RunStatus.TIMEOUT.value, RunStatus.CANCELED.value]


def claim(worker_id: str, run_id: x.Expression, now: x.Expression = x.NOW) -> Pipeline:
    """Preempt a task: append this worker's run if the rules allow it."""
    runs = _encoded_take(worker_id) if now == x.NOW else _take(worker_id, now)
    taken = {"$let": {"vars": {"runId": run_id}, "in": runs}}
    change = {"$set": {"task_state.worker_states": taken}}
    return [*close_lapsed(now), change, *derive_routinely(now), *open_next(now)]


@lru_cache(maxsize=16)
def _encoded_take(worker_id: str) -> Stage:
    return as_sent(_take(worker_id, x.NOW))


def _take(worker_id: str, now: x.Expression) -> dict[str, Any]:
    """Return the runs, with this worker's run `$$runId` appended if the rules allow it."""
    worker = x.literal(worker_id)
    same_scope = {"$cond": [{"$eq": [f"{x.OPTION}.retry_scope", "worker"]}, {"$eq": ["$$run.worker_id", worker]}, True]}
    attempts = {"$map": {"input": x.runs_where(same_scope), "as": "run", "in": "$$run.attempt"}}
    attempt = {"$add": [{"$ifNull": [{"$max": attempts}, 0]}, 1]}
    run = new_run("$$runId", worker, attempt, now)
    # If the last run has lapsed, the claim begins the next round, and takes nothing of this one.
    may_take = {"$and": [{"$not": [is_ready(now)]}, rules.may_take(worker, now)]}
    return {"$cond": [may_take, {"$concatArrays": [trimmed(), [run]]}, x.RUNS]}


def new_run(
    run_id: x.Expression, worker_id: x.Expression, attempt: x.Expression, now: x.Expression
) -> dict[str, x.Expression]:
    """Return the run that a claim appends."""
    return {
        "run_id": run_id,
        "worker_id": worker_id,
        "attempt": attempt,
        "status": RunStatus.RUNNING.value,
        "claim_time": now,
        "ping_expire_time": x.add_ms(now, f"{x.OPTION}.worker_timeout_ms"),
    }


def run_id_in_group(token: str, task_ids: Sequence[str]) -> x.Expression:
    """Return an expression for a task's run_id. It joins the claim's random token and the index in `task_ids`."""
    if len(task_ids) == 1:
        return x.literal(f"{token}-0")
    return {"$concat": [f"{token}-", {"$toString": x.index_of_id(task_ids)}]}


def ping(
    run_ids: Sequence[str],
    lease_ms: int | Mapping[str, int],
    now: x.Expression = x.NOW,
    progress: Mapping[str, Mapping[str, Any]] | None = None,
    session_id: str | None = None,
) -> Pipeline:
    """Extend the leases of these runs to `lease_ms` from now. A lease never becomes shorter.

    `lease_ms` is one number, or a number for each run_id. `progress` is the progress of some runs, by run_id.
    `session_id` is only given for a single run: it is the session of the transaction that this run is about to begin.
    """
    lease = {"$max": ["$$run.ping_expire_time", x.add_ms(now, _lease_of(lease_ms))]}
    holds = {"$and": [{"$in": ["$$run.run_id", x.literal(list(run_ids))]}, rules.is_run_live(now)]}
    changes: list[x.Expression] = ["$$run", {"ping_expire_time": lease}]
    if progress:
        changes.append(progress_of(progress, now))
    if session_id is not None:
        changes.append({"session_id": x.literal(session_id)})
    moved = {"$mergeObjects": changes}
    runs = {"$map": {"input": x.RUNS, "as": "run", "in": {"$cond": [holds, moved, "$$run"]}}}
    # If failed_cnt is no number, adding 0 makes the ping fail. So the worker notices that the task is malformed.
    counted = {"$add": [f"{x.STATE}.failed_cnt", 0]}
    return [{"$set": {"task_state.worker_states": runs, "task_state.failed_cnt": counted}}, *derive_routinely(now)]


def _lease_of(lease_ms: int | Mapping[str, int]) -> x.Expression:
    """Return the length of the lease of `$$run`, in ms. If all leases have the same length, it is a plain number."""
    if isinstance(lease_ms, int):
        return lease_ms
    lengths = set(lease_ms.values())
    if len(lengths) == 1:
        return lengths.pop()
    index = {"$indexOfArray": [x.literal(list(lease_ms)), "$$run.run_id"]}
    return {"$arrayElemAt": [x.literal(list(lease_ms.values())), index]}


def settle(now: x.Expression = x.NOW) -> Pipeline:
    """Close lapsed runs and derive the other fields. No worker takes the task."""
    return [*close_lapsed(now), *derive(now)]


class Kept(Enum):
    """The part of a document that stays when it is marked FAIL. A document with little room left keeps less."""

    ALL = "all"
    RESULTS = "results"  #: closed runs without a SUCCESS are dropped, to make room for the reason
    BARE = "bare"  #: the runs stay as they are, and no run with a reason is added


def quarantine(task_id: str, worker_id: str, reason: str, now: x.Expression = x.NOW, kept: Kept = Kept.ALL) -> Pipeline:
    """Mark a malformed document FAIL, and record a reason.

    All readable fields stay. But `Kept.RESULTS` drops closed runs without a SUCCESS, and `Kept.BARE` records no reason.
    """
    run = {
        "run_id": x.literal(f"malformed-{task_id}" if kept is Kept.ALL else "malformed"),
        "worker_id": x.literal(worker_id),
        "attempt": 1,
        "status": RunStatus.FAIL.value,
        "claim_time": now,
        "ping_expire_time": now,
        "fail_time": now,
        "fail_reason": x.literal(reason),
        "final": True,
    }
    former = x.RUNS if kept is Kept.ALL else x.runs_where({"$not": [{"$in": ["$$run.status", _CLOSED_WITHOUT_RESULT]}]})
    runs = {"$cond": [{"$isArray": [x.RUNS]}, {"$concatArrays": [former, [run]]}, [run]]}
    is_object = {"$eq": [{"$type": x.STATE}, "object"]}
    changes: dict[str, Any] = {"status": TaskStatus.FAIL.value, "finish_time": now}
    if kept is not Kept.BARE:
        changes |= {"cancel_requested": False, "failed_cnt": 1, "worker_states": runs}
    state = {
        "$unsetField": {
            "field": "next_preempt_time",
            "input": {"$mergeObjects": [{"$cond": [is_object, x.STATE, {}]}, changes]},
        }
    }
    # The end of a step concerns other tasks of its flow.
    owed_since = {"$cond": [x.FLOW, x.later_than(x.OWED_SINCE, now), x.OWED_SINCE]}
    # No other task has caused this end, so no retry of another task opens it again.
    is_step = {"$eq": [{"$type": x.FLOW}, "object"]}
    unheld = {"$cond": [is_step, x.without(x.FLOW, "held_by"), x.FLOW]}
    # A malformed receiver can be told nothing. The status changes here, so it is told even if another was final before.
    is_readable = {"$eq": [{"$type": f"{outbox.CALLBACK}.url"}, "string"]}
    is_told = {"$and": [is_readable, outbox.tells(TaskStatus.FAIL.value, False)]}
    told = outbox.owe_end(is_told, TaskStatus.FAIL.value, now)
    return [{"$set": {"task_state": state, "owed_since": owed_since, "flow": unheld, **told}}]


# --- short -----------------------------------------------------------------------------------------------

# Short statements for simple tasks.
#
# A simple task needs one worker, admits any worker, and has no earlier run in this round and no next round. A step of a
# flow is simple only after its release.
#
# The general statements contain every rule. A general claim has 17 KB. If it is sent for a single task, most of its
# cost is the server's parsing. A simple task needs few of the rules, so a short statement has a tenth of the size.
#
# The guards of a short statement check everything that it assumes. A task that is not simple, or is no longer simple,
# does not match the guards. Such a task needs a general statement.

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
        {"$not": [rules.is_expired(now)]},
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


def claim_unbegun(worker_id: str, run_id: x.Expression, now: x.Expression = x.NOW) -> Pipeline:
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
