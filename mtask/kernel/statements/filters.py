"""Filters: every predicate with which the engine and the clients select documents."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from mtask.kernel.document.identity import NAME_PATTERN
from mtask.kernel.document.options import MAX_COUNT
from mtask.kernel.document.status import FINAL, RunStatus, TaskStatus
from mtask.kernel.statements import expressions as x
from mtask.kernel.statements import rules
from mtask.search.order import end_of_prefix

Filter = dict[str, Any]
#: Parts of the tasks. Each is some task names, and a text with one character for each bucket: "1" if tasks of these
#: names in this bucket belong to it, and "0" if not.
Shares = Sequence[tuple[Sequence[str], str]]

NEXT = "task_state.next_preempt_time"
RUNS = "task_state.worker_states"
#: The field that only a task has whose handler is still to return its value, after its transaction has committed.
OWES_VALUE = f"{RUNS}.returns_owed_by"

#: Whether both arrays are present. If one is missing, the expressions of the rules fail, and the whole query fails.
_HAS_ARRAYS = {"$and": [{"$isArray": [x.RUNS]}, {"$isArray": [f"{x.OPTION}.specific_worker_ids"]}]}


_FAILED_CNT = f"{x.STATE}.failed_cnt"
#: Whether status, cancel_requested and failed_cnt are well-formed. The rules would misread malformed values without an
#: error. The conditions are expressions, because a match by field would also match values inside arrays.
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
    """Match these tasks by `_id`. In a sharded collection, the server then asks only the shards that hold them."""
    return {"_id": task_ids[0]} if len(task_ids) == 1 else {"_id": {"$in": list(task_ids)}}


def due_tasks(task_ids: Sequence[str]) -> Filter:
    """Match these tasks if some worker could take or settle them now. This is the guard of a claim.

    Unsound tasks do not match, because a claim would derive their fields and so hide the mistake. A worker quarantines
    unsound tasks instead.
    """
    return {
        **by_ids(task_ids),
        NEXT: {"$exists": True},
        "$expr": {"$and": [{"$lte": [f"${NEXT}", x.NOW]}, _IS_SOUND]},
    }


def with_guards(matched: Filter, also: Sequence[Filter]) -> Filter:
    """Add guards to a filter. A claim may send several statements, and each statement needs the claim's guards."""
    return {**matched, "$and": list(also)} if also else matched


def in_time(until: datetime) -> Filter:
    """Match every document before `until` by the server's clock, and no document afterwards."""
    return {"$expr": {"$lt": [x.NOW, until]}}


def due_by(instant: datetime) -> Filter:
    """Match the tasks that were due at this instant, and have not got a later time since."""
    return {NEXT: {"$lte": instant}}


def of_queues_and_keys(wanted: Sequence[tuple[str, str | None, str | None]]) -> Filter:
    """Match tasks with one of these queues, limit_keys and tenants, three by three. None: tasks without one."""
    return {"$or": [{"queue": queue, "task_option.limit_key": key, "tenant": tenant} for queue, key, tenant in wanted]}


def of_others(queues: Sequence[str], tenants: Sequence[str] = ()) -> Filter:
    """Match the tasks of all queues and tenants except these."""
    others: Filter = {"queue": {"$nin": list(queues)}} if queues else {}
    return {**others, "tenant": {"$nin": list(tenants)}} if tenants else others


def without_tenants(excluded: Mapping[str | None, Collection[str]]) -> list[Filter]:
    """Return guards that exclude the tasks of these tenants, by queue. None stands for all queues."""
    return [
        {"tenant": {"$nin": sorted(tenants)}}
        if queue is None
        else {"$nor": [{"queue": queue, "tenant": {"$in": sorted(tenants)}}]}
        for queue, tenants in excluded.items()
        if tenants
    ]


