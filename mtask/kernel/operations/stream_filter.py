"""Which changes concern a worker: the pipeline of its change stream.

The filter compares the times in an event with the server time of the same event (`wallTime`). So it contains no instant
that becomes outdated. The stream needs no `updateLookup`. An inserted task carries the fields that the worker's queue
needs. Updated tasks are read in one batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mtask.kernel.document.status import FINAL, TaskStatus, WorkerStatus
from mtask.kernel.driver.stores import CONTROLS, PLACES, SCHEDULES, TASKS, WORKERS
from mtask.kernel.statements import claim
from mtask.kernel.statements import expressions as x
from mtask.kernel.statements.filters import LAST_TIME, Shares

Document = dict[str, Any]
_HEARD = [TASKS, WORKERS, SCHEDULES, CONTROLS, PLACES]


def _updated(path: str) -> x.Expression:
    return {"$getField": {"field": {"$literal": path}, "input": "$updateDescription.updatedFields"}}


def _is_set(path: str) -> x.Expression:
    return {"$ne": [{"$type": _updated(path)}, "missing"]}


def _is_soon(instant: x.Expression, horizon_ms: int) -> x.Expression:
    return {
        "$and": [
            {"$eq": [{"$type": instant}, "date"]},
            {"$lte": [instant, {"$add": ["$wallTime", horizon_ms]}]},
        ]
    }


def _updates_under(prefix: str) -> x.Expression:
    """Whether an update changes this field or a field below it. False for changes other than updates."""
    updated = {"$map": {"input": {"$objectToArray": "$updateDescription.updatedFields"}, "as": "f", "in": "$$f.k"}}
    truncated = {"$map": {"input": "$updateDescription.truncatedArrays", "as": "f", "in": "$$f.field"}}
    names = {"$concatArrays": [{"$ifNull": [updated, []]}, {"$ifNull": [truncated, []]}]}
    starts = {"$eq": [{"$indexOfBytes": ["$$name", prefix]}, 0]}
    return {"$anyElementTrue": [{"$map": {"input": names, "as": "name", "in": starts}}]}


#: Whether an inserted task is the first step of a flow. Each worker hears of these, so that it looks after flows.
_BEGINS_FLOW = {"$ne": [{"$type": "$fullDocument.flow.head"}, "missing"]}


def _is_wanted(worker_id: str, queues: Sequence[str], horizon_ms: int) -> x.Expression:
    """Whether the document of a change is a task that this worker may take soon, or malformed."""
    document = "$fullDocument"
    next_time = f"{document}.task_state.next_preempt_time"
    named = f"{document}.task_option.specific_worker_ids"
    is_mine = {
        "$and": [
            {"$in": [f"{document}.queue", x.literal(list(queues))]},
            {
                "$cond": [
                    {"$isArray": [named]},
                    {"$or": [{"$eq": [named, []]}, {"$in": [x.literal(worker_id), named]}]},
                    True,
                ]
            },
        ]
    }
    can_come = {"$and": [{"$eq": [{"$type": next_time}, "date"]}, {"$lte": [next_time, LAST_TIME]}]}
    is_well_formed = {"$and": [can_come, {"$isArray": [named]}]}
    is_final = {"$in": [f"{document}.task_state.status", FINAL]}
    is_waiting = {"$and": [{"$eq": [f"{document}.task_state.status", TaskStatus.WAITING.value]}, f"{document}.flow"]}
    is_malformed = {"$and": [{"$not": [is_well_formed]}, {"$not": [is_final]}, {"$not": [is_waiting]}]}
    is_due = {"$and": [_is_soon(next_time, horizon_ms), is_mine]}
    return {"$or": [is_malformed, is_due]}


def _is_heard(shares: Shares) -> x.Expression:
    """Whether a stream with these shares tells of an inserted task.

    It tells of the simple tasks of these shares. All workers hear of tasks that are not simple, that are encrypted, or
    that have other names. So they do of those of a version of their handler.
    """
    names = [name for found, _ in shares for name in found]
    document = "$fullDocument"
    is_shared = {
        "$and": [
            claim.looks_simple(document),
            {"$eq": [{"$type": f"{document}.sealed"}, "missing"]},  # not every worker has every data key
            {"$eq": [{"$type": f"{document}.version"}, "missing"]},  # nor every version of the handler
            {"$in": [f"{document}.name", x.literal(names)]},
        ]
    }
    is_ours = [
        {"$and": [{"$in": [f"{document}.name", x.literal(found)]}, x.is_in_buckets(buckets, "$documentKey._id")]}
        for found, buckets in shares
    ]
    return {"$or": [{"$not": [is_shared]}, *is_ours]}


def _task_events(worker_id: str, queues: Sequence[str], horizon_ms: int, shares: Shares | None = None) -> x.Expression:
    is_wanted = _is_wanted(worker_id, queues, horizon_ms)
    is_news = is_wanted if shares is None else {"$and": [is_wanted, _is_heard(shares)]}
    moved = _is_soon(_updated("task_state.next_preempt_time"), horizon_ms)
    asks_holder = {
        "$or": [
            {"$eq": [_updated("task_state.cancel_requested"), True]},
            _updates_under("task_option"),
            _updates_under("queue"),
        ]
    }
    return {
        "$switch": {
            "branches": [
                {"case": {"$eq": ["$operationType", "insert"]}, "then": {"$or": [is_news, _BEGINS_FLOW]}},
                {"case": {"$eq": ["$operationType", "update"]}, "then": {"$or": [moved, asks_holder]}},
                {"case": {"$eq": ["$operationType", "replace"]}, "then": is_wanted},
                # A removal is no event. A client that removes a task first requests its end with an update. A purge
                # removes no running task.
                {"case": {"$eq": ["$operationType", "delete"]}, "then": False},
            ],
            "default": True,
        }
    }


#: Whether an update of a worker's document says that due tasks wait for which that worker has no room.
_APPEALS = _is_set("appeal_cnt")


def _worker_events(worker_id: str) -> x.Expression:
    is_me = {"$eq": ["$documentKey._id", x.literal(worker_id)]}
    asks_me = {"$and": [is_me, {"$or": [_updates_under("control."), _is_set("control")]}]}
    left = {"$in": [_updated("status"), [WorkerStatus.STOPPING.value, WorkerStatus.STOPPED.value]]}
    resized = _is_set("concurrency")
    return {
        "$switch": {
            "branches": [
                {"case": {"$eq": ["$operationType", "update"]}, "then": {"$or": [asks_me, left, resized, _APPEALS]}},
            ],
            "default": {"$not": [is_me]},
        }
    }


def _calls(worker_id: str) -> x.Expression:
    """Whether an update in `places` calls this worker."""

    def names_me(call: str) -> x.Expression:
        text = {"$cond": [{"$eq": [{"$type": call}, "string"]}, call, ""]}
        return {"$gte": [{"$indexOfBytes": [text, x.literal(f"\n{worker_id}\n")]}, 0]}

    # The server writes an update that changes nearly all of a document as its replacement. A call begins with its time.
    call, quiet_time = "$fullDocument.call", {"$toString": "$fullDocument.quiet_time"}
    is_latest = {"$or": [{"$ne": [{"$type": "$fullDocument.quiet_time"}, "date"]}, {"$gte": [call, quiet_time]}]}
    return {
        "$switch": {
            "branches": [
                {"case": {"$eq": ["$operationType", "update"]}, "then": names_me(_updated("call"))},
                {"case": {"$eq": ["$operationType", "replace"]}, "then": {"$and": [names_me(call), is_latest]}},
            ],
            "default": False,
        }
    }


def pipeline(worker_id: str, queues: Sequence[str], horizon_ms: int, shares: Shares | None = None) -> list[Document]:
    """Return the pipeline stages with which this worker's change stream is opened.

    `shares`: of inserted simple tasks, the stream tells only of those of these shares. None: of all.
    """
    wanted = {
        "$switch": {
            "branches": [
                {"case": {"$eq": ["$ns.coll", TASKS]}, "then": _task_events(worker_id, queues, horizon_ms, shares)},
                {"case": {"$eq": ["$ns.coll", WORKERS]}, "then": _worker_events(worker_id)},
                {"case": {"$eq": ["$ns.coll", PLACES]}, "then": _calls(worker_id)},
            ],
            "default": {"$not": [_updates_under("schedule_state")]},
        }
    }
    # The server evaluates these conditions on the oplog entry. This costs half as much as building the event for
    # `$expr`. Nearly all changes by workers are marked with quiet_time, so this stage drops them.
    is_heard = {"ns.coll": {"$in": _HEARD}, "updateDescription.updatedFields.quiet_time": {"$exists": False}}
    return [
        {"$match": is_heard},
        {"$match": {"$expr": wanted}},
        {
            "$project": {
                "operationType": 1,
                "clusterTime": 1,
                "ns.coll": 1,
                "documentKey._id": 1,
                "fullDocument.name": 1,
                "fullDocument.queue": 1,
                "fullDocument.tenant": 1,
                "fullDocument.sealed": 1,
                "fullDocument.version": 1,
                "fullDocument.declared": 1,
                "fullDocument.task_option.priority": 1,
                "fullDocument.task_option.limit_key": 1,
                "fullDocument.task_state.next_preempt_time": 1,
                "fullDocument.task_state.status": 1,
                "is_simple": claim.looks_simple("$fullDocument"),
                "begins_flow": _BEGINS_FLOW,
                "is_wanted": {"$or": [{"$not": [_BEGINS_FLOW]}, _is_wanted(worker_id, queues, horizon_ms)]},
                "appeals": {"$and": [_APPEALS, {"$not": [_is_set("status")]}, {"$not": [_is_set("concurrency")]}]},
                "call": {"$ifNull": [_updated("call"), "$fullDocument.call"]},
                "preempt_time": _updated("task_state.next_preempt_time"),
                "status": _updated("task_state.status"),
                "concerns_holder": {
                    "$or": [{"$eq": [_updated("task_state.cancel_requested"), True]}, _updates_under("task_option")]
                },
            }
        },
    ]
