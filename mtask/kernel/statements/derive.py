"""Computes the derived fields of a task, in the first and the last stages of every update.

All general updates compute status, failed_cnt, next_preempt_time, finish_time, expire_time and owed_since here, so they
compute them alike. The short statements write these fields themselves, for simple tasks. A property test compares the
two.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import cache
from typing import Any

from mtask.kernel.document.rules import HORIZON, KEPT_RUNS
from mtask.kernel.document.status import RunStatus
from mtask.kernel.driver.bson import as_sent
from mtask.kernel.statements import expressions as x
from mtask.kernel.statements import outbox, rules
from mtask.kernel.statements.rounds import open_next

Stage = Mapping[str, Any]
Pipeline = list[Stage]

#: A temporary field. It carries values to the last stage of a pipeline. The last stage removes the field.
_DERIVED = "_derived"
#: A next_preempt_time is near if it lies at most NEAR_MS in the future. NEAR_MS is twice the horizon of workers,
#: because an update that had to wait still has the `$$NOW` of its start.
NEAR_MS = 2 * int(HORIZON / timedelta(milliseconds=1))
EXPIRED_REASON = "expired before it started"
LAPSED_REASON = "the lease lapsed: the worker died, froze or lost the database"


@cache
def _encoded_once(make: Callable[[x.Expression], Sequence[Stage]]) -> tuple[Stage, ...]:
    return tuple(as_sent(stage) for stage in make(x.NOW))


def close_lapsed(now: x.Expression = x.NOW) -> Pipeline:
    """Mark lapsed runs TIMEOUT and count them as failures."""
    return [*_encoded_once(_close_lapsed)] if now == x.NOW else _close_lapsed(now)


def _close_lapsed(now: x.Expression) -> Pipeline:
    closed = {
        "$mergeObjects": [
            "$$run",
            {"status": RunStatus.TIMEOUT.value, "fail_time": now, "fail_reason": LAPSED_REASON},
        ]
    }
    runs = {"$map": {"input": x.RUNS, "as": "run", "in": {"$cond": [rules.is_run_lapsed(now), closed, "$$run"]}}}
    return [{"$set": {"task_state.worker_states": runs, "task_state.failed_cnt": rules.failures(now)}}]


def derive(now: x.Expression = x.NOW) -> Pipeline:
    """Compute the derived fields from the rest of the document. Begin the next round if no run is left."""
    return [*(_encoded_once(_derive) if now == x.NOW else _derive(now)), *open_next(now)]


def derive_routinely(now: x.Expression = x.NOW) -> Pipeline:
    """Compute the derived fields after a claim, ping or finish.

    A change that does not concern other workers is marked with quiet_time, so that their streams skip it.
    """
    return [*_encoded_once(_derive_quietly)] if now == x.NOW else _derive_quietly(now)


def _derive_quietly(now: x.Expression) -> Pipeline:
    # An unneeded event costs a worker little. Without a needed event, the worker misses a task. So the change is only
    # marked if it certainly concerns no other worker.
    moment = f"${_DERIVED}.next"
    has_moved = {"$ne": [moment, {"$ifNull": [f"{x.STATE}.next_preempt_time", None]}]}
    is_near = {"$and": [{"$gt": [moment, None]}, {"$lte": [moment, x.add_ms(now, NEAR_MS)]}]}
    has_new_status = {"$ne": [f"${_DERIVED}.status", x.STATUS]}
    is_quiet = {"$cond": [has_moved, {"$not": [is_near]}, has_new_status]}
    return _derive(now, {"quiet_time": {"$cond": [is_quiet, now, "$quiet_time"]}})


def _derive(now: x.Expression, also: Mapping[str, x.Expression] | None = None) -> Pipeline:
    # The first stage computes values that the second stage needs. The field `_derived` carries these values.
    derived = f"${_DERIVED}"
    final = x.is_final(f"{derived}.status")
    retain = outbox.retain_ms(f"{derived}.status")
    is_kept_for_ever = {"$or": [{"$not": [final]}, {"$eq": [{"$ifNull": [retain, None]}, None]}]}
    # Before the update, a task has a finish_time exactly if it was final. Some updates change the stored status first.
    was_final = {"$gt": [f"{x.STATE}.finish_time", None]}
    # The retention of a step begins at the end of its flow. Until then, the step stays.
    kept_with_flow = {"$cond": [{"$and": [final, was_final]}, "$expire_time", "$$REMOVE"]}
    has_news = {"$and": [x.FLOW, {"$ne": [final, was_final]}, x.must_tell(f"{derived}.status")]}
    # A task that was not canceled, and that ends as CANCELED, has expired.
    has_expired = {"$and": [{"$eq": [f"{derived}.status", "CANCELED"]}, {"$not": [was_final]}, rules.is_expired(now)]}
    has_expired["$and"].append({"$not": [f"{x.STATE}.cancel_requested"]})
    expired = {"$cond": [has_expired, EXPIRED_REASON, "$$REMOVE"]}
    return [
        {"$set": {_DERIVED: rules.derived(now)}},
        {"$set": {f"{_DERIVED}.tells": outbox.tells(f"{derived}.status", was_final)}},
        {
            "$set": {
                "task_state.status": f"{derived}.status",
                "task_state.cancel_requested": {"$and": [x.STATE + ".cancel_requested", {"$not": [final]}]},
                "task_state.finish_time": {"$cond": [final, x.finish_time(now), "$$REMOVE"]},
                "task_state.next_preempt_time": {"$ifNull": [f"{derived}.next", "$$REMOVE"]},
                "task_state.reason": {"$cond": [final, {"$ifNull": [f"{x.STATE}.reason", expired]}, "$$REMOVE"]},
                "expire_time": {
                    "$switch": {
                        "branches": [
                            {"case": x.FLOW, "then": kept_with_flow},
                            # A task that is still to publish its next task, or to tell its end, stays.
                            {"case": {"$or": [x.OWED_SINCE, outbox.OWED_ENDS, f"{derived}.tells"]}, "then": "$$REMOVE"},
                            {"case": is_kept_for_ever, "then": "$$REMOVE"},
                        ],
                        "default": x.add_ms(x.finish_time(now), retain),
                    }
                },
                "owed_since": {"$cond": [has_news, x.later_than(x.OWED_SINCE, now), x.OWED_SINCE]},
                **outbox.owe_end(f"{derived}.tells", f"{derived}.status", now),
                _DERIVED: "$$REMOVE",
                **(also or {}),
            }
        },
    ]


def trimmed(runs: x.Expression = x.RUNS) -> x.Expression:
    """Drop the oldest closed runs if there are more runs than the document keeps. Successes of this round stay."""
    current_failed = {"$and": [{"$in": ["$$run.status", ["FAIL", "TIMEOUT"]]}, {"$ne": ["$$run.past", True]}]}
    current_canceled = {"$and": [{"$eq": ["$$run.status", "CANCELED"]}, {"$ne": ["$$run.past", True]}]}
    past = {"$eq": ["$$run.past", True]}
    groups = [(current_failed, rules.kept_runs()), (current_canceled, KEPT_RUNS), (past, KEPT_RUNS)]

    def surplus(condition: x.Expression, keep: x.Expression) -> x.Expression:
        ids = {"$map": {"input": x.runs_where(condition, runs), "as": "run", "in": "$$run.run_id"}}
        count = {"$max": [0, {"$subtract": [{"$size": "$$ids"}, keep]}]}
        return {"$let": {"vars": {"ids": ids}, "in": {"$slice": ["$$ids", count]}}}

    dropped = {"$concatArrays": [surplus(condition, keep) for condition, keep in groups]}
    kept = {
        "$let": {
            "vars": {"dropped": dropped},
            "in": x.runs_where({"$not": [{"$in": ["$$run.run_id", "$$dropped"]}]}, runs),
        }
    }
    return {"$cond": [{"$gt": [{"$size": runs}, KEPT_RUNS]}, kept, runs]}
