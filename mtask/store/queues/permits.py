"""Permits limit the runs of a queue, of one limit_key or tenant in it, or of a tenant: the runs at once, and the starts
in a window of time.

The collection `places` has one document for each limited queue, key or tenant. This document is a pool of permits.
Before a claim, the worker takes a permit with one update, and the server counts the permits in this update. The claim
is only valid until `claim_by`. So no run is live without its permit, even if messages are lost.

A worker that closes a run in the task's document then gives back the run's permit for concurrency. If that worker dies
first, another worker reclaims the permit when no permit is free. The lease alone decides which runs are live.

A permit for a start counts from the time of the claim. Until that time is known, the permit counts from `claim_by`, the
latest possible time of the claim.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from pymongo import ReturnDocument

from mtask.errors import DatabaseError, DuplicateKey
from mtask.model.controls import MAX_WINDOW_MS, Limit
from mtask.model.documents import SCHEMA_VERSION, runs_in
from mtask.model.status import FINAL, RunStatus
from mtask.store.driver.operation import Operation, places, tasks
from mtask.store.statements import expressions as x
from mtask.store.statements import filters
from mtask.store.tasks import claims

Document = dict[str, Any]
#: Time limit of a claim, in ms, counted from the update that takes its permits.
CLAIM_MS = 2_000
#: The longest delay between `claim_by` and the write of a claim that began before `claim_by`. A run that is still
#: missing after this delay will never come.
_LATEST = timedelta(seconds=15)
#: Windows are extended by the delay between a claim and the start of its handler. _WAY is this delay as a share of the
#: window. _MAX_WAY_MS is its maximum, in ms.
_WAY, _MAX_WAY_MS = 0.02, 100
#: The time for which the document of an unused pool is kept, in ms.
_KEPT_MS = 3_600_000
#: The furthest that a well-formed instant can lie in the future, in ms. No claim writes a later instant, even if the
#: clocks of two servers differ.
_ABSURD_MS = 60_000
_RACES = 5


@dataclass(frozen=True, slots=True)
class PermitPool:
    """The permits of a queue, of one limit_key or one tenant in this queue, or of one tenant in all queues."""

    queue: str | None
    key: str | None = None
    tenant: str | None = None

    @property
    def id(self) -> str:
        """The `_id` of the pool's document."""
        parts = [self.queue, self.key, self.tenant]
        while len(parts) > 1 and parts[-1] is None:
            parts.pop()
        return json.dumps(parts, ensure_ascii=False)


@dataclass(frozen=True, slots=True)
class PermitRequest:
    """A request for one permit per task, the most urgent task first."""

    pool: PermitPool
    limit: Limit
    task_ids: Sequence[str]

    @property
    def window_ms(self) -> int:
        """The window in which starts are counted, in ms. It is extended by the delay until a handler starts."""
        window_ms = self.limit.window_ms or 0
        return window_ms + min(_MAX_WAY_MS, int(window_ms * _WAY))

    def document(self) -> Document:
        """Return the request in the form that the update reads."""
        return {
            "concurrency": self.limit.concurrency,
            "starts": self.limit.starts,
            "window_ms": self.window_ms,
            "task_ids": list(self.task_ids),
        }


@dataclass(frozen=True, slots=True)
class PermitGrant:
    """The tasks that got a permit; and for the other tasks, the time at which another start may be permitted."""

    task_ids: frozenset[str]
    claim_by: datetime | None  #: the tasks that got a permit must be claimed before this instant
    is_crowded: bool = False  #: runs hold all permits, and some of these runs may be dead
    #: The times of the starts that use up the permits. A start without a settled time has its latest possible time
    #: here. `starts` is empty if starts do not use up the permits. `window` says how long each start counts.
    starts: Sequence[datetime] = ()
    window: timedelta = timedelta(0)

    def next_time(self, now: datetime) -> datetime | None:
        """Return the time at which another start is permitted.

        Return None if starts do not use up the permits, or if some starts have no settled time yet.
        """
        if not self.starts or any(start > now for start in self.starts):
            return None
        return min(self.starts) + self.window


NONE = PermitGrant(frozenset(), None)