def claimable_now(
    queues: Collection[str], names: Collection[str], valid_until: datetime | None, tenants: Collection[str] = ()
) -> Filter:
    """Match tasks of none of these paused queues, names and tenants. After `valid_until`, match no task."""
    paused: Filter = {}
    if queues:
        paused["queue"] = {"$nin": sorted(queues)}
    if names:
        paused["name"] = {"$nin": sorted(names)}
    if tenants:
        paused["tenant"] = {"$nin": sorted(tenants)}
    return paused if valid_until is None else {**paused, **in_time(valid_until)}


def due_tasks_within(task_ids: Sequence[str], horizon_ms: int) -> Filter:
    """Match these tasks if some worker could take or settle them within the horizon. Unsound tasks match, too."""
    return {**by_ids(task_ids), NEXT: {"$exists": True}, "$expr": {"$lte": [f"${NEXT}", x.add_ms(x.NOW, horizon_ms)]}}


def fence_of(task_ids: Sequence[str], run_ids: Sequence[str]) -> Filter:
    """Match these tasks if one of these runs is still RUNNING in them. The run's lease may have lapsed."""
    runs = run_ids[0] if len(run_ids) == 1 else {"$in": list(run_ids)}
    return {**by_ids(task_ids), RUNS: {"$elemMatch": {"run_id": runs, "status": "RUNNING"}}}


def held_runs(task_ids: Sequence[str], run_ids: Sequence[str], now: x.Expression = x.NOW) -> Filter:
    """Match these tasks if one of these runs holds them with a live lease. This is the fence of ping and finish."""
    held = x.runs_where({"$and": [{"$in": ["$$run.run_id", x.literal(list(run_ids))]}, rules.is_run_live(now)]})
    return {**fence_of(task_ids, run_ids), "$expr": {"$gt": [{"$size": held}, 0]}}


def naming_sessions(task_ids: Sequence[Any]) -> Filter:
    """Match these tasks if they have a RUNNING run that names the session of its transaction."""
    return {**by_ids(task_ids), RUNS: {"$elemMatch": {"status": "RUNNING", "session_id": {"$exists": True}}}}


def with_runs(task_ids: Sequence[str], run_ids: Sequence[str]) -> Filter:
    """Match these tasks if they contain one of these runs, whatever the run's status."""
    return {**by_ids(task_ids), f"{RUNS}.run_id": {"$in": list(run_ids)}}


def claimable(queues: Sequence[str], names: Sequence[str], worker_id: str, horizon_ms: int) -> Filter:
    """Match the tasks that this worker could take within the horizon. This is the filter of the batch query.

    If `horizon_ms` is 0, malformed tasks that lack the queue, the name or the option do not match. To look for them,
    the server passes each key that claims have lately removed at the head of the backlog, again for each combination of
    absent fields. That would be most of the work of a scan.
    """
    mine = {"worker_id": worker_id, "status": {"$in": [RunStatus.RUNNING.value, RunStatus.SUCCESS.value]}}
    until = x.add_ms(x.NOW, horizon_ms)
    me = x.literal(worker_id)
    # An expired task is not delayed: it is to be ended.
    is_ready = {"$or": [{"$lte": [rules.ready_time(me), until]}, rules.is_expired(until)]}
    is_mine_to_take = {"$and": [rules.is_candidate(me, until), is_ready]}
    # None matches a malformed task that lacks the field. Some worker must find such a task.
    absent = [None] if horizon_ms else []
    return {
        "queue": {"$in": [*queues, *absent]},
        "task_option.specific_worker_ids": {"$in": [[], *absent, worker_id]},
        NEXT: {"$exists": True},
        "$expr": {"$lte": [f"${NEXT}", until]},
        "name": {"$in": [*names, *absent]},
        "$or": [
            {RUNS: {"$not": {"$elemMatch": mine}}, "task_option.retry_scope": {"$ne": "worker"}},
            # This branch finds the other tasks. A worker may also take a task in which it has a lapsed run, or a
            # success of an earlier round. With retry_scope "worker", the worker's own limit and delay count. A
            # malformed task without the arrays matches, so that the query does not fail.
            {"$expr": {"$or": [{"$not": [_HAS_ARRAYS]}, is_mine_to_take]}},
        ],
    }


