"""Permits limit the runs of a queue, of one limit_key or tenant in it, or of a tenant: the runs at once, and the starts
in a window of time.

The collection `places` has one document for each limited queue, key or tenant. This document is a pool of permits.
Before a claim, the worker takes a permit with one update, and the server counts the permits in this update. The claim
is only valid until `claim_by`. So no run is live without its permit, even if messages are lost.

A worker that closes a run in the task's document then gives back the run's permit for concurrency. If that worker dies
first, another worker reclaims the permit when no permit is free. The lease alone decides which runs are live.

A permit for a start counts from the time at which the handler began. Until that time is known, the permit counts from
`claim_by`, the latest possible time of the claim.

**The next permit goes to the task of the best rank, whichever worker knows it.** The pool lists the best tasks that
wait in each worker (`waiting`). A request gets only the permits that no better waiting task of another worker needs. An
update that leaves permits to such tasks writes `call`, the names of their workers, and these hear of it by their change
streams. Any other update sets `quiet_time`, so that no stream tells of it.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from pymongo import ReturnDocument

from mtask.errors import DatabaseError, DuplicateKey
from mtask.features.controls.rules import Limit
from mtask.features.limits import statements
from mtask.kernel.document.rules import Rank
from mtask.kernel.document.status import FINAL, RunStatus
from mtask.kernel.document.task import SCHEMA_VERSION, runs_in
from mtask.kernel.driver.operation import Operation, places, tasks, viewed
from mtask.kernel.operations import claim as claims
from mtask.kernel.statements import expressions as x
from mtask.kernel.statements import filters

Document = dict[str, Any]
#: The most waiting tasks of one worker that a pool lists.
MAX_WAITING = 100
#: The longest delay between `claim_by` and the write of a claim that began before `claim_by`. A run that is still
#: missing after this delay will never come: the server ends a claim after 5 s at the latest.
_LATEST = timedelta(seconds=6)
#: How long after the lapse of a run its permit is left to the task of that run. Who rescues the task takes the permit
#: over, and no rescue is to take longer. Given back at once, it would go to another task that waits.
RESCUE = timedelta(milliseconds=500)
_NO_TIME = timedelta(0)
_RACES = 5
#: The kinds of limits that may hold for one task: of its limit_key, of its tenant in the queue, of its tenant, and of
#: its queue.
KINDS = 4


@dataclass(frozen=True, slots=True)
class PermitPool:
    """The permits of a queue, of one limit_key or one tenant in this queue, or of one tenant in all queues.

    A limit_key of a tenant's task is that tenant's own: equal keys of two tenants have two pools.
    """

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

    @property
    def limited_by(self) -> str:
        """The field of a control that holds this pool's limit: of its queue's control, or else of its tenant's."""
        if self.key is not None:
            return "key_limit"
        return "limit" if self.queue is None or self.tenant is None else "tenant_limit"

    @classmethod
    def of_task(cls, queue: str, key: str | None, tenant: str | None) -> tuple[PermitPool | None, ...]:
        """Return the pool of each of the `KINDS` from which such a task may need a permit, the narrowest first.

        A task without a permit of its limit_key must not take a permit of its queue. None: there is none of this kind.
        """
        return (
            None if key is None else cls(queue, key, tenant),
            None if tenant is None else cls(queue, tenant=tenant),
            None if tenant is None else cls(None, tenant=tenant),
            cls(queue),
        )

    @classmethod
    def of_id(cls, pool_id: str) -> PermitPool:
        """Return the pool whose document has this `_id`."""
        return cls(*json.loads(pool_id))


@dataclass(frozen=True, slots=True)
class Wanted:
    """A task that needs a permit. Without a rank, it goes behind those of others."""

    task_id: str
    rank: Rank | None = None
    tenant: str = ""
    #: Whether the task wants one worker: while a claim of it is under way, nobody else gets a permit for it.
    is_single: bool = True

    def document(self) -> Document:
        """Return the form in which pools hold it."""
        if self.rank is None:
            return {"task_id": self.task_id, "is_single": self.is_single}
        rank = list(self.rank)
        tenant = {"tenant": self.tenant} if self.tenant else {}
        return {"task_id": self.task_id, "is_single": self.is_single, "rank": rank, **tenant}


