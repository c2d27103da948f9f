"""Operations on schedules: store, change, find and fire them.

To fire a schedule takes two steps. First, one guarded update sets the schedule's next_fire_time and lists its firings
as pending. Second, the tasks of these firings are published, and the firings are removed from the list. The key of each
task is made from the time of its firing.

If several processes try the update, only one of them succeeds. If this process dies before the second step, another
process takes the second step. Because of the keys, each firing still publishes only one task.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from mtask.database import setup
from mtask.errors import DatabaseError, DuplicateKey, OperationFailed, ScheduleExists, ScheduleNotFound
from mtask.features.schedules.rules import Pending, Plan, Schedule
from mtask.kernel.document.options import MAX_COUNT
from mtask.kernel.document.status import FINAL
from mtask.kernel.driver.operation import Operation, apart, command, for_everybody, schedules, server_time, tasks
from mtask.kernel.operations.publish import NewTask
from mtask.kernel.statements import expressions as x
from mtask.kernel.statements import filters
from mtask.kernel.statements import publish as requests

Document = dict[str, Any]
_STATE = "schedule_state"
_NEXT = f"{_STATE}.next_fire_time"
_PENDING = f"{_STATE}.pending"
#: The number of tries to change a schedule. Each try reads the schedule, then writes it. A try fails if another process
#: has changed the schedule in between.
_RACES = 20
#: The fields that a schedule passes on to its tasks.
_PASSED_ON = ("tenant", "queue", "params", "task_option", "sealed", "version", "lookup")
#: The most tasks that one command publishes.
_AT_ONCE = 100

#: A function of the server's time and the stored document. It returns the document to store, or None if nothing
#: changes.
Changed = Callable[[datetime, Document | None], Document | None]
ChangedExisting = Callable[[datetime, Document], Document | None]


def put(schedule_id: str, changed: Changed, *, must_be_new: bool) -> Operation[Document]:
    """Store a new schedule or replace an existing one; return the stored schedule. Raises ScheduleExists.

    Whose a schedule is, no change alters: one of another tenant, or of nobody, stays as it is.
    """
    yield from for_everybody(apart(setup.make_sure(["schedules"])))
    for _ in range(_RACES):
        now = yield from apart(server_time())
        former: Document | None = yield schedules("find_one", {"_id": schedule_id})
        if former is not None and must_be_new:
            raise ScheduleExists(schedule_id)
        document = changed(now, former)
        if document is None and former is not None:
            return former
        assert document is not None
        if former is not None:
            _must_be_of(document.get("tenant"), former)
        if (yield from (_insert(document) if former is None else _replace(former, document))):
            return document
        if former is None:  # a client of a tenant has not seen one that is not the tenant's
            taken = yield schedules("find_one", {"_id": schedule_id}, {"tenant": 1}).for_everybody()
            if taken is not None:
                _must_be_of(document.get("tenant"), taken)
    raise OperationFailed(f"schedule {schedule_id!r} is being changed by many at once; try again")


def change(schedule_id: str, changed: ChangedExisting) -> Operation[Document]:
    """Replace a schedule; return the stored schedule. Raises ScheduleNotFound."""

    def existing(now: datetime, former: Document | None) -> Document | None:
        if former is None:
            raise ScheduleNotFound(schedule_id)
        return changed(now, former)

    return (yield from put(schedule_id, existing, must_be_new=False))


def _must_be_of(tenant: str | None, stored: Document) -> None:
    if stored.get("tenant") != tenant:
        raise ScheduleExists(stored["_id"], not_of=tenant, is_others=True)


def _insert(document: Document) -> Operation[bool]:
    document["revision"] = 1
    try:
        yield schedules("insert_one", document)
    except DuplicateKey:
        return False
    return True


def _replace(former: Document, document: Document) -> Operation[bool]:
    """Replace the former document; return False if another process has changed or removed it meanwhile."""
    revision = former.get("revision")
    document["revision"] = revision + 1 if isinstance(revision, int) and 0 < revision < MAX_COUNT else 1
    # The first revision of each is 1: meanwhile this one may have been removed, and another tenant's added.
    guard = {"_id": former["_id"], "revision": revision, "tenant": former.get("tenant")}
    result = yield schedules("replace_one", guard, document)
    return bool(result.matched_count)


def get(schedule_id: str) -> Operation[Document]:
    """Return a schedule; raise ScheduleNotFound."""
    found: Document | None = yield schedules("find_one", {"_id": schedule_id})
    if found is None:
        raise ScheduleNotFound(schedule_id)
    return found


def tenant_of(schedule_id: str) -> Operation[Any]:
    """Return the tenant of a schedule. None: it has none, or there is no such schedule."""
    found: Document | None = yield schedules("find_one", {"_id": schedule_id}, {"tenant": 1})
    return None if found is None else found.get("tenant")


def every() -> Operation[list[Document]]:
    """Return all schedules, ordered by id."""
    found: list[Document] = yield schedules("find", {}, sort=[("_id", 1)])
    return found


def remove(schedule_id: str) -> Operation[bool]:
    """Remove a schedule; return whether it existed. The tasks that it published stay."""
    result = yield schedules("delete_one", {"_id": schedule_id})
    return bool(result.deleted_count)


@dataclass(frozen=True, slots=True)
class PageEnd:
    """The position at which one page of coming schedules ends and the next page begins.

    A field is None if there are no more schedules of its kind.
    """

    #: The next_fire_time and the id of the last schedule on the page among those stored by clients.
    fires: tuple[datetime, str] | None
    #: The id of the last schedule on the page among those with pending firings.
    begun: str | None


@dataclass(frozen=True, slots=True)
class Coming:
    """One page of the schedules that fire soon. The server's time is None if the page is empty."""

    documents: list[Document]
    server_time: datetime | None
    #: The end of this page, or None if it is the last page.
    end: PageEnd | None


