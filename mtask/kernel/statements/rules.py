"""The rules of `mtask.kernel.document.rules` and `mtask.kernel.document.rules` as server expressions, under the same
names.

The server evaluates each expression on a task document. `now` is an expression, too. In the engine, it is `$$NOW`. In
the property test that compares the server's rules with Python's, it is a fixed date.

The server parses an expression with each update and evaluates it for each document. So both the size of an expression
and its evaluation cost time. `_bound` computes two values once for all expressions inside it: the workers that
succeeded (S, `$$succeeded`) and the live runs (R, `$$live`). Conditions that are cheap and often decide the result come
first.
"""

from __future__ import annotations

from mtask.kernel.document.options import MAX_COUNTED_RUNS, MAX_DURATION_MS
from mtask.kernel.document.rules import JITTER, KEPT_RUNS
from mtask.kernel.document.status import RunStatus, TaskStatus
from mtask.kernel.statements.expressions import (
    FLOW,
    OPTION,
    RUNS,
    STATE,
    STATUS,
    Expression,
    by_worker,
    current,
    exists,
    has_status,
    is_final,
    is_waiting,
    literal,
    runs_where,
)

_COUNTED = [RunStatus.FAIL.value, RunStatus.TIMEOUT.value]


def is_run_live(now: Expression) -> Expression:
    """Whether `$$run` is live. This is the server's form of `Run.is_live`."""
    return {"$and": [has_status(RunStatus.RUNNING), {"$gt": ["$$run.ping_expire_time", now]}]}


def is_run_lapsed(now: Expression) -> Expression:
    """Whether the lease of `$$run` has lapsed. This is the server's form of `Run.is_lapsed`."""
    return {"$and": [has_status(RunStatus.RUNNING), {"$lte": ["$$run.ping_expire_time", now]}]}


def succeeded_workers(runs: Expression = RUNS) -> Expression:
    """Return S, the workers with a SUCCESS of this round, as a set of worker_ids."""
    succeeded = runs_where(current(has_status(RunStatus.SUCCESS)), runs)
    return {"$setUnion": [{"$map": {"input": succeeded, "as": "run", "in": "$$run.worker_id"}}]}


def live_runs(now: Expression) -> Expression:
    """Return R, the live runs of this round, as an array."""
    return runs_where(current(is_run_live(now)))


def _bound(now: Expression, body: Expression) -> Expression:
    """Return `body` with S bound to `$$succeeded` and R to `$$live`."""
    return {"$let": {"vars": {"succeeded": succeeded_workers(), "live": live_runs(now)}, "in": body}}


def failures(now: Expression) -> Expression:
    """Return F, the number of failures. Lapsed runs that are not closed yet are counted, too."""
    return {"$add": [f"{STATE}.failed_cnt", {"$size": runs_where(current(is_run_lapsed(now)))}]}


def worker_failures(worker_id: Expression, now: Expression) -> Expression:
    """Return the number of one worker's failed and timed-out runs of this round."""
    counted = {"$or": [{"$in": ["$$run.status", _COUNTED]}, is_run_lapsed(now)]}
    return {"$size": runs_where(current(by_worker(worker_id), counted))}


def _has_limit() -> Expression:
    return {"$gte": [f"{OPTION}.max_unexpected_retries", 0]}


def _is_worker_scope() -> Expression:
    return {"$eq": [f"{OPTION}.retry_scope", "worker"]}


def _is_final_failure() -> Expression:
    return {"$eq": ["$$run.final", True]}


def _names_workers() -> Expression:
    return {"$gt": [{"$size": f"{OPTION}.specific_worker_ids"}, 0]}


def is_worker_exhausted(worker_id: Expression, now: Expression) -> Expression:
    """Whether this worker has used up its own limit of retries or had a final failure."""
    over = {"$gt": [worker_failures(worker_id, now), f"{OPTION}.max_unexpected_retries"]}
    failed_finally = exists(runs_where(current(_is_final_failure(), by_worker(worker_id))))
    return {"$or": [failed_finally, {"$and": [_has_limit(), over]}]}


def is_exhausted(now: Expression) -> Expression:
    """Whether the limit of retries is used up or a run ended in a final failure."""
    return _bound(now, _is_exhausted(now))


def _is_exhausted(now: Expression) -> Expression:
    done = {"$or": [{"$in": ["$$named", "$$succeeded"]}, is_worker_exhausted("$$named", now)]}
    all_named_done = {
        "$allElementsTrue": [{"$map": {"input": f"{OPTION}.specific_worker_ids", "as": "named", "in": done}}]
    }
    over = {"$gt": [failures(now), f"{OPTION}.max_unexpected_retries"]}
    by_task = {
        "$or": [
            exists(runs_where(current(_is_final_failure()))),
            {"$and": [{"$not": [_is_worker_scope()]}, _has_limit(), over]},
        ]
    }
    return {"$cond": [{"$and": [_is_worker_scope(), _names_workers()]}, all_named_done, by_task]}


