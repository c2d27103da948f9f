"""Filters: every predicate by which the engine and the clients select documents."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from mtask.model.identity import NAME_PATTERN
from mtask.model.options import MAX_COUNT
from mtask.model.status import FINAL_STATUSES, RunStatus, TaskStatus
from mtask.store.statements import expressions as x
from mtask.store.statements import rules

Filter = dict[str, Any]

NEXT = "task_state.next_preempt_time"
RUNS = "task_state.worker_states"

#: Without these two arrays an expression of the rules raises, and with it the whole query.
_HAS_ARRAYS = {"$and": [{"$isArray": [x.RUNS]}, {"$isArray": [f"{x.OPTION}.specific_worker_ids"]}]}


_FAILED_CNT = f"{x.STATE}.failed_cnt"
#: What a rule would take for something else and nobody be told: a status, a cancel_requested or a failed_cnt that is
#: none. Compared as expressions: a match by field would look into arrays.
_IS_SOUND = {
    "$and": [
        {"$in": [x.STATUS, [status.value for status in TaskStatus]]},
        {"$in": [{"$ifNull": [f"{x.STATE}.cancel_requested", False]}, [True, False]]},
        {"$eq": [_FAILED_CNT, {"$convert": {"input": _FAILED_CNT, "to": "long", "onError": None, "onNull": None}}]},
        {"$lte": [_FAILED_CNT, MAX_COUNT]},
    ]
}


#: The first and the last instant that every driver can read.
FIRST_TIME = datetime(1, 1, 1, tzinfo=UTC)
LAST_TIME = datetime(9999, 12, 31, 23, 59, 59, 999_000, tzinfo=UTC)


def by_ids(task_ids: Sequence[str]) -> Filter:
    """Match these tasks, by `_id`, so that a sharded collection can target them."""
    return {"_id": task_ids[0]} if len(task_ids) == 1 else {"_id": {"$in": list(task_ids)}}


def due_tasks(task_ids: Sequence[str]) -> Filter:
    """Match those of these tasks that someone could take or settle now: the guard of a claim.

    What is not sound would be derived anew, and nobody told: it is left to be met.
    """
    return {
        **by_ids(task_ids),
        NEXT: {"$exists": True},
        "$expr": {"$and": [{"$lte": [f"${NEXT}", x.NOW]}, _IS_SOUND]},
    }


def with_guards(matched: Filter, also: Sequence[Filter]) -> Filter:
    """Match what matches these guards, too: every claim carries them, whichever statement it is made with."""
    return {**matched, "$and": list(also)} if also else matched


def in_time(until: datetime) -> Filter:
    """Match anything until then, by the server's clock."""
    return {"$expr": {"$lt": [x.NOW, until]}}


def of_queues_and_keys(wanted: Sequence[tuple[str, str | None]]) -> Filter:
    """Match tasks of one of these queues and limit_keys; None: without one."""
    return {"$or": [{"queue": queue, "task_option.limit_key": key} for queue, key in wanted]}


def of_other_queues(queues: Sequence[str]) -> Filter:
    """Match tasks that are in none of these queues."""
    return {"queue": {"$nin": list(queues)}}


def claimable_now(queues: Collection[str], names: Collection[str], valid_until: datetime | None) -> Filter:
    """Match what is of none of these paused queues and names, until then by the server's clock: added to a claim."""
    paused: Filter = {}
    if queues:
        paused["queue"] = {"$nin": sorted(queues)}
    if names:
        paused["name"] = {"$nin": sorted(names)}
    return paused if valid_until is None else {**paused, **in_time(valid_until)}


def due_tasks_within(task_ids: Sequence[str], horizon_ms: int) -> Filter:
    """Match those of these tasks that someone could take or settle within the horizon, sound or not."""
    return {**by_ids(task_ids), NEXT: {"$exists": True}, "$expr": {"$lte": [f"${NEXT}", x.add_ms(x.NOW, horizon_ms)]}}


def fence_of(task_ids: Sequence[str], run_ids: Sequence[str]) -> Filter:
    """Match the tasks that one of these runs may still hold, whatever became of its lease."""
    runs = run_ids[0] if len(run_ids) == 1 else {"$in": list(run_ids)}
    return {**by_ids(task_ids), RUNS: {"$elemMatch": {"run_id": runs, "status": "RUNNING"}}}


def held_runs(task_ids: Sequence[str], run_ids: Sequence[str], now: x.Expression = x.NOW) -> Filter:
    """Match the unfinished runs that this worker holds under a live lease: the fence of ping and finish."""
    held = x.runs_where({"$and": [{"$in": ["$$run.run_id", x.literal(list(run_ids))]}, rules.is_run_live(now)]})
    return {**fence_of(task_ids, run_ids), "$expr": {"$gt": [{"$size": held}, 0]}}


def naming_sessions(task_ids: Sequence[Any]) -> Filter:
    """Match those of these tasks of which a run that is not closed names the session of its transaction."""
    return {**by_ids(task_ids), RUNS: {"$elemMatch": {"status": "RUNNING", "session_id": {"$exists": True}}}}


def with_runs(task_ids: Sequence[str], run_ids: Sequence[str]) -> Filter:
    """Match the tasks that hold one of these runs, whatever became of it."""
    return {**by_ids(task_ids), f"{RUNS}.run_id": {"$in": list(run_ids)}}