def coming(
    horizon_ms: int,
    limit: int,
    declared: Sequence[str] = (),
    left_out: Sequence[str] = (),
    after: PageEnd | None = None,
) -> Operation[Coming]:
    """Return a page of the schedules that fire within the horizon or have pending firings.

    Clients store some schedules, and apps declare others. The schedules of clients come in pages of at most `limit`,
    the earliest first. `after` is the end of the former page. The schedules of apps all come with the first page, but
    only those with an id in `declared`. `left_out` holds ids to exclude.
    """
    kinds: dict[str, list[Document]] = {}
    if after is None or after.fires is not None:
        kinds["fires"] = _fires(horizon_ms, limit, left_out, None if after is None else after.fires)
    if after is None or after.begun is not None:
        kinds["begun"] = _begun(limit, declared, left_out, None if after is None else after.begun)
    if after is None and declared:
        wanted = sorted(set(declared).difference(left_out))
        kinds["declared"] = [{"$match": {"_id": {"$in": wanted}, "source": "app", **_is_soon(horizon_ms)}}]
    first, *others = ([*stages, {"$set": {"kind": kind}}] for kind, stages in kinds.items())
    united = [{"$unionWith": {"coll": "schedules", "pipeline": stages}} for stages in others]
    found: list[Document] = yield schedules("rows", [*first, *united, {"$set": {"now": x.NOW}}])
    fires, begun = ([document for document in found if document["kind"] == kind] for kind in ("fires", "begun"))
    end = PageEnd(
        (fires[-1]["schedule_state"]["next_fire_time"], fires[-1]["_id"]) if len(fires) == limit else None,
        begun[-1]["_id"] if len(begun) == limit else None,
    )
    return Coming(
        list({document["_id"]: document for document in found}.values()),
        found[0]["now"] if found else None,
        None if end == PageEnd(None, None) else end,
    )


