"""Rounds: how the next round of a task begins. The calls of the next round came while a run held the task.

`open_next` ends every general update. It begins the next round of a task in the same update that ended the last run. A
task without a next round does not change.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from mtask.kernel.document.status import TaskStatus
from mtask.kernel.document.task import MAX_CALLS, MAX_FORMER_QUEUES
from mtask.kernel.driver.bson import as_sent
from mtask.kernel.statements import expressions as x
from mtask.kernel.statements import rules

#: The fields of a task that a new round replaces.
CONTENT = ("params", "queue", "task_option", "lookup", "sealed", "version")

Stage = Mapping[str, Any]
GATHER = "$gather"
NEWEST = f"{GATHER}.newest"
#: The fields of `gather` that say whose params a round has.
_OF_CALLS = ("kind", "first_time", "debounce_ms", "max_wait_ms", "ids", "full")


def has_live(now: x.Expression) -> x.Expression:
    """Whether a live run holds the task."""
    return x.exists(rules.live_runs(now))


def has_begun() -> x.Expression:
    """Whether the task has runs of this round."""
    return x.exists(x.runs_where(x.current()))


def collects() -> x.Expression:
    """Whether the round collects the params of all its calls."""
    return {"$eq": [f"{GATHER}.kind", "calls"]}


def is_ready(now: x.Expression) -> x.Expression:
    """Whether the next round begins. This is the server's form of `gathering.is_ready`."""
    return {"$and": [x.AGAIN, {"$not": [has_live(now)]}, {"$or": [{"$not": [collects()]}, x.is_final()]}]}


def open_next(now: x.Expression = x.NOW) -> list[Stage]:
    """Begin the next round if it is ready. This must come after the stages that derive the status."""
    return [_encoded_open()] if now == x.NOW else [_open(now)]


@cache
def _encoded_open() -> Stage:
    return as_sent(_open(x.NOW))


def _open(now: x.Expression) -> Stage:
    return {"$replaceWith": {"$cond": [is_ready(now), begin(x.AGAIN, begun(x.AGAIN), now), "$$ROOT"]}}


def begun(following: str) -> x.Expression:
    """Return the gathering of a new round. This is the server's form of `gathering.begun`."""
    former = {"$concatArrays": [{"$ifNull": [f"{GATHER}.{name}", []]} for name in ("seen", "ids")]}
    seen = {"$cond": [{"$gt": [{"$size": former}, 0]}, {"$slice": [former, -MAX_CALLS]}, "$$REMOVE"]}
    remembered = {"consumed": NEWEST, "seen": seen}
    return {"$mergeObjects": [f"{following}.gather", remembered]}


def begin(following: str, gather: x.Expression, now: x.Expression, is_new: x.Expression = True) -> x.Expression:
    """Return the document with the params of `following`, and with all its runs past.

    `is_new`: whether this begins a round. If not, the task has no runs yet. No current run is left, so the derived
    fields of the result are simple.
    """
    # The document keeps what the last round returned, and not what all rounds returned: there may be many.
    kept_run = {"$cond": [{"$eq": ["$$run.past", True]}, x.without("$$run", "returns"), "$$run"]}
    aged = {"$map": {"input": x.RUNS, "as": "run", "in": {"$mergeObjects": [kept_run, {"past": True}]}}}
    start = f"{following}.start_time"
    # Without a start_time, a new round would be due since the creation of the task, and go before all other tasks.
    at_once, due = ({"$cond": [is_new, now, other]} for other in ("$$REMOVE", f"{x.STATE}.create_time"))
    state = {
        "$mergeObjects": [
            x.without(x.STATE, "start_time", "not_after", "finish_time", "reason", "next_id"),
            moved_to(f"{following}.queue", now),
            {
                "status": TaskStatus.INIT.value,
                "start_time": {"$ifNull": [start, at_once]},
                "next_preempt_time": {"$ifNull": [start, due]},
                "failed_cnt": 0,
                "cancel_requested": False,
                "worker_states": {"$cond": [has_begun(), aged, x.RUNS]},
            },
        ]
    }
    # Without quiet_time, the streams of workers report the change.
    kept = x.without("$$ROOT", "again", "lookup", "sealed", "version", "expire_time", "quiet_time")
    content = {name: f"{following}.{name}" for name in CONTENT}
    return {"$mergeObjects": [kept, {**content, "task_state": state, "gather": gather}]}


def moved_to(queue: x.Expression, now: x.Expression) -> dict[str, x.Expression]:
    """Return queue_time and former_queues, by name. They change only if the task moves to another queue."""
    former = f"{x.STATE}.former_queues"
    others = {"$filter": {"input": former, "as": "former", "cond": {"$ne": ["$$former", "$queue"]}}}
    before = {"$cond": [{"$isArray": [former]}, others, []]}
    is_moved = {"$ne": ["$queue", queue]}

    def if_moved(value: x.Expression, field: str) -> x.Expression:
        return {"$cond": [is_moved, value, {"$ifNull": [f"{x.STATE}.{field}", "$$REMOVE"]}]}

    newest_first = {"$slice": [{"$concatArrays": [["$queue"], before]}, MAX_FORMER_QUEUES]}
    return {"queue_time": if_moved(now, "queue_time"), "former_queues": if_moved(newest_first, "former_queues")}


def without_calls() -> x.Expression:
    """Return `gather` of a task whose params a plain publish replaces. Only the order of the calls stays."""
    return {"$cond": [GATHER, x.without(GATHER, *_OF_CALLS), "$$REMOVE"]}