@dataclass(frozen=True, slots=True)
class PermitRequest:
    """A request for permits of one pool. It also replaces what the pool lists of the tasks that wait in the worker."""

    pool: PermitPool
    limit: Limit
    wanted: Sequence[Wanted]  #: the tasks, the most urgent first
    most: int | None = None  #: the most permits to take; None: one for each task
    waiting: Sequence[Wanted] = ()  #: further tasks that wait in this worker, the most urgent first
    #: How many of the tasks that get no permit this worker will ask for at once: the best ones, as long as it has room.
    at_hand: int = 0
    does_wait: bool = True  #: whether the pool is to list the tasks that get no permit
    is_fair: bool = False  #: whether the tenants of the queue take turns

    def document(self) -> Document:
        """Return the request in the form that the update reads."""
        return {
            "concurrency": self.limit.concurrency,
            "starts": self.limit.starts,
            "window_ms": self.limit.window_ms or 0,
            "wanted": [task.document() for task in self.wanted],
            "most": len(self.wanted) if self.most is None else self.most,
            "waiting": [task.document() for task in self.waiting],
            "at_hand": self.at_hand,
            "kept": MAX_WAITING if self.does_wait else 0,
            "is_fair": self.is_fair,
        }


@dataclass(frozen=True, slots=True)
class PermitGrant:
    """The tasks that got a permit; and for the other tasks, the time at which another start may be permitted."""

    task_ids: frozenset[str]
    claim_by: datetime | None  #: the tasks that got a permit must be claimed before this instant
    #: The earliest time of a handler's start, by the task's id. If it is left out, the handler may start at once.
    not_before: Mapping[str, datetime] = field(default_factory=dict)
    is_crowded: bool = False  #: runs hold all permits, and some of these runs may be dead
    #: Whether tasks wait, perhaps in other workers, that may go before the refused ones.
    has_rivals: bool = False
    #: The number of other workers of which the pool lists tasks.
    peer_cnt: int = 0
    #: The number of permits that were left for such tasks.
    left: int = 0
    #: The times of the starts that use up the permits. A start without a settled time has its latest possible time
    #: here. `starts` is empty if starts do not use up the permits. `window` says how long each start counts.
    starts: Sequence[datetime] = ()
    window: timedelta = timedelta(0)
    surplus: int = 0  #: the number of starts beyond the limit, if the limit was lowered
    #: The tasks that got no permit because a claim of another worker is under way.
    under_way: frozenset[str] = frozenset()
    #: Whether the pool lists tasks that wait in this worker.
    is_listed: bool = False
    #: In a queue with fair turns: the number of turns so far, and the number of each tenant's last turn.
    turn: int = 0
    turns: Mapping[str, int] = field(default_factory=dict)

    @property
    def is_open(self) -> bool:
        """Whether permits are free, but for other tasks."""
        return self.left > 0

    @property
    def is_full(self) -> bool:
        """Whether no more permits can be had now."""
        return self.is_crowded or self.has_rivals or bool(self.starts)

    def next_time(self, now: datetime) -> datetime | None:
        """Return the time at which another start leaves the window, so that one more is permitted.

        Return None if starts do not use up the permits, or if the start that is awaited has no settled time yet.
        """
        awaited = self._awaited[:1]
        return awaited[0] + self.window if awaited and awaited[0] <= now else None

    def count_within(self, time: timedelta) -> int:
        """Return the number of starts that leave the window within this time after the next one."""
        awaited = self._awaited
        return sum(start <= awaited[0] + time for start in awaited)

    @property
    def _awaited(self) -> Sequence[datetime]:
        return sorted(self.starts)[self.surplus :]


NONE = PermitGrant(frozenset(), None)