def _is_soon(horizon_ms: int) -> Document:
    until = {"$expr": {"$lte": [f"${_NEXT}", x.add_ms(x.NOW, horizon_ms)]}}
    # None matches a schedule without `paused`. Services in other languages may leave this field out.
    return {"paused": {"$in": [False, None]}, _NEXT: {"$type": "date"}, **until}


def _fires(horizon_ms: int, limit: int, left_out: Sequence[str], after: tuple[datetime, str] | None) -> list[Document]:
    """Return the pipeline stages that find the schedules stored by clients.

    Another stage finds the schedules of apps by their ids. So a schedule that no app declares any more costs nothing.
    """
    wanted: Document = {"source": {"$in": ["client", None]}, **_is_soon(horizon_ms), "_id": _other_ids(left_out)}
    if after is not None:
        time, schedule_id = after
        wanted[_NEXT] = {"$type": "date", "$gte": time}
        wanted["$or"] = [{_NEXT: {"$gt": time}}, {"_id": {"$gt": schedule_id}}]
    return [{"$match": wanted}, {"$sort": {_NEXT: 1, "_id": 1}}, {"$limit": limit}]


def _begun(limit: int, declared: Sequence[str], left_out: Sequence[str], after: str | None) -> list[Document]:
    ours = [{"source": {"$in": ["client", None]}}, {"source": "app", "_id": {"$in": list(declared)}}]
    wanted = {f"{_PENDING}.0": {"$exists": True}, "_id": _other_ids(left_out, after), "$or": ours}
    return [{"$match": wanted}, {"$sort": {"_id": 1}}, {"$limit": limit}]


def _other_ids(left_out: Sequence[str], after: str | None = None) -> Document:
    """Match all ids except those in `left_out`. With `after`, match only greater ids. An id must be a string."""
    beyond = {"$gt": after} if after is not None else {}
    return {"$type": "string", "$nin": list(left_out), **beyond}


def is_finished(task_id: str) -> Operation[bool]:
    """Whether a task has a final status or no longer exists."""
    found = yield tasks("find_one", {"_id": task_id, "task_state.status": {"$nin": FINAL}}, {"_id": 1})
    return found is None


@dataclass(frozen=True, slots=True)
class Firing:
    """One firing: its times, and the task that it publishes."""

    pending: Pending
    task: NewTask


def advance(schedule: Schedule, plan: Plan, firings: Sequence[Firing]) -> Operation[list[Firing] | None]:
    """Set a schedule's next_fire_time and list firings as pending. Return these firings.

    Return None if the schedule has changed meanwhile.

    With overlap "skip", at most the newest firing is listed. If the task of the last firing has not finished, no firing
    is listed.
    """
    state = schedule.schedule_state
    made = list(firings)
    if schedule.overlap == "skip" and made:
        is_free = state.last_task_id is None or (yield from is_finished(state.last_task_id))
        made = made[-1:] if is_free else []
    changed: Document = {_NEXT: plan.next_fire_time}
    if made:
        changed |= {
            f"{_STATE}.last_fire_time": made[-1].pending.fire_time,
            f"{_STATE}.last_task_id": made[-1].task.task_id,
        }
    update: Document = {
        "$set": changed,
        "$inc": {
            "revision": 1,
            f"{_STATE}.fired_cnt": len(made),
            f"{_STATE}.skipped_cnt": len(firings) - len(made),
        },
        "$push": {_PENDING: {"$each": [firing.pending.model_dump() for firing in made]}},
    }
    guard = {"_id": schedule.id, "revision": schedule.revision, "paused": {"$ne": True}}
    result = yield schedules("update_one", guard, update)
    return made if result.matched_count else None


