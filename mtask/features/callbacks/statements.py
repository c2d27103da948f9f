"""Statements of callbacks: which tasks owe ends, and how an end is crossed off that a published task tells.

Whatever makes a status final writes, in the same update, which end is to be told: see `mtask.kernel.statements.outbox`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from mtask.kernel.statements import expressions as x
from mtask.kernel.statements.filters import OWES_VALUE, Filter, by_ids
from mtask.kernel.statements.outbox import OWED_ENDS, OWED_FIELD, owing_ends, retain_ms


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
    left = {"$filter": {"input": OWED_ENDS, "as": "one", "cond": {"$not": [{"$in": ["$$one.number", numbers]}]}}}
    kept = {"$cond": [{"$and": [is_same, {"$isArray": [OWED_ENDS]}]}, left, OWED_ENDS]}
    return [{"$set": {OWED_FIELD: kept}}, *begin_retention(now)]


def begin_retention(now: x.Expression = x.NOW) -> list[Mapping[str, Any]]:
    """Remove the mark if nothing is owed any more, and begin the retention that waited for it.

    The retention of a step of a flow begins at the end of its flow. No worker's stream needs to hear of the change.
    """
    retain = retain_ms()
    stays = [x.FLOW, x.OWED_SINCE, {"$not": [x.is_final()]}, {"$eq": [{"$ifNull": [retain, None]}, None]}]
    expiry = x.add_ms(x.finish_time(now), retain)
    is_done = {"$in": [{"$ifNull": [OWED_ENDS, []]}, [[]]]}
    begun = {
        "$cond": [{"$and": [is_done, {"$not": [{"$or": stays}]}]}, expiry, {"$ifNull": ["$expire_time", "$$REMOVE"]}]
    }
    return [
        {"$set": {"expire_time": begun, "quiet_time": now}},
        {"$set": {OWED_FIELD: {"$cond": [is_done, "$$REMOVE", OWED_ENDS]}}},
    ]


def as_read(document_id: Any, owed_then: Any) -> Filter:
    """Match the task if it owes exactly what was read."""
    return {"_id": {"$eq": document_id}, OWED_FIELD: {"$eq": owed_then}}


def forget(now: x.Expression = x.NOW) -> list[Mapping[str, Any]]:
    """Remove a mark that cannot be read."""
    return [{"$set": {OWED_FIELD: []}}, *begin_retention(now)]


def tellable() -> Filter:
    """Match the tasks with ends that can be told now.

    A receiver that is told of an end reads the result. So the end of a task that owes its value is told later.
    """
    return {**owing_ends(), OWES_VALUE: {"$exists": False}}


def owed_of(task_ids: Sequence[str]) -> Filter:
    """Match those of these tasks with ends that can be told now."""
    return {**by_ids(task_ids), **tellable()}


#: What is read of a task that owes callbacks, and the server's time.
VIEW: Mapping[str, Any] = {"name": 1, "key": 1, "task_state.create_time": 1, OWED_FIELD: 1, "now": x.NOW}