def take(
    requests: Sequence[PermitRequest], worker_id: str, token: str, dead: Sequence[HeldPermit] = ()
) -> Operation[dict[PermitPool, PermitGrant]]:
    """Grant the requested permits, as far as they are free. `token` is the claim's new random text.

    `dead`: permits of closed runs, which are returned first. A request without tasks only replaces what the pool lists
    of this worker.

    Permits of one pool take one round trip. Permits of several pools take two, and three more if a pool is used for the
    first time.
    """
    names = [statements.name_of(entry.task_id, entry.token) for entry in dead]
    pipeline = statements.take({each.pool.id: each.document() for each in requests}, worker_id, token, names)
    ids = [request.pool.id for request in requests]
    view = statements.answer(token, sorted({task.task_id for request in requests for task in request.wanted}))
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
        request.pool: _granted(request, found[request.pool.id], worker_id, token)
        for request in requests
        if request.pool.id in found
    }


def _take_one(pool_id: str, pipeline: Any, view: Document) -> Operation[Document]:
    for _ in range(_RACES):
        try:
            call = places(
                "find_one_and_update",
                {"_id": pool_id},
                pipeline,
                upsert=True,
                projection=view,
                return_document=ReturnDocument.AFTER,
            )
            document: Document = yield from viewed(call, "listed")
        except DuplicateKey:
            continue  # another worker made the document at the same time
        return document
    raise DuplicateKey(f"the permits of {pool_id} are being made by many at once; try again")


def _take_several(ids: Sequence[str], pipeline: Any, view: Document) -> Operation[dict[str, Document]]:
    yield places("update_many", {"_id": {"$in": list(ids)}}, pipeline)
    documents = yield places("find", {"_id": {"$in": list(ids)}}, view)
    return {document["_id"]: document for document in documents}


def _granted(request: PermitRequest, document: Document, worker_id: str, token: str) -> PermitGrant:
    counted, name = ("starts", "time") if request.limit.concurrency is None else ("running", "claim_by")
    mine = [entry for entry in document[counted] if entry.get("token") == token]
    task_ids = frozenset(entry["task_id"] for entry in mine)
    claim_by = min((entry[name] for entry in mine), default=None)
    limit = request.limit
    waiting = document["listed"]
    is_crowded = limit.concurrency is not None and document["running_cnt"] >= limit.concurrency
    starts: list[datetime] = []
    if limit.starts is not None and len(document["times"]) >= limit.starts and not is_crowded:
        starts = document["times"]
    others = {entry["task_id"] for entry in document[counted] if entry.get("token") != token}
    under_way = {task.task_id for task in request.wanted if task.is_single and task.task_id in others} - task_ids
    is_refused = len(task_ids) + len(under_way) < len(request.wanted)
    return PermitGrant(
        task_ids,
        claim_by,
        {
            entry["task_id"]: entry["not_before"]
            for entry in document["starts"]
            if entry.get("token") == token and "not_before" in entry
        },
        is_crowded,
        is_refused and any(entry["task_cnt"] for entry in waiting),
        sum(entry["worker_id"] != worker_id and entry["task_cnt"] > 0 for entry in waiting),
        int(document.get("left", 0)),
        starts,
        timedelta(milliseconds=limit.window_ms or 0),
        max(0, len(starts) - (limit.starts or 0)),
        frozenset(under_way),
        any(entry["worker_id"] == worker_id for entry in waiting),
        int(document.get("turn", 0)),
        {str(of["tenant"]): int(of["turn"]) for of in document.get("turns", ())},
    )


def settle(
    taken: Iterable[PermitPool],
    worker_id: str,
    begun: Mapping[tuple[str, str], datetime],
    lost: Iterable[tuple[str, str]] = (),
    at_hand: int = 0,
) -> Operation[None]:
    """Store the times of handlers' starts, and give back the permits of the tasks that were not claimed.

    Both name a permit by its task and its token. `at_hand`: see `give_back`.
    """
    times = {statements.name_of(*run): time for run, time in begun.items()}
    pipeline = statements.settle(times, [statements.name_of(*run) for run in lost], worker_id, at_hand)
    yield places("update_many", {"_id": {"$in": sorted(pool.id for pool in taken)}}, pipeline)


