"""Statements of callbacks: the rules of `mtask.model.callbacks.callback` as server expressions.

Whatever makes a status final writes, in the same update, which end is to be told. So a process that dies right after it
loses nothing: whoever finds the mark `callback_owed` publishes the task that tells it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from mtask.model.callbacks.callback import MAX_OWED
from mtask.model.status import TaskStatus
from mtask.store.statements import expressions as x
from mtask.store.statements.filters import OWES_VALUE, Filter, by_ids

#: As a condition, it is false for a task without a callback.
CALLBACK = "$callback"
OWED = "$callback_owed"
#: The names under which a task's document holds what its callback owes.
COUNTER_FIELD, OWED_FIELD = "callback_cnt", "callback_owed"


def tells(status: x.Expression, was_final: x.Expression) -> x.Expression:
    """Whether a change to this status is to be told. This is the server's form of `callback.is_told`."""
    on = f"{CALLBACK}.on"
    # A malformed document may hold anything there.
    is_wanted = {"$in": [status, {"$cond": [{"$isArray": [on]}, on, []]}]}
    return {"$and": [CALLBACK, {"$not": [was_final]}, x.is_final(status), is_wanted]}


def owe(is_told: x.Expression, status: x.Expression, now: x.Expression) -> dict[str, x.Expression]:
    """Return the fields with which a task owes one more callback, if `is_told`; else they stay."""
    number = {"$add": [{"$cond": [{"$isNumber": f"${COUNTER_FIELD}"}, f"${COUNTER_FIELD}", 0]}, 1]}
    entry = {"number": number, "status": status, "time": now}
    entry |= {name: f"{CALLBACK}.{name}" for name in ("url", "secret", "tenant")}
    more = {"$concatArrays": [{"$cond": [{"$isArray": [OWED]}, OWED, []]}, [entry]]}
    return {
        COUNTER_FIELD: {"$cond": [is_told, number, f"${COUNTER_FIELD}"]},
        OWED_FIELD: {"$cond": [is_told, {"$slice": [more, -MAX_OWED]}, OWED]},
    }


def cross_off(told: Mapping[str, tuple[datetime, Sequence[int]]], now: x.Expression = x.NOW) -> list[Mapping[str, Any]]:
    """Take these callbacks out of the owed ones: they are published. Without any left, the task's retention begins.

    `told` holds, by task id, the create_time of the task and the numbers of its callbacks. A task that was removed and
    published again meanwhile has another create_time, and keeps what it owes.
    """
    index = x.index_of_id(list(told))

    def mine(values: list[Any]) -> x.Expression:
        return {"$arrayElemAt": [x.literal(values), index]}

    is_same = {"$eq": [f"{x.STATE}.create_time", mine([created for created, _ in told.values()])]}
    numbers = mine([list(several) for _, several in told.values()])
    left = {"$filter": {"input": OWED, "as": "one", "cond": {"$not": [{"$in": ["$$one.number", numbers]}]}}}
    kept = {"$cond": [{"$and": [is_same, {"$isArray": [OWED]}]}, left, OWED]}
    return [{"$set": {OWED_FIELD: kept}}, *begin_retention(now)]


def begin_retention(now: x.Expression = x.NOW) -> list[Mapping[str, Any]]:
    """Remove the mark if nothing is owed any more, and begin the retention that waited for it.

    The retention of a step of a flow begins at the end of its flow. No worker's stream needs to hear of the change.
    """
    is_success = {"$eq": [x.STATUS, TaskStatus.SUCCESS.value]}
    retain = {"$cond": [is_success, f"{x.OPTION}.retain_success_ms", f"{x.OPTION}.retain_fail_ms"]}
    stays = [x.FLOW, x.OWED_SINCE, {"$not": [x.is_final()]}, {"$eq": [{"$ifNull": [retain, None]}, None]}]
    expiry = x.add_ms({"$ifNull": [f"{x.STATE}.finish_time", now]}, retain)
    is_done = {"$in": [{"$ifNull": [OWED, []]}, [[]]]}
    begun = {
        "$cond": [{"$and": [is_done, {"$not": [{"$or": stays}]}]}, expiry, {"$ifNull": ["$expire_time", "$$REMOVE"]}]
    }
    return [
        {"$set": {"expire_time": begun, "quiet_time": now}},
        {"$set": {OWED_FIELD: {"$cond": [is_done, "$$REMOVE", OWED]}}},
    ]


def as_read(document_id: Any, owed_then: Any) -> Filter:
    """Match the task if it owes exactly what was read."""
    return {"_id": {"$eq": document_id}, OWED_FIELD: {"$eq": owed_then}}


def forget(now: x.Expression = x.NOW) -> list[Mapping[str, Any]]:
    """Remove a mark that cannot be read."""
    return [{"$set": {OWED_FIELD: []}}, *begin_retention(now)]


def owed() -> Filter:
    """Match the tasks with ends that are still to be told. The index on the mark holds only these."""
    return {OWED_FIELD: {"$exists": True}}


def tellable() -> Filter:
    """Match the tasks with ends that can be told now.

    A receiver that is told of an end reads the result. So the end of a task that owes its value is told later.
    """
    return {**owed(), OWES_VALUE: {"$exists": False}}


def owed_of(task_ids: Sequence[str]) -> Filter:
    """Match those of these tasks with ends that can be told now."""
    return {**by_ids(task_ids), **tellable()}


#: What is read of a task that owes callbacks, and the server's time.
VIEW: Mapping[str, Any] = {"name": 1, "key": 1, "task_state.create_time": 1, OWED_FIELD: 1, "now": x.NOW}
