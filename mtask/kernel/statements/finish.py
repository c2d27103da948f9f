"""Outcomes: how a run ends, and the pipeline that writes its end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal

from mtask.kernel.document.status import RunStatus
from mtask.kernel.statements import expressions as x
from mtask.kernel.statements import outbox, rules
from mtask.kernel.statements.derive import Pipeline, close_lapsed, derive_routinely
from mtask.kernel.statements.filters import OWES_VALUE, RUNS, Filter, by_ids
from mtask.kernel.statements.outbox import OwedTask
from mtask.kernel.statements.rounds import open_next


# It is made for each run, and never changed. A frozen dataclass takes three times as long to make.
@dataclass(slots=True)
class Outcome:
    """The end of a run as the worker reports it. The server adds the times and derives the task's other fields."""

    task_id: str
    run_id: str
    status: Literal[RunStatus.SUCCESS, RunStatus.FAIL, RunStatus.CANCELED]
    returns: Any = None
    reason: str | None = None
    final: bool = False
    #: Whether the run met a conflict with another transaction.
    conflict: bool = False
    #: Whether the params do not fit this version of the handler. It is not stored: another worker may have another one.
    is_misfit: bool = False
    #: The time since which they fit none, if the run is handed on.
    misfit_since: datetime | None = None
    #: The delay before the next attempt, in ms. If it is None, a FAIL gets the delay from the task's options, and any
    #: other outcome gets no delay.
    delay_ms: int | None = None
    jitter: float = 0.0
    #: The progress that the handler reported last, if it is not written yet.
    progress: Mapping[str, Any] | None = None
    #: The task as which this one goes on, if this run makes it SUCCESS.
    next: OwedTask | None = None
    #: The incarnation of this worker, if the outcome is committed by a transaction and the value is still to follow.
    returns_owed_by: str | None = None
    #: The span of the run. It is stored where another run may follow, which links to it.
    traceparent: str | None = None
    #: Not stored. Which tasks are to wait for `delay_ms`, too: those of the run's "name", "queue" or "limit_key".
    holds: str | None = None
    #: Not stored. Whether the handler itself says that its task fails, for a reason that lies in the task.
    is_verdict: bool = False
    #: What the handler raised: the path of the class as `type`, and the `traceback`.
    error: Mapping[str, Any] | None = None

    def fields(self) -> dict[str, Any]:
        """Return the fields that are merged into the run."""
        if self.status is RunStatus.SUCCESS:
            owed = {} if self.returns_owed_by is None else {"returns_owed_by": self.returns_owed_by}
            return {"status": self.status.value, "returns": self.returns, **owed}
        merged: dict[str, Any] = {"status": self.status.value, "fail_reason": self.reason}
        if self.final:
            merged["final"] = True
        if self.traceparent is not None:
            merged["traceparent"] = self.traceparent
        if self.conflict:
            merged["conflict"] = True
        if self.misfit_since is not None:
            merged["misfit_since"] = self.misfit_since
        if self.error is not None:
            merged["error"] = self.error
        return merged


def finish(outcomes: Sequence[Outcome], now: x.Expression = x.NOW) -> Pipeline:
    """Close the runs that the outcomes name.

    One pipeline closes the runs of several tasks. The server finds the place of each task by its `_id`, and takes its
    outcome from a literal array at this place. There must be one outcome per task. Either all outcomes are successes,
    or none is.
    """
    ids = [outcome.task_id for outcome in outcomes]
    index = x.index_of_id(ids)
    (are_successes,) = {outcome.status is RunStatus.SUCCESS for outcome in outcomes}

    def mine(values: list[Any]) -> x.Expression:
        return {"$arrayElemAt": [x.literal(values), "$$index"]}

    closes = {"$and": [{"$eq": ["$$run.run_id", "$$runId"]}, {"$eq": ["$$run.status", RunStatus.RUNNING.value]}]}
    if are_successes:
        times: dict[str, Any] = {"success_time": now}
    else:
        delay = {"$ifNull": [mine([o.delay_ms for o in outcomes]), failure_delay(outcomes, mine, now)]}
        times = {"fail_time": now, "retry_time": {"$ifNull": [x.add_ms(now, delay), "$$REMOVE"]}}
    closed = {
        "$mergeObjects": ["$$run", mine([o.fields() for o in outcomes]), times, *reported_progress(outcomes, now)]
    }
    other: x.Expression = "$$run"
    if any(outcome.error is not None for outcome in outcomes):  # only the newest failed run keeps what was raised
        has_error = mine([outcome.error is not None for outcome in outcomes])
        other = {"$cond": [has_error, x.without("$$run", "error"), "$$run"]}
    runs = {"$map": {"input": x.RUNS, "as": "run", "in": {"$cond": [closes, closed, other]}}}
    change: dict[str, Any] = {
        "task_state.worker_states": {
            "$let": {
                "vars": {"index": index},
                "in": {"$let": {"vars": {"runId": mine([o.run_id for o in outcomes])}, "in": runs}},
            }
        }
    }
    if any(outcome.status is RunStatus.FAIL for outcome in outcomes):
        counted = [int(outcome.status is RunStatus.FAIL) for outcome in outcomes]
        one = {"$let": {"vars": {"index": index}, "in": mine(counted)}}
        change["task_state.failed_cnt"] = {"$add": [f"{x.STATE}.failed_cnt", one]}
    if any(outcome.returns_owed_by for outcome in outcomes):
        change["owed_since"] = x.later_than(x.OWED_SINCE, now)
    nexts = [outcome.next for outcome in outcomes]
    goes_on: Pipeline = []
    if any(nexts):
        change |= outbox.before_derived()
        goes_on = outbox.go_on(ids, nexts, now)
    return [*close_lapsed(now), {"$set": change}, *derive_routinely(now), *goes_on, *open_next(now)]


