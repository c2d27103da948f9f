"""The vocabulary of expressions: paths, literals and small pieces for rules, filters and updates.

The server evaluates each expression on a task document. Variables in `$let` and `$map` begin with a lower-case letter.
"""

from __future__ import annotations

from typing import Any

from mtask.model.buckets import BUCKET_CNT
from mtask.model.status import FINAL, RunStatus, TaskStatus

Expression = Any

NOW = "$$NOW"
OPTION = "$task_option"
STATE = "$task_state"
RUNS = f"{STATE}.worker_states"
STATUS = f"{STATE}.status"
#: The task's part in its flow. As a condition, it is false for a task of no flow.
FLOW = "$flow"
OWED_SINCE = "$owed_since"
#: The next round of a task that gathers. As a condition, it is false for a task without one.
AGAIN = "$again"


def literal(value: Any) -> Expression:
    """Return the value as a literal: the server reads no part of it as an expression."""
    return {"$literal": value}


def add_ms(instant: Expression, milliseconds: Expression) -> Expression:
    """Return the instant plus a number of milliseconds."""
    return {"$add": [instant, milliseconds]}


def bucket(task_id: Expression = "$_id") -> Expression:
    """Return the bucket of a task. This is the server's form of `buckets.bucket_of`."""
    low = {"$mod": [{"$toHashedIndexKey": task_id}, BUCKET_CNT]}  # this is negative for half of the tasks
    return {"$mod": [{"$add": [low, BUCKET_CNT]}, BUCKET_CNT]}


def is_in_buckets(buckets: str, task_id: Expression = "$_id") -> Expression:
    """Whether a task's bucket is one of these: `buckets` has the character "1" for each of them, and "0" for others."""
    return {"$eq": [{"$substrBytes": [buckets, bucket(task_id), 1]}, "1"]}


def runs_where(condition: Expression, runs: Expression = RUNS) -> Expression:
    """Return the runs for which the condition on `$$run` holds."""
    return {"$filter": {"input": runs, "as": "run", "cond": condition}}


def current(*conditions: Expression) -> Expression:
    """Whether `$$run` belongs to this round and the conditions hold."""
    return {"$and": [*conditions, {"$ne": ["$$run.past", True]}]}


def has_status(status: RunStatus) -> Expression:
    """Whether `$$run` has this status."""
    return {"$eq": ["$$run.status", status.value]}


def by_worker(worker_id: Expression) -> Expression:
    """Whether `$$run` belongs to this worker."""
    return {"$eq": ["$$run.worker_id", worker_id]}


def exists(runs: Expression) -> Expression:
    """Whether the array of runs is not empty."""
    return {"$gt": [{"$size": runs}, 0]}


def is_waiting() -> Expression:
    """Whether the task waits for other tasks of its flow. This is the server's form of `rules.is_waiting`."""
    return {"$and": [FLOW, {"$not": [f"{FLOW}.release_time"]}]}


def must_tell(status: Expression = STATUS) -> Expression:
    """Whether a step's end with this status is to be marked. This is the server's form of `flows.must_tell`."""
    concerns_none = [{"$eq": [status, TaskStatus.SUCCESS.value]}, {"$eq": [f"{FLOW}.unwatched", True]}]
    return {"$not": [{"$and": [*concerns_none, {"$not": [OWED_SINCE]}, {"$not": ["$owed_tasks"]}]}]}


def later_than(mark: Expression, now: Expression) -> Expression:
    """Return the present time, or a later time if the mark is not before the present. So no two marks are equal."""
    return {"$max": [now, {"$add": [mark, 1]}]}


def is_final(status: Expression = STATUS) -> Expression:
    """Whether this status is final. The default is the task's stored status."""
    return {"$in": [status, FINAL]}


def without(document: str, *names: str) -> Expression:
    """Return a document without these fields. `$unsetField` would do it, but lies outside of the Stable API."""
    kept = {"$filter": {"input": {"$objectToArray": document}, "cond": {"$not": [{"$in": ["$$this.k", list(names)]}]}}}
    return {"$arrayToObject": kept}
