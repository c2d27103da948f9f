"""The vocabulary of expressions: paths, literals and the small pieces of which rules, filters and updates are made.

Each expression is evaluated on a task document. Variables in `$let` and `$map` begin with a lower-case letter.
"""

from __future__ import annotations

from typing import Any

from mtask.model.buckets import BUCKET_CNT
from mtask.model.status import FINAL_STATUSES, RunStatus

Expression = Any

NOW = "$$NOW"
OPTION = "$task_option"
STATE = "$task_state"
RUNS = f"{STATE}.worker_states"
STATUS = f"{STATE}.status"

_FINAL = [status.value for status in sorted(FINAL_STATUSES)]


def literal(value: Any) -> Expression:
    """Return the value as it is: nothing in it is read as an expression."""
    return {"$literal": value}


def add_ms(instant: Expression, milliseconds: Expression) -> Expression:
    """Return the instant that many milliseconds later."""
    return {"$add": [instant, milliseconds]}


def bucket(task_id: Expression = "$_id") -> Expression:
    """Twin of buckets.bucket_of."""
    low = {"$mod": [{"$toHashedIndexKey": task_id}, BUCKET_CNT]}  # below zero for every other task
    return {"$mod": [{"$add": [low, BUCKET_CNT]}, BUCKET_CNT]}


def runs_where(condition: Expression, runs: Expression = RUNS) -> Expression:
    """Return the runs for which the condition on `$$run` holds."""
    return {"$filter": {"input": runs, "as": "run", "cond": condition}}


def current(*conditions: Expression) -> Expression:
    """Whether `$$run` is of this round and the conditions hold."""
    return {"$and": [*conditions, {"$ne": ["$$run.past", True]}]}


def has_status(status: RunStatus) -> Expression:
    """Whether `$$run` has this status."""
    return {"$eq": ["$$run.status", status.value]}


def by_worker(worker_id: Expression) -> Expression:
    """Whether `$$run` is this worker's."""
    return {"$eq": ["$$run.worker_id", worker_id]}


def exists(runs: Expression) -> Expression:
    """Whether there are any."""
    return {"$gt": [{"$size": runs}, 0]}


def is_final(status: Expression = STATUS) -> Expression:
    """Whether the status is final, by default the stored one."""
    return {"$in": [status, _FINAL]}