def none_of(clauses: Sequence[Filter]) -> list[Filter]:
    """Return a list of guards that excludes the tasks of each of these clauses. It is empty if there are none."""
    return [{"$nor": list(clauses)}] if clauses else []


def other_than(task_ids: Sequence[str]) -> list[Filter]:
    """Return a list of guards that excludes these tasks. The list is empty if there are no tasks."""
    return [{"_id": {"$nin": list(task_ids)}}] if task_ids else []


def of_shares(shares: Shares) -> Filter:
    """Match the tasks of these shares. This is an addition to a filter that matches no tasks of other names."""
    if len(shares) == 1:  # of all names: to test the name again would take a tenth of the scan
        return {"$expr": x.is_in_buckets(shares[0][1])}
    return {"$or": [{"name": {"$in": list(names)}, "$expr": x.is_in_buckets(buckets)} for names, buckets in shares]}


def lapsed(grace_ms: int) -> Filter:
    """Match the tasks with a run whose lease lapsed at least `grace_ms` ago."""
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
    """Match these tasks if they are sound. The rules can settle only sound tasks."""
    return {**by_ids(task_ids), "$expr": _IS_SOUND}


def undiscoverable() -> Filter:
    """Match malformed tasks that no batch query finds.

    Such a task is neither final nor WAITING, but its next_preempt_time is missing or lies after the last possible
    instant.
    """
    is_open = {"task_state.status": {"$nin": [*FINAL, TaskStatus.WAITING.value]}}
    # As an expression, this condition also matches values of types that sort after dates.
    return {"$or": [{**is_open, NEXT: None}, {**is_open, "$expr": {"$gt": [f"${NEXT}", LAST_TIME]}}]}


def unserved(queues: Sequence[str], names: Sequence[str]) -> Filter:
    """Match tasks in these queues whose name is valid and not in `names`. Tasks with an invalid name are malformed."""
    is_name = {"$type": "string", "$regex": NAME_PATTERN}
    return {"queue": {"$in": list(queues)}, NEXT: {"$exists": True}, "name": {**is_name, "$nin": list(names)}}


def not_quarantined(document_id: Any) -> Filter:
    """Match the malformed document unless it is already quarantined: status FAIL and no next_preempt_time."""
    is_open = [{"task_state.status": {"$ne": "FAIL"}}, {NEXT: {"$exists": True}}]
    return {"_id": {"$eq": document_id}, "$or": is_open}


def not_running(task_id: str) -> Filter:
    """Match the task unless a live run holds it."""
    return {"_id": task_id, "$expr": {"$eq": [{"$size": rules.live_runs(x.NOW)}, 0]}}


#: What the version of a task covers: all that a caller may want to change, and what tells of a run, but no pings.
_VERSION = ("$params", "$task_option", "$queue", x.STATUS, _FAILED_CNT, f"{x.STATE}.create_time")


def unchanged(document: Mapping[str, Any]) -> Filter:
    """Match the task if it is of the same version as this document of it."""
    state = document["task_state"]
    runs = state["worker_states"]
    values = [
        document.get("params"),
        document["task_option"],
        document["queue"],
        state["status"],
        state["failed_cnt"],
        state["create_time"],
        runs[-1]["run_id"] if runs else None,
    ]
    run_id = {"$let": {"vars": {"run": {"$last": x.RUNS}}, "in": "$$run.run_id"}}
    here = [*({"$ifNull": [field, None]} for field in _VERSION), {"$ifNull": [run_id, None]}]
    return {"$expr": {"$eq": [here, x.literal(values)]}}


def final(task_id: str, statuses: Collection[TaskStatus]) -> Filter:
    """Match the task if its status is one of these final statuses."""
    return {"_id": task_id, "task_state.status": {"$in": [status.value for status in statuses]}}


def looked_up(lookup: Mapping[str, Sequence[Any]]) -> Filter:
    """Match the tasks that have one of the values under each name."""
    wanted = [
        {"lookup": {"$elemMatch": {"k": name, "v": values[0] if len(values) == 1 else {"$in": list(values)}}}}
        for name, values in lookup.items()
    ]
    # The server uses a partial index only if the filter implies the index's condition.
    return {"lookup": {"$exists": True}, "$and": wanted}


