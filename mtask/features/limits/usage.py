"""Reads pools of permits for those who explain them: who has the permits, and who waits for one in which worker.

Nothing is decided here, because a pool changes with each request. What is malformed is left out, as requests do.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any

from mtask.features.limits.operations import MAX_WAITING, PermitPool
from mtask.kernel.document.status import FINAL, RunStatus
from mtask.kernel.document.task import runs_in
from mtask.kernel.driver.operation import Operation, places, tasks
from mtask.kernel.operations.claim import token_of
from mtask.kernel.statements import expressions as x
from mtask.kernel.statements import filters
from mtask.search.order import end_of_prefix

Document = dict[str, Any]
#: The most pools of a queue that are looked through for those that are in use.
_LOOKED_THROUGH = 1_000
#: An instant further ahead than this is of no request.
_ABSURD = timedelta(minutes=1)
#: The place of a task in the order of a pool, the best one first. Only keys of one pool can be compared.
Key = tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Held:
    """A permit that is in use."""

    task_id: str
    token: str
    claim_by: datetime


@dataclass(frozen=True, slots=True)
class Listed:
    """A task that a pool lists as waiting."""

    task_id: str
    key: Key
    tenant: str


@dataclass(frozen=True, slots=True)
class Waiter:
    """A worker in which tasks wait for a permit."""

    worker_id: str
    until: datetime  #: the entry holds until then
    count: int  #: the number of tasks that it lists
    tasks: Sequence[Listed]  #: the first ones, the best one first


@dataclass(frozen=True, slots=True)
class PoolContent:
    """What a pool holds."""

    pool: PermitPool
    running: Sequence[Held]
    #: The times of the starts that are counted. The time of a claim under way lies ahead.
    starts: Sequence[datetime]
    waiters: Sequence[Waiter]  #: also those whose entries no longer hold
    #: The number of each tenant's last turn. None: the tenants take no turns.
    turns: Mapping[str, float] | None
    update_time: datetime | None  #: the time of the last request, or return of permits
    now: datetime  #: the server's time

    @property
    def asking(self) -> list[Waiter]:
        """The workers whose entries hold."""
        return [waiter for waiter in self.waiters if self.now < waiter.until]

    def key(self, rank: Key, *, tenant: str, index: int) -> Key:
        """Return the key of a task. `index`: the number of its tenant's tasks that go before it."""
        if self.turns is None:
            return rank
        begins, *rest = rank
        return (begins, index, self.turns.get(tenant, 0), *rest)


def read(pools: Collection[PermitPool]) -> Operation[dict[PermitPool, PoolContent]]:
    """Return what these pools hold. A pool that no task has ever asked, or not for long, is left out."""
    ids = [pool.id for pool in pools]
    found = yield places("find", {"_id": {"$in": ids}}, _view(MAX_WAITING))
    return {content.pool: content for content in _contents(found)}


def of_queue(queue: str, most: int) -> Operation[list[PoolContent]]:
    """Return the pool of a queue and those in it that are in use: where most tasks wait, first. `most`: of the latter.

    Of each worker, only the best task is told.
    """
    beginning = json.dumps([queue], ensure_ascii=False)[:-1] + ","
    narrow = {"_id": {"$gte": beginning, "$lt": end_of_prefix(beginning)}}
    used = {"$add": [_size("$running"), _size("$starts"), _size("$start_times")]}
    waits = {"$sum": {"$map": {"input": _array("$waiting"), "as": "worker", "in": _size("$$worker.tasks")}}}
    stages = [
        {"$match": narrow},
        {"$limit": _LOOKED_THROUGH},
        {"$addFields": {"_used": used, "_waits": waits}},
        {"$match": {"$expr": {"$gt": [{"$add": ["$_used", "$_waits"]}, 0]}}},
        {"$sort": {"_waits": -1, "_used": -1, "_id": 1}},
        {"$limit": most},
        {"$project": _view(1)},
    ]
    own = yield places("find", {"_id": PermitPool(queue).id}, _view(1))
    return [*_contents(own), *_contents((yield places("rows", stages)))]


@dataclass(frozen=True, slots=True)
class Holder:
    """The run that a permit is for."""

    worker_id: str
    is_over: bool
    end_time: datetime | None
    tenant: str | None = None  #: of its task


def holders(held: Collection[Held]) -> Operation[dict[tuple[str, str], Holder]]:
    """Return the runs of these permits by task_id and token, as far as they exist."""
    if not held:
        return {}
    fields = ("run_id", "worker_id", "status", "success_time", "fail_time")
    view = {"tenant": 1, "task_state.status": 1, **{f"{filters.RUNS}.{field}": 1 for field in fields}}
    found = yield tasks("find", filters.by_ids(sorted({each.task_id for each in held})), view)
    runs: dict[tuple[str, str], Holder] = {}
    for document in found:
        state = document.get("task_state")
        is_final = isinstance(state, dict) and state.get("status") in FINAL
        for run in runs_in(document):
            times = [time for field in fields[3:] if isinstance(time := run.get(field), datetime)]
            is_over = is_final or run.get("status") != RunStatus.RUNNING.value
            name = (document["_id"], token_of(str(run.get("run_id"))))
            runs[name] = Holder(str(run.get("worker_id")), is_over, max(times, default=None), document.get("tenant"))
    return runs