@dataclass(frozen=True, slots=True)
class HeldPermit:
    """A permit that a run holds."""

    pool: PermitPool
    task_id: str
    token: str


def give_back(held: Sequence[HeldPermit], worker_id: str, at_hand: int = 0) -> Operation[None]:
    """Give back the permits of closed runs, and call the workers whose tasks may have them.

    `at_hand`: the number of the tasks listed for this worker that it will ask for at once, the best ones. For these,
    nobody is called.
    """
    runs = [(entry.task_id, entry.token) for entry in held]
    yield from _give_back([entry.pool.id for entry in held], worker_id, runs, at_hand)


def _give_back(
    pool_ids: Sequence[str], worker_id: str, runs: Sequence[tuple[str, str]], at_hand: int = 0
) -> Operation[None]:
    pipeline = statements.give_back([statements.name_of(*run) for run in runs], worker_id, at_hand)
    yield places("update_many", {"_id": {"$in": sorted(set(pool_ids))}}, pipeline)


@dataclass(frozen=True, slots=True)
class Reclaimed:
    """The result of a search for permits of dead runs."""

    has_found: bool
    #: The time until the permit of the next lapsed run may be given back; None: no run holds one by its lease.
    next_lapse: timedelta | None
    #: The tasks whose lapsed runs were to be closed, and the number of tasks that have changed.
    lapsed: Collection[str] = ()
    closed_cnt: int = 0


def reclaim(crowded: Sequence[PermitPool], worker_id: str) -> Operation[Reclaimed]:
    """Give back the permits that ended runs still hold, but those of lapsed runs only after `RESCUE`.

    A lapsed run is closed first, so that no late ping can revive it.
    """
    view = {"running": statements.RUNNING, "now": x.NOW}
    found = yield places("find", {"_id": {"$in": [pool.id for pool in crowded]}}, view)
    entries = [(document["_id"], entry) for document in found for entry in document["running"]]
    if not entries:
        return Reclaimed(has_found=False, next_lapse=None)
    now: datetime = found[0]["now"]
    runs = yield from _runs_of({entry["task_id"] for _, entry in entries})
    held = [run for _, entry in entries if (run := runs.get((entry["task_id"], entry["token"]))) is not None]
    lapsed = {run.task_id for run in held if run.is_running and run.until_given_up(now) == _NO_TIME}
    closed_cnt = 0
    if lapsed:
        closed_cnt = yield from _settle_each(lapsed)
        runs |= yield from _runs_of(lapsed)
    dead = []
    for pool_id, entry in entries:
        run = runs.get((entry["task_id"], entry["token"]))
        if entry["claim_by"] + _LATEST < now if run is None else run.is_over and not run.until_given_up(now):
            dead.append((pool_id, (entry["task_id"], entry["token"])))
    if dead:
        yield from _give_back([pool_id for pool_id, _ in dead], worker_id, [run for _, run in dead])
    later = [left for run in held if (left := run.until_given_up(now))]
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


@dataclass(frozen=True, slots=True)
class _Run:
    """The state of a run that has a permit, read from the task's document."""

    task_id: str
    is_running: bool
    has_lapsed: bool  #: whether it was closed because its lease had lapsed
    lapses: datetime | None
    #: Whether the run's task has ended. In an ended task, a run without a readable lease is not live.
    is_task_final: bool

    @property
    def is_over(self) -> bool:
        return not self.is_running or (self.lapses is None and self.is_task_final)

    def until_given_up(self, now: datetime) -> timedelta | None:
        """Return how long its lease, and a rescue after it, keep its permit; None: nothing of this kind keeps it."""
        if self.lapses is None or not (self.is_running or self.has_lapsed):
            return None
        return max(_NO_TIME, self.lapses + RESCUE - now)


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
            runs[document["_id"], claims.token_of(str(run.get("run_id")))] = _Run(
                document["_id"],
                run.get("status") == RunStatus.RUNNING.value,
                run.get("status") == RunStatus.TIMEOUT.value,
                lapses if isinstance(lapses, datetime) else None,
                is_final,
            )
    return runs