def publish(schedule_id: str, firings: Sequence[Firing], since: datetime | None = None) -> Operation[list[Firing]]:
    """Publish the tasks of those firings that are still pending, and remove the firings from the list.

    Return the firings that have published nothing, because somebody else had published a task under their keys. `since`
    is a time at which none of the firings was pending. Without it, their own times stand for it.

    The server checks that a firing is pending while it inserts the task. This matters if this process was frozen:
    another process may have published the task, and the task may have been finished and removed since. Because of the
    check, the task is not published again.
    """
    taken: list[Firing] = []
    for start in range(0, len(firings), _AT_ONCE):
        group = firings[start : start + _AT_ONCE]
        # Read concern "local" reads the newest state. Another process may just have removed firings from the list.
        yield command(
            "aggregate",
            "schedules",
            pipeline=_published(schedule_id, group),
            cursor={},
            readConcern={"level": "local"},
            writeConcern={"w": "majority", "j": True},
        )
        times = [firing.pending.fire_time for firing in group]
        crossed_off = {"$pull": {_PENDING: {"fire_time": {"$in": times}}}, "$inc": {"revision": 1}}
        yield schedules("update_one", {"_id": schedule_id, f"{_PENDING}.fire_time": {"$in": times}}, crossed_off)
        with suppress(DatabaseError):  # the firings are made
            taken += yield from _taken(group, since)
    return taken


def _taken(firings: Sequence[Firing], since: datetime | None) -> Operation[list[Firing]]:
    """Return those of these firings whose tasks were there before them. Tasks of firings are made later."""
    before = {firing.task.task_id: since or firing.pending.fire_time for firing in firings}
    is_older = {"task_state.create_time": {"$lt": max(before.values())}}
    found = yield tasks("find", {**filters.by_ids([*before]), **is_older}, {"task_state.create_time": 1}, hint="_id_")
    created = {document["_id"]: document["task_state"] for document in found}
    states = [(firing, created.get(firing.task.task_id)) for firing in firings]
    return [firing for firing, state in states if _is_before(state, before[firing.task.task_id])]


def _is_before(state: Any, instant: datetime) -> bool:
    """Whether a task with this state was created before an instant. A malformed document may hold anything."""
    created = state.get("create_time") if isinstance(state, dict) else None
    return isinstance(created, datetime) and created < instant


#: The fields that a schedule passes on to its tasks as they are.
_SHARED = ("queue", "params", "task_option", "lookup", "sealed", "version")


def _published(schedule_id: str, firings: Sequence[Firing]) -> list[Document]:
    """Return the pipeline that inserts the tasks of those firings that the schedule lists as pending."""
    times = [firing.pending.fire_time for firing in firings]
    asked = [
        {"fire_time": f.pending.fire_time, "_id": f.task.task_id, "key": f.task.key, "start_time": f.pending.start_time}
        | ({} if f.task.trace is None else {"trace": f.task.trace})
        | ({} if f.task.expires is None else {"not_after": f.task.expires})
        for f in firings
    ]
    is_traced = any(firing.task.trace is not None for firing in firings)
    common = firings[0].task.fixed()  # all firings share these fields, except for `_id` and key
    not_after = None if firings[0].task.expires is None else "$firing.not_after"
    is_pending = {"$in": ["$$this.fire_time", f"${_PENDING}.fire_time"]}
    made: list[x.Expression] = [
        # The fields come in the same order as in every other task.
        {"_id": "$firing._id"},
        {"name": x.literal(common["name"])},
        {"key": "$firing.key"},
        x.literal({name: common[name] for name in _PASSED_ON if name in common}),
        *([{"trace": {"$ifNull": ["$firing.trace", "$$REMOVE"]}}] if is_traced else []),
        requests.task_document({}, "$firing.start_time", x.NOW, not_after),
    ]
    return [
        {"$match": {"_id": schedule_id, f"{_PENDING}.fire_time": {"$in": times}}},
        {"$project": {"firing": {"$filter": {"input": x.literal(asked), "cond": is_pending}}}},
        {"$unwind": "$firing"},
        {"$replaceWith": {"$mergeObjects": made}},
        # The option "keepExisting" would insert the same fields in another order.
        {"$merge": {"into": "tasks", "on": "_id", "whenMatched": [{"$replaceWith": "$$ROOT"}]}},
    ]
