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
from mtask.kernel.statements.derive import Pipeline, Stage, close_lapsed, derive, derive_routinely, trimmed
from mtask.kernel.statements.finish import progress_of
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