def _sound(path: str, instant: str) -> x.Expression:
    """Return the well-formed entries of an array. A malformed entry would use up a permit for ever."""
    entry = "$$entry"
    is_near = {"$lt": [f"{entry}.{instant}", x.add_ms(x.NOW, _ABSURD_MS)]}
    types = [("task_id", "string"), ("token", "string"), (instant, "date")]
    conditions = [*({"$eq": [{"$type": f"{entry}.{field}"}, name]} for field, name in types), is_near]
    array = {"$cond": [{"$isArray": [path]}, path, []]}
    return {"$filter": {"input": array, "as": "entry", "cond": {"$and": conditions}}}


#: The well-formed entries of the arrays `starts` and `running`.
_STARTS, _RUNNING = _sound("$starts", "time"), _sound("$running", "claim_by")


def _kept_while_used(running: x.Expression, window_ms: x.Expression) -> x.Expression:
    unused = {"$eq": [{"$size": running}, 0]}
    return {"$cond": [unused, {"$add": [x.NOW, _KEPT_MS, window_ms]}, "$$REMOVE"]}


def _take(requests: Sequence[PermitRequest], token: str) -> list[Mapping[str, Any]]:
    """Return the update that grants the requested permits, as far as they are free. It serves all requested pools."""
    ids = x.literal([request.pool.id for request in requests])
    mine = {"$arrayElemAt": [x.literal([request.document() for request in requests]), {"$indexOfArray": [ids, "$_id"]}]}
    claim_by = x.add_ms(x.NOW, CLAIM_MS)
    in_window = {
        "$filter": {
            "input": _STARTS,
            "as": "start",
            "cond": {"$gt": ["$$start.time", {"$subtract": [x.NOW, "$_request.window_ms"]}]},
        }
    }

    def left(limit: str, used: x.Expression) -> x.Expression:
        return {"$subtract": [{"$ifNull": [limit, {"$add": [{"$size": used}, 1_000_000]}]}, {"$size": used}]}

    free = {"$max": [0, {"$min": [left("$_request.concurrency", "$running"), left("$_request.starts", "$starts")]}]}
    got = {"$cond": [{"$gt": ["$_free", 0]}, {"$slice": ["$_request.task_ids", {"$max": ["$_free", 1]}]}, []]}

    def more(counted: str, name: str) -> x.Expression:
        entry = {"task_id": "$$taskId", "token": token, name: claim_by}
        entries = {"$map": {"input": "$_got", "as": "taskId", "in": entry}}
        return {"$cond": [{"$gt": [counted, None]}, entries, []]}

    return [
        {"$set": {"_request": mine}},
        {"$set": {"starts": in_window, "running": _RUNNING}},
        {"$set": {"_free": free}},
        {"$set": {"_got": got}},
        {
            "$set": {
                "starts": {"$concatArrays": ["$starts", more("$_request.starts", "time")]},
                "running": {"$concatArrays": ["$running", more("$_request.concurrency", "claim_by")]},
            }
        },
        {
            "$set": {
                "expire_time": _kept_while_used("$running", "$_request.window_ms"),
                "schema_version": SCHEMA_VERSION,
                "_request": "$$REMOVE",
                "_free": "$$REMOVE",
                "_got": "$$REMOVE",
            }
        },
    ]


def take(requests: Sequence[PermitRequest], token: str) -> Operation[dict[PermitPool, PermitGrant]]:
    """Grant the requested permits, as far as they are free. `token` is the claim's new random text.

    Permits of one pool take one round trip. Permits of several pools take two, and three more if a pool is used for the
    first time.
    """
    pipeline = _take(requests, token)
    ids = [request.pool.id for request in requests]
    view = {"starts": 1, "running": 1}
    if len(ids) == 1:
        found = {ids[0]: (yield from _take_one(ids[0], pipeline, view))}
    else:
        found = yield from _take_several(ids, pipeline, view)
        absent = [pool_id for pool_id in ids if pool_id not in found]
        if absent:
            new = [{"_id": i, "starts": [], "running": [], "schema_version": SCHEMA_VERSION} for i in absent]
            yield places("insert_new", new)
            found |= yield from _take_several(absent, pipeline, view)
    return {
        request.pool: _granted(request, found[request.pool.id], token)
        for request in requests
        if request.pool.id in found
    }


