"""The vocabulary of expressions: paths, literals and small pieces for rules, filters and updates.

The server evaluates each expression on a task document. Variables in `$let` and `$map` begin with a lower-case letter.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mtask.kernel.document.identity import BUCKET_CNT
from mtask.kernel.document.status import FINAL, RunStatus, TaskStatus

Expression = Any

NOW = "$$NOW"
OPTION = "$task_option"
STATE = "$task_state"
RUNS = f"{STATE}.worker_states"
STATUS = f"{STATE}.status"
#: The task's part in its flow. As a condition, it is false for a task of no flow.
FLOW = "$flow"
OWED_SINCE = "$owed_since"
#: The incarnations of the workers whose handlers are still to return values of the task. Of most tasks, it is [].
OWED_VALUES = f"{RUNS}.returns_owed_by"
#: The next round of a task that gathers. As a condition, it is false for a task without one.
AGAIN = "$again"
#: The characters before and after each id in a text that holds several. A key may hold them, too, but hardly does.
_BEGIN, _END = "\n", "\t"
#: The largest such text, in bytes. The server copies it for each task.
_MOST_TEXT = 32_000


def literal(value: Any) -> Expression:
    """Return the value as a literal: the server reads no part of it as an expression."""
    return {"$literal": value}


def index_of_id(task_ids: Sequence[Any]) -> Expression:
    """Return the index of the task's `_id` in `task_ids`, which must hold it.

    The statement fails for any other task. So it needs the hint `_id_`: with another index, the server may evaluate the
    filter on other tasks.

    The server looks for the id in one text, in which each id has the same room. `$indexOfArray` would copy the array
    for each task, and with it a reference to each of its texts.
    """
    if len(task_ids) == 1:
        return 0
    room = _room_for(task_ids)
    if room is None:
        return {"$indexOfArray": [literal(list(task_ids)), "$_id"]}
    rows = [f"{_BEGIN}{task_id}{_END}" + " " * (room - 2 - _size(task_id)) for task_id in task_ids]
    return {"$divide": [_place_of_id("".join(rows)), room]}


def _place_of_id(text: str) -> Expression:
    # The id of a malformed task may be a symbol. The driver reads it as a text, but the server joins it with no text.
    task_id = {"$substrBytes": ["$_id", 0, -1]}
    return {"$indexOfBytes": [literal(text), {"$concat": [_BEGIN, task_id, _END]}]}


def _room_for(task_ids: Sequence[Any]) -> int | None:
    """Return the bytes that each of these ids needs in one text.

    None: one text cannot hold them, or an id might not be found in its own place only. A malformed task may have an
    `_id` that is no text.
    """
    if not all(type(task_id) is str for task_id in task_ids):
        return None
    room = max(map(_size, task_ids)) + len(_BEGIN + _END)
    joined = "".join(task_ids)
    return room if _BEGIN not in joined and _END not in joined and room * len(task_ids) <= _MOST_TEXT else None


def _size(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode())


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
    """Whether a step's end with this status is to be marked."""
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


def finish_time(now: Expression) -> Expression:
    """Return the finish_time of a task that is now final. A stored finish_time stays."""
    return {"$ifNull": [f"{STATE}.finish_time", now]}