def failure_delay(outcomes: Sequence[Outcome], mine: Any, now: x.Expression) -> x.Expression:
    """Return the delay that the task's options set between a FAIL and the next try.

    For an outcome other than FAIL, such as a hand-back, the delay is null.
    """
    # The worker_id of the ending run needs a variable of its own, because `worker_failures` uses `$$run` for other
    # runs.
    own = {"$let": {"vars": {"workerId": "$$run.worker_id"}, "in": rules.worker_failures("$$workerId", now)}}
    by_scope = {"$cond": [{"$eq": [f"{x.OPTION}.retry_scope", "worker"]}, own, f"{x.STATE}.failed_cnt"]}
    delay = rules.retry_delay_ms({"$add": [by_scope, 1]}, mine([outcome.jitter for outcome in outcomes]))
    is_fail = mine([outcome.status is RunStatus.FAIL for outcome in outcomes])
    return {"$cond": [is_fail, delay, None]}


def reported_progress(outcomes: Sequence[Outcome], now: x.Expression) -> list[x.Expression]:
    """Return a list with one expression, the progress to merge into `$$run`.

    The list is empty if no progress was reported.
    """
    reported = {outcome.run_id: outcome.progress for outcome in outcomes if outcome.progress is not None}
    return [progress_of(reported, now)] if reported else []


def progress_of(progress: Mapping[str, Mapping[str, Any]], now: x.Expression) -> x.Expression:
    """Return the progress to merge into `$$run`.

    It is {} if no progress was reported for this run, or if the reported progress is already stored.
    """
    index = {"$indexOfArray": [x.literal(list(progress)), "$$run.run_id"]}
    reported = {"$arrayElemAt": [x.literal([dict(value) for value in progress.values()]), "$$index"]}
    # If the reported progress equals the stored one, the stored time stays. A worker sends the same progress again if
    # the first reply was lost.
    there, fresh = ({"$mergeObjects": [value, {"time": now}]} for value in ("$$run.progress", reported))
    is_known = {"$or": [{"$lt": ["$$index", 0]}, {"$eq": [there, fresh]}]}
    return {"$let": {"vars": {"index": index}, "in": {"$cond": [is_known, {}, {"progress": fresh}]}}}


# --- returning -------------------------------------------------------------------------------------------

# Values that handlers return after their transactions have committed: the mark that a run still owes one.
#
# The commit of a handler's transaction writes the SUCCESS before the handler has returned. If its value is to follow,
# the same write sets the mark `returns_owed_by` in the run, and `owed_since` in the task. So nobody takes the missing
# value for a null: readers and dependents wait, and a janitor finds the mark if the worker dies. Whoever stores the
# value, or says that it is lost, removes the mark.


def returned(task_id: str, run_id: str) -> Filter:
    """Match the task if this run has succeeded, and nobody has said that its value is lost."""
    run = {"run_id": run_id, "status": RunStatus.SUCCESS.value, "returns_lost": None}
    return {"_id": task_id, RUNS: {"$elemMatch": run}}


def owing_return(task_id: str, run_id: str) -> Filter:
    """Match the task if this run still owes its value."""
    return {"_id": task_id, RUNS: {"$elemMatch": {"run_id": run_id, "returns_owed_by": {"$exists": True}}}}


def owed_returns(task_ids: Sequence[str], incarnations: Sequence[str]) -> Filter:
    """Match these tasks if handlers in these workers owe values of them."""
    return {**by_ids(task_ids), OWES_VALUE: {"$in": list(incarnations)}}


def store_return(run_id: str, returns: Any) -> Pipeline:
    """Store the value that the handler of a run has returned."""
    return _settle({"$eq": ["$$run.run_id", x.literal(run_id)]}, {"returns": x.literal(returns)})


def lose_return(run_id: str, reason: str) -> Pipeline:
    """Say why the value of a run is not stored."""
    return _settle({"$eq": ["$$run.run_id", x.literal(run_id)]}, {"returns_lost": x.literal(reason)})


def lose_returns(incarnations: Sequence[str], reason: str) -> Pipeline:
    """Say why the values are not stored that handlers in these workers owed."""
    is_one = {"$in": ["$$run.returns_owed_by", x.literal(list(incarnations))]}
    return _settle(is_one, {"returns_lost": x.literal(reason)})


def _settle(condition: x.Expression, fields: Mapping[str, x.Expression], now: x.Expression = x.NOW) -> Pipeline:
    """Merge the fields into the runs for which the condition holds, and remove their marks.

    A task of no flow that then owes nothing more is done: its retention begins. The others of a flow are told next.
    """
    settled = {"$mergeObjects": [x.without("$$run", "returns_owed_by"), fields]}
    runs = {"$map": {"input": x.RUNS, "as": "run", "in": {"$cond": [condition, settled, "$$run"]}}}
    stays = {"$or": [x.FLOW, "$owed_tasks", {"$ne": [x.OWED_VALUES, []]}]}
    return [
        {"$set": {"task_state.worker_states": runs}},
        {"$set": {"expire_time": {"$cond": [stays, "$expire_time", outbox.retention_alone(now)]}}},
        {"$set": {"owed_since": {"$cond": [stays, x.OWED_SINCE, "$$REMOVE"]}, "quiet_time": now}},
    ]