def _take_one(pool_id: str, pipeline: Any, view: Document) -> Operation[Document]:
    for _ in range(_RACES):
        try:
            document: Document = yield places(
                "find_one_and_update",
                {"_id": pool_id},
                pipeline,
                upsert=True,
                projection=view,
                return_document=ReturnDocument.AFTER,
            )
        except DuplicateKey:
            continue  # another worker made the document at the same time
        return document
    raise DuplicateKey(f"the permits of {pool_id} are being made by many at once; try again")


def _take_several(ids: Sequence[str], pipeline: Any, view: Document) -> Operation[dict[str, Document]]:
    yield places("update_many", {"_id": {"$in": list(ids)}}, pipeline)
    documents = yield places("find", {"_id": {"$in": list(ids)}}, view)
    return {document["_id"]: document for document in documents}


def _granted(request: PermitRequest, document: Document, token: str) -> PermitGrant:
    counted, name = ("starts", "time") if request.limit.concurrency is None else ("running", "claim_by")
    mine = [entry for entry in document[counted] if entry.get("token") == token]
    task_ids = frozenset(entry["task_id"] for entry in mine)
    claim_by = min((entry[name] for entry in mine), default=None)
    if len(task_ids) >= len(request.task_ids):
        return PermitGrant(task_ids, claim_by)
    limit = request.limit
    is_crowded = limit.concurrency is not None and len(document["running"]) >= limit.concurrency
    starts: list[datetime] = []
    if limit.starts is not None and len(document["starts"]) >= limit.starts and not is_crowded:
        starts = [entry["time"] for entry in document["starts"]]
    return PermitGrant(task_ids, claim_by, is_crowded, starts, timedelta(milliseconds=request.window_ms))


def settle(
    taken: Iterable[PermitPool], token: str, claimed: Mapping[str, datetime], lost: Iterable[str]
) -> Operation[None]:
    """Store the claim times of the claimed tasks, and give back the permits of the tasks that were not claimed."""
    ids, given_back = list(claimed), x.literal(list(lost))
    is_lost = {"$and": [{"$eq": ["$$entry.token", token]}, {"$in": ["$$entry.task_id", given_back]}]}

    def kept(entries: x.Expression) -> x.Expression:
        return {"$filter": {"input": entries, "as": "entry", "cond": {"$not": [is_lost]}}}

    index = {"$indexOfArray": [x.literal(ids), "$$entry.task_id"]}
    timed = {"$mergeObjects": ["$$entry", {"time": {"$arrayElemAt": [x.literal(list(claimed.values())), "$$index"]}}]}
    is_claimed = {"$and": [{"$eq": ["$$entry.token", token]}, {"$gte": ["$$index", 0]}]}
    starts = {
        "$map": {
            "input": kept(_STARTS),
            "as": "entry",
            "in": {"$let": {"vars": {"index": index}, "in": {"$cond": [is_claimed, timed, "$$entry"]}}},
        }
    }
    yield places(
        "update_many",
        {"_id": {"$in": [pool.id for pool in taken]}},
        [
            {"$set": {"starts": starts, "running": kept(_RUNNING)}},
            {"$set": {"expire_time": _kept_while_used("$running", MAX_WINDOW_MS)}},
        ],
    )


@dataclass(frozen=True, slots=True)
class HeldPermit:
    """A permit that a run holds."""

    pool: PermitPool
    task_id: str
    token: str


def give_back(held: Sequence[HeldPermit]) -> Operation[None]:
    """Give back the permits of closed runs."""
    yield from _give_back([entry.pool.id for entry in held], [(entry.task_id, entry.token) for entry in held])


def _give_back(pool_ids: Sequence[str], runs: Sequence[tuple[str, str]]) -> Operation[None]:
    gone = x.literal([f"{token} {task_id}" for task_id, token in runs])
    name = {"$concat": ["$$entry.token", " ", "$$entry.task_id"]}
    running = {"$filter": {"input": _RUNNING, "as": "entry", "cond": {"$not": [{"$in": [name, gone]}]}}}
    yield places(
        "update_many",
        {"_id": {"$in": sorted(set(pool_ids))}},
        [{"$set": {"running": running}}, {"$set": {"expire_time": _kept_while_used("$running", MAX_WINDOW_MS)}}],
    )