def any_of(values: Sequence[str]) -> Any:
    """Return the condition that a field has one of these values."""
    return values[0] if len(values) == 1 else {"$in": list(values)}


def with_key_prefix(names: Sequence[str], prefix: str) -> Filter:
    """Match the tasks of these names whose keys begin with the prefix, as ranges of `_id`."""
    ranges: list[Filter] = []
    for name in names:
        first = f"{name}:{prefix}"
        end = end_of_prefix(first)
        ranges.append({"_id": {"$gte": first, **({} if end is None else {"$lt": end})}})
    return ranges[0] if len(ranges) == 1 else {"$or": ranges} if ranges else {"_id": {"$in": []}}


#: The longest regular expression that is sent, in characters. MongoDB takes somewhat longer ones.
LONGEST_PATTERN = 8_000


def has_key_prefix(prefix: str, names: Sequence[str] = ()) -> Filter:
    """Match tasks whose keys begin with the prefix, and that have one of the names; without `names`, any name.

    The server can test this on the keys of an index with `_id`.
    """
    alternatives = "|".join(map(_escaped, names))
    if len(alternatives) > LONGEST_PATTERN:
        return {**has_key_prefix(prefix), "name": any_of(names)}
    name = f"(?:{alternatives})" if names else "[^:]*"
    return {"_id": {"$regex": f"^{name}:{_escaped(prefix)}"}}


def is_of_queues(queues: Sequence[str]) -> Filter:
    """Match tasks of these queues, for a walk along an index that has the queue behind its order.

    Unlike an equality, this is no bound of the index: the server would seek the queue anew at each instant, which costs
    twice as much as a test of each key.
    """
    pattern = "|".join(map(_escaped, queues))
    if len(pattern) > LONGEST_PATTERN:
        return {"queue": any_of(queues)}
    return {"queue": {"$regex": rf"^(?:{pattern})\z"}}


def _escaped(text: str) -> str:
    # A regular expression cannot hold the character NUL, except as an escape.
    return re.escape(text).replace("\0", r"\x00")


def search(criteria: Mapping[str, Any]) -> Filter:
    """Match tasks by status, name, queue, key, key_prefix, tenant, worker_id and params, and by lookups.

    Each criterion is one value, several values, or None for any value. The lookups are values by name, and the params
    are values by path.
    """
    paths = {
        "status": "task_state.status",
        "name": "name",
        "queue": "queue",
        "key": "key",
        "tenant": "tenant",
        "worker_id": f"{RUNS}.worker_id",
    }
    matched: Filter = {}
    for field, wanted in criteria.items():
        if wanted is None:
            continue
        if field == "lookup":
            matched |= looked_up(wanted)
            continue
        if field == "key_prefix":
            matched |= has_key_prefix(wanted)
            continue
        if field == "params":
            matched |= {f"params.{path}": {"$eq": value} for path, value in wanted.items()}
            continue
        several = [wanted] if isinstance(wanted, str) else list(wanted)
        matched[paths[field]] = several[0] if len(several) == 1 else {"$in": several}
    statuses = criteria.get("status")
    asked = [statuses] if isinstance(statuses, str) else list(statuses or ())
    is_by_status = criteria.get("lookup") is None and criteria.get("tenant") is None
    if asked and is_by_status and all(TaskStatus(status).is_final for status in asked):
        # Finished tasks have no next_preempt_time. With this condition, the query uses the index on status also for the
        # name.
        matched[NEXT] = None
    return matched


def after_task(criteria: Filter, create_time: datetime, task_id: str) -> tuple[Filter, Filter]:
    """Match the tasks that come after this one in a search, newest first: those of the same instant, and the older.

    As two filters, each is one range of the index. One filter with both would examine all tasks of the same instant.
    """
    created = "task_state.create_time"
    return {**criteria, created: create_time, "_id": {"$lt": task_id}}, {**criteria, created: {"$lt": create_time}}