def is_expired(now: Expression) -> Expression:
    """Whether no run of the task may start any more, because its not_after has passed."""
    end = f"{STATE}.not_after"
    return {"$and": [{"$gt": [end, None]}, {"$lte": [end, now]}]}


def status(now: Expression) -> Expression:
    """Return the task's status at `now`. A final status stays."""
    return {"$let": {"vars": {"derived": derived(now)}, "in": "$$derived.status"}}


def next_preempt_time(now: Expression) -> Expression:
    """Return the earliest moment at which some worker could take or settle the task.

    It is null if the status is final or WAITING.
    """
    return {"$let": {"vars": {"derived": derived(now)}, "in": "$$derived.next"}}


def derived(now: Expression) -> Expression:
    """Return an object with `status` and `next`. `next` is the next_preempt_time, or null if the status is final."""
    has_live = exists("$$live")
    # If live runs take all seats, the result does not depend on the limit of retries. So the limit is not evaluated.
    matters = {"$or": [{"$not": [has_live]}, _has_free_seat()]}
    expired = {"$cond": [{"$gt": [failures(now), 0]}, TaskStatus.FAIL.value, TaskStatus.CANCELED.value]}
    open_status = {
        "$switch": {
            "branches": [
                {"case": has_live, "then": TaskStatus.RUNNING.value},
                {"case": f"{STATE}.cancel_requested", "then": TaskStatus.CANCELED.value},
                {"case": "$$exhausted", "then": TaskStatus.FAIL.value},
                {"case": "$$expired", "then": expired},
            ],
            "default": TaskStatus.INIT.value,
        }
    }
    is_over = [{"$not": [f"{STATE}.cancel_requested"]}, {"$not": ["$$exhausted"]}, {"$not": ["$$expired"]}]
    has_open_seat = {"$and": [_has_free_seat(), *is_over]}
    # A task that expires before it can be taken ends then. $min ignores null and missing values.
    open_times = {"$concatArrays": [free_seat_times(now), [f"{STATE}.not_after"]]}
    leases = {"$map": {"input": "$$live", "as": "run", "in": "$$run.ping_expire_time"}}
    moments = {"$concatArrays": [leases, {"$cond": [has_open_seat, open_times, []]}]}
    earliest = {"$ifNull": [{"$min": moments}, due_time()]}
    unfinished = {
        "$let": {
            "vars": {"exhausted": {"$and": [matters, _is_exhausted(now)]}, "expired": is_expired(now)},
            "in": {
                "$let": {
                    "vars": {"status": open_status},
                    "in": {"status": "$$status", "next": {"$cond": [is_final("$$status"), None, earliest]}},
                }
            },
        }
    }
    waiting = {"$cond": [f"{STATE}.cancel_requested", TaskStatus.CANCELED.value, TaskStatus.WAITING.value]}
    return _bound(
        now,
        {
            "$switch": {
                "branches": [
                    {"case": is_final(), "then": {"status": STATUS, "next": None}},
                    {"case": is_waiting(), "then": {"status": waiting, "next": None}},
                    {"case": _is_success(), "then": {"status": TaskStatus.SUCCESS.value, "next": None}},
                ],
                "default": unfinished,
            }
        },
    )


def _seats() -> Expression:
    # The number of seats (k) is at least 1. With 0 seats, a malformed task without concurrent_worker_cnt would count as
    # a SUCCESS before any run.
    return {"$max": [f"{OPTION}.concurrent_worker_cnt", 1]}


def _is_success() -> Expression:
    return {"$gte": [{"$size": "$$succeeded"}, _seats()]}


def has_free_seat(now: Expression) -> Expression:
    """Whether a seat is free: S + R < k."""
    return _bound(now, _has_free_seat())


def _has_free_seat() -> Expression:
    return {"$lt": [{"$add": [{"$size": "$$succeeded"}, {"$size": "$$live"}]}, _seats()]}


def is_admitted(worker_id: Expression) -> Expression:
    """Whether specific_worker_ids allows this worker."""
    return {"$or": [{"$not": [_names_workers()]}, {"$in": [worker_id, f"{OPTION}.specific_worker_ids"]}]}


def due_time() -> Expression:
    """Return the time at which the task is first due: its start_time, or its create_time if it has no start_time.

    A task of a flow is not due before its release.
    """
    # $max ignores null and missing values.
    return {"$max": [start_time(), f"{FLOW}.release_time"]}


def start_time() -> Expression:
    """Return the start_time, or the create_time if the task has no start_time."""
    return {"$ifNull": [f"{STATE}.start_time", f"{STATE}.create_time"]}