@dataclass(frozen=True, slots=True)
class Reclaimed:
    """The result of a search for permits of dead runs."""

    has_found: bool
    #: The time until the next lease lapses, or None if no run has a live lease.
    next_lapse: timedelta | None
    #: The tasks whose lapsed runs were to be closed, and the number of tasks that have changed.
    lapsed: Collection[str] = ()
    closed_cnt: int = 0


def reclaim(crowded: Sequence[PermitPool]) -> Operation[Reclaimed]:
    """Give back the permits that ended runs still hold.

    A lapsed run is closed first, so that no late ping can revive it.
    """
    view = {"running": _RUNNING, "now": x.NOW}
    found = yield places("find", {"_id": {"$in": [pool.id for pool in crowded]}}, view)
    entries = [(document["_id"], entry) for document in found for entry in document["running"]]
    if not entries:
        return Reclaimed(has_found=False, next_lapse=None)
    now: datetime = found[0]["now"]
    runs = yield from _runs_of({entry["task_id"] for _, entry in entries})
    held = [run for _, entry in entries if (run := runs.get((entry["task_id"], entry["token"]))) is not None]
    lapsed = {run.task_id for run in held if run.is_running and run.lapses is not None and run.lapses <= now}
    closed_cnt = 0
    if lapsed:
        closed_cnt = yield from _settle_each(lapsed)
        runs |= yield from _runs_of(lapsed)
    dead = []
    for pool_id, entry in entries:
        run = runs.get((entry["task_id"], entry["token"]))
        if entry["claim_by"] + _LATEST < now if run is None else run.is_over:
            dead.append((pool_id, (entry["task_id"], entry["token"])))
    if dead:
        yield from _give_back([pool_id for pool_id, _ in dead], [run for _, run in dead])
    later = [run.lapses - now for run in held if run.is_running and run.lapses is not None and run.lapses > now]
    return Reclaimed(bool(dead), min(later, default=None), lapsed, closed_cnt)


def _settle_each(task_ids: Collection[str]) -> Operation[int]:
    """Close the lapsed runs of these tasks; return the number of changed tasks.

    A malformed or locked task does not hinder the others.
    """
    try:
        return (yield from claims.settle(sorted(task_ids)))
    except DatabaseError:
        closed_cnt = 0
        for task_id in task_ids if len(task_ids) > 1 else ():
            closed_cnt += yield from _settle_each([task_id])
        return closed_cnt


def token_of(run_id: str) -> str:
    """Return the token of the claim that made a run. The token is the first part of the run_id."""
    return run_id.partition("-")[0]


@dataclass(frozen=True, slots=True)
class _Run:
    """The state of a run that has a permit, read from the task's document."""

    task_id: str
    is_running: bool
    lapses: datetime | None
    #: Whether the run's task has ended. In an ended task, a run without a readable lease is not live.
    is_task_final: bool

    @property
    def is_over(self) -> bool:
        return not self.is_running or (self.lapses is None and self.is_task_final)


def _runs_of(task_ids: Collection[str]) -> Operation[dict[tuple[str, str], _Run]]:
    """Return the runs of these tasks by task_id and token."""
    view = {"task_state.status": 1}
    view |= {f"{filters.RUNS}.{field}": 1 for field in ("run_id", "status", "ping_expire_time")}
    found = yield tasks("find", filters.by_ids(sorted(task_ids)), view)
    runs = {}
    for document in found:
        state = document.get("task_state")
        is_final = isinstance(state, dict) and state.get("status") in FINAL
        for run in runs_in(document):
            lapses = run.get("ping_expire_time")
            runs[document["_id"], token_of(str(run.get("run_id")))] = _Run(
                document["_id"],
                run.get("status") == RunStatus.RUNNING.value,
                lapses if isinstance(lapses, datetime) else None,
                is_final,
            )
    return runs