def _array(path: str) -> x.Expression:
    return {"$cond": [{"$isArray": [path]}, path, []]}


def _size(path: str) -> x.Expression:
    return {"$size": _array(path)}


def _view(most: int) -> Document:
    """Return the view of a pool with this number of waiting tasks of each worker."""
    worker = {
        "worker_id": "$$worker.worker_id",
        "until": "$$worker.until",
        "count": _size("$$worker.tasks"),
        "tasks": {"$slice": [_array("$$worker.tasks"), most]},
    }
    waiting = {"$map": {"input": _array("$waiting"), "as": "worker", "in": worker}}
    names = ("running", "starts", "start_times", "turns", "call", "quiet_time")
    return {**dict.fromkeys(names, 1), "waiting": waiting, "now": x.NOW}


def pool_of(pool_id: object) -> PermitPool | None:
    """Return the pool with this `_id`; None: it is not one."""
    try:
        pool = PermitPool.of_id(str(pool_id))
    except (ValueError, TypeError):
        return None
    is_sound = all(isinstance(part, str | None) for part in (pool.queue, pool.key, pool.tenant))
    return pool if is_sound and pool.id == pool_id else None


def _contents(documents: Iterable[Document]) -> list[PoolContent]:
    found = [(pool_of(document["_id"]), document) for document in documents]
    return [_content(pool, document) for pool, document in found if pool is not None]


def _content(pool: PermitPool, document: Document) -> PoolContent:
    now: datetime = document["now"]
    running = [
        Held(entry["task_id"], entry["token"], entry["claim_by"])
        for entry in _sound(document.get("running"), "claim_by", now, "task_id", "token")
    ]
    begun = document.get("start_times")
    starts = [time for time in (begun if isinstance(begun, list) else ()) if _is_near(time, now)]
    starts += [entry["time"] for entry in _sound(document.get("starts"), "time", now, "task_id", "token")]
    is_fair = isinstance(document.get("turns"), list)
    turns = {
        entry["tenant"]: entry["turn"]
        for entry in _entries(document.get("turns"))
        if isinstance(entry.get("tenant"), str) and isinstance(entry.get("turn"), int | float)
    }
    times = [time for time in (document.get("quiet_time"), _called(document)) if isinstance(time, datetime)]
    updated = max(times, default=None)
    content = PoolContent(pool, running, starts, (), turns if is_fair else None, updated, now)
    asking = list(_sound(document.get("waiting"), "until", now, "worker_id"))
    listed = [list(_listed(entry["tasks"])) for entry in asking]
    keys = _keys({each.task_id: each for tasks in listed for each in tasks}, content)
    waiters = [
        Waiter(entry["worker_id"], entry["until"], int(entry["count"]), _keyed(tasks, keys))
        for entry, tasks in zip(asking, listed, strict=True)
    ]
    return replace(content, waiters=waiters)


def _called(document: Document) -> datetime | None:
    """Return the time at which the pool last called workers."""
    try:
        called = datetime.fromisoformat(str(document.get("call")).partition(" ")[0])
    except ValueError:
        return None
    return called if called.tzinfo else None


def _entries(value: object) -> list[Document]:
    return [entry for entry in value if isinstance(entry, dict)] if isinstance(value, list) else []


def _is_near(time: object, now: datetime) -> bool:
    return isinstance(time, datetime) and time < now + _ABSURD


def _sound(value: object, instant: str, now: datetime, *texts: str) -> Iterable[Document]:
    """Yield the entries of an array that have these texts, and an instant that does not lie in an absurd future."""
    for entry in _entries(value):
        if _is_near(entry.get(instant), now) and all(isinstance(entry.get(t), str) for t in texts):
            yield entry


def _listed(entries: object) -> Iterable[Listed]:
    """Yield the tasks that a worker lists, each with its rank as its key."""
    for entry in _entries(entries):
        task_id, rank, tenant = entry.get("task_id"), entry.get("rank"), entry.get("tenant")
        if not isinstance(task_id, str) or not isinstance(rank, list) or len(rank) != 3:
            continue
        begins, priority, time = rank
        if isinstance(begins, int | float) and isinstance(priority, int | float) and isinstance(time, datetime):
            key = (begins, priority, time.timestamp())
            yield Listed(task_id, key, tenant if isinstance(tenant, str) else "")


def _keys(tasks: Mapping[str, Listed], content: PoolContent) -> dict[str, Key]:
    """Return the keys of the listed tasks of all workers. A tenant's are numbered in the order of their ranks."""
    counts: Counter[str] = Counter()
    keys = {}
    for each in sorted(tasks.values(), key=lambda each: each.key):
        keys[each.task_id] = content.key(each.key, tenant=each.tenant, index=counts[each.tenant])
        counts[each.tenant] += 1
    return keys


def _keyed(tasks: Iterable[Listed], keys: Mapping[str, Key]) -> list[Listed]:
    return sorted((replace(each, key=keys[each.task_id]) for each in tasks), key=lambda each: each.key)