def retry_time(worker_id: Expression) -> Expression:
    """Return the time at which the retry delay for this worker ends, or null if there is no delay."""
    binding = runs_where(current({"$or": [{"$not": [_is_worker_scope()]}, by_worker(worker_id)]}))
    return {"$max": {"$map": {"input": binding, "as": "run", "in": "$$run.retry_time"}}}


def ready_time(worker_id: Expression) -> Expression:
    """Return the earliest time at which the task is due and the retry delay for this worker has ended."""
    # $max ignores null and missing values.
    return {"$max": [due_time(), retry_time(worker_id)]}


def is_candidate(worker_id: Expression, now: Expression) -> Expression:
    """Whether this worker may take the task as soon as it is due and has a free seat."""
    holds = {"$or": [is_run_live(now), has_status(RunStatus.SUCCESS)]}
    return {
        "$and": [
            is_admitted(worker_id),
            {"$not": [exists(runs_where(current(by_worker(worker_id), holds)))]},
            {"$not": [{"$and": [_is_worker_scope(), is_worker_exhausted(worker_id, now)]}]},
        ]
    }


def may_take(worker_id: Expression, now: Expression) -> Expression:
    """Whether this worker may take the task at `now`."""
    # A check for SUCCESS is not needed: if a seat is free, fewer than k workers have succeeded.
    return {
        "$and": [
            {"$not": [is_final()]},
            {"$not": [f"{STATE}.cancel_requested"]},
            {"$not": [is_waiting()]},
            {"$not": [is_expired(now)]},
            _bound(now, {"$and": [_has_free_seat(), {"$not": [_is_exhausted(now)]}]}),
            is_candidate(worker_id, now),
            {"$lte": [ready_time(worker_id), now]},
        ]
    }


def free_seat_times(now: Expression) -> Expression:
    """Return the times from which the candidates could take a free seat. All unnamed workers share one entry."""
    named = {
        "$map": {
            "input": {
                "$filter": {
                    "input": f"{OPTION}.specific_worker_ids",
                    "as": "named",
                    "cond": is_candidate("$$named", now),
                }
            },
            "as": "named",
            "in": ready_time("$$named"),
        }
    }
    unnamed = {"$cond": [_is_worker_scope(), due_time(), ready_time(literal(""))]}
    return {"$cond": [_names_workers(), named, [unnamed]]}


def retry_delay_ms(failure_count: Expression, jitter: Expression) -> Expression:
    """Return the delay after `failure_count` failed runs, in ms."""
    base = f"{OPTION}.unexpected_retry_delay_ms"
    limit = {"$ifNull": [f"{OPTION}.retry_max_delay_ms", MAX_DURATION_MS]}
    exponent = {"$min": [{"$max": [{"$subtract": [failure_count, 1]}, 0]}, 64]}
    grown = {"$multiply": [base, {"$pow": [{"$toDouble": f"{OPTION}.retry_backoff"}, exponent]}]}
    jittered = {"$multiply": [{"$min": [grown, limit]}, {"$subtract": [1, {"$multiply": [JITTER, jitter]}]}]}
    return {
        "$cond": [
            {"$lte": [f"{OPTION}.retry_backoff", 1]},
            {"$min": [base, limit]},
            {"$toLong": {"$trunc": [jittered]}},
        ]
    }


def is_interrupted(now: Expression) -> Expression:
    """Whether a run of this round ended without an outcome of its handler, and no run has followed it."""
    was_handed_back = {"$and": [has_status(RunStatus.CANCELED), {"$lte": ["$$run.retry_time", None]}]}
    cut_off = {"$or": [has_status(RunStatus.TIMEOUT), was_handed_back]}
    end = {"$max": {"$map": {"input": runs_where(current(cut_off)), "as": "run", "in": "$$run.fail_time"}}}
    followed = exists(runs_where(current({"$gte": ["$$run.claim_time", "$$end"]})))
    waits = {"$let": {"vars": {"end": end}, "in": {"$and": [{"$gt": ["$$end", None]}, {"$not": [followed]}]}}}
    return {"$or": [exists(runs_where(current(is_run_lapsed(now)))), waits]}


def kept_runs() -> Expression:
    """Return the number of failed and timed-out runs of this round that stay in the document."""
    per_worker = {"$add": [f"{OPTION}.max_unexpected_retries", 1]}
    named = {"$multiply": [per_worker, {"$size": f"{OPTION}.specific_worker_ids"}]}
    over_workers = {"$cond": [_names_workers(), named, MAX_COUNTED_RUNS]}
    wanted = {"$cond": [_is_worker_scope(), over_workers, per_worker]}
    bounded = {"$min": [{"$max": [KEPT_RUNS, wanted]}, MAX_COUNTED_RUNS]}
    return {"$cond": [_has_limit(), bounded, KEPT_RUNS]}