def claimable(queues: Sequence[str], names: Sequence[str], worker_id: str, horizon_ms: int) -> Filter:
    """Match what this worker could take within the horizon: the batch query's filter."""
    mine = {"worker_id": worker_id, "status": {"$in": [RunStatus.RUNNING.value, RunStatus.SUCCESS.value]}}
    until = x.add_ms(x.NOW, horizon_ms)
    me = x.literal(worker_id)
    is_mine_to_take = {"$and": [rules.is_candidate(me, until), {"$lte": [rules.ready_time(me), until]}]}
    return {
        # None: a malformed task without the field must be met by somebody.
        "queue": {"$in": [*queues, None]},
        "task_option.specific_worker_ids": {"$in": [[], None, worker_id]},
        NEXT: {"$exists": True},
        "$expr": {"$lte": [f"${NEXT}", until]},
        "name": {"$in": [*names, None]},
        "$or": [
            {RUNS: {"$not": {"$elemMatch": mine}}, "task_option.retry_scope": {"$ne": "worker"}},
            # Its own lapsed run, or a success of an earlier round, does not keep a worker from the task; with
            # retry_scope "worker" its own limit and delay do. What is malformed must not break the query.
            {"$expr": {"$or": [{"$not": [_HAS_ARRAYS]}, is_mine_to_take]}},
        ],
    }


def without_keys(keys: Sequence[str]) -> Filter:
    """Leave out the tasks of these limit_keys: added to another filter."""
    return {"task_option.limit_key": {"$nin": list(keys)}} if keys else {}


def other_than(task_ids: Sequence[str]) -> list[Filter]:
    """Leave out these tasks: added to another filter; nothing where there are none."""
    return [{"_id": {"$nin": list(task_ids)}}] if task_ids else []


def of_shares(shares: Sequence[tuple[Sequence[str], str]]) -> Filter:
    """Match the tasks of these names in the slots beside them: a text with "1" for each that is meant, and "0"."""
    return {
        "$or": [
            {"name": {"$in": list(names)}, "$expr": {"$eq": [{"$substrBytes": [slots, x.bucket(), 1]}, "1"]}}
            for names, slots in shares
        ]
    }


def lapsed(grace_ms: int) -> Filter:
    """Match the tasks with a run whose lease lapsed at least so long ago, whoever may take them."""
    before = {"$subtract": [x.NOW, grace_ms]}
    return {
        "task_state.status": TaskStatus.RUNNING.value,
        NEXT: {"$exists": True},
        "$expr": {
            "$and": [
                {"$lte": [f"${NEXT}", before]},
                _HAS_ARRAYS,
                {"$gt": [{"$size": x.runs_where(rules.is_run_lapsed(before))}, 0]},
            ]
        },
    }


def sound(task_ids: Sequence[Any]) -> Filter:
    """Match those of these tasks that the rules can settle."""
    return {**by_ids(task_ids), "$expr": _IS_SOUND}


def undiscoverable() -> Filter:
    """Match malformed tasks that no batch query finds: not final, and no next_preempt_time that can come."""
    is_open = {"task_state.status": {"$nin": [status.value for status in FINAL_STATUSES]}}
    # Compared as an expression, so that types that sort behind dates are among them.
    return {"$or": [{**is_open, NEXT: None}, {**is_open, "$expr": {"$gt": [f"${NEXT}", LAST_TIME]}}]}


def unserved(queues: Sequence[str], names: Sequence[str]) -> Filter:
    """Match tasks in these queues under other names than these; what is no name is malformed, and none of theirs."""
    is_name = {"$type": "string", "$regex": NAME_PATTERN}
    return {"queue": {"$in": list(queues)}, NEXT: {"$exists": True}, "name": {**is_name, "$nin": list(names)}}


def not_quarantined(document_id: Any) -> Filter:
    """Match the malformed document unless it is a FAIL that no batch query finds any more."""
    is_open = [{"task_state.status": {"$ne": "FAIL"}}, {NEXT: {"$exists": True}}]
    return {"_id": {"$eq": document_id}, "$or": is_open}


def not_running(task_id: str) -> Filter:
    """Match the task unless a live run holds it."""
    return {"_id": task_id, "$expr": {"$eq": [{"$size": rules.live_runs(x.NOW)}, 0]}}


def final(task_id: str, statuses: Collection[TaskStatus]) -> Filter:
    """Match the task if it ended in one of these."""
    return {"_id": task_id, "task_state.status": {"$in": [status.value for status in statuses]}}


def search(criteria: Mapping[str, Any]) -> Filter:
    """Match by status, name, queue, key and worker_id; each a value or several, None = any."""
    paths = {
        "status": "task_state.status",
        "name": "name",
        "queue": "queue",
        "key": "key",
        "worker_id": f"{RUNS}.worker_id",
    }
    matched: Filter = {}
    for field, wanted in criteria.items():
        if wanted is None:
            continue
        several = [wanted] if isinstance(wanted, str) else list(wanted)
        matched[paths[field]] = several[0] if len(several) == 1 else {"$in": several}
    statuses = criteria.get("status")
    asked = [statuses] if isinstance(statuses, str) else list(statuses or ())
    if asked and all(TaskStatus(status).is_final for status in asked):
        # Finished tasks have none: said so, the index on status leads on to the name.
        matched[NEXT] = None
    return matched
