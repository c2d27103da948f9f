"""The schedules: stored, changed and found; and a firing, made once by whoever comes first.

One guarded update moves a schedule on and writes down what is to be published; then the tasks are published under the
keys that their instants make, and crossed off. Of any number of processes one gets the update through; where it dies
before the rest, any other does it, and what was published already stays one task.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from mtask.errors import DuplicateKey, OperationFailed, ScheduleExists, ScheduleNotFound
from mtask.model.options import MAX_COUNT
from mtask.model.schedules import Pending, Plan, Schedule
from mtask.model.status import FINAL_STATUSES
from mtask.store.driver.operation import Operation, command, schedules, tasks
from mtask.store.layout import setup
from mtask.store.statements import expressions as x
from mtask.store.statements import requests
from mtask.store.tasks.publishing import NewTask

Document = dict[str, Any]
_STATE = "schedule_state"
_NEXT = f"{_STATE}.next_fire_time"
_PENDING = f"{_STATE}.pending"
#: Whoever changes one reads it first; it may take several tries beside others that do.
_RACES = 20
#: Tasks that are published at once.
_AT_ONCE = 100

#: Given the server's time and the document as it is, the one to be stored; None leaves it.
Changed = Callable[[datetime, Document | None], Document | None]
ChangedExisting = Callable[[datetime, Document], Document | None]


def put(schedule_id: str, changed: Changed, *, must_be_new: bool) -> Operation[Document]:
    """Store a new schedule, or another in place of what is there; return it as it is then. Raises ScheduleExists."""
    yield from setup.make_sure(["schedules"])
    for _ in range(_RACES):
        now = yield from server_time()
        former: Document | None = yield schedules("find_one", {"_id": schedule_id})
        if former is not None and must_be_new:
            raise ScheduleExists(schedule_id)
        document = changed(now, former)
        if document is None and former is not None:
            return former
        assert document is not None
        if (yield from (_insert(document) if former is None else _replace(former, document))):
            return document
    raise OperationFailed(f"schedule {schedule_id!r} changes all the time: others write it, too")


def change(schedule_id: str, changed: ChangedExisting) -> Operation[Document]:
    """Store another in place of a schedule; return it as it is then. Raises ScheduleNotFound."""

    def existing(now: datetime, former: Document | None) -> Document | None:
        if former is None:
            raise ScheduleNotFound(schedule_id)
        return changed(now, former)

    return (yield from put(schedule_id, existing, must_be_new=False))


def _insert(document: Document) -> Operation[bool]:
    document["revision"] = 1
    try:
        yield schedules("insert_one", document)
    except DuplicateKey:
        return False
    return True


def _replace(former: Document, document: Document) -> Operation[bool]:
    """Put the document in place of the former one; return False where that has changed or gone meanwhile."""
    revision = former.get("revision")
    document["revision"] = revision + 1 if isinstance(revision, int) and 0 < revision < MAX_COUNT else 1
    result = yield schedules("replace_one", {"_id": former["_id"], "revision": revision}, document)
    return bool(result.matched_count)


def server_time() -> Operation[datetime]:
    """Return the server's clock."""
    now: datetime = (yield command("hello"))["localTime"]
    return now


def get(schedule_id: str) -> Operation[Document]:
    """Return one; raise ScheduleNotFound."""
    found: Document | None = yield schedules("find_one", {"_id": schedule_id})
    if found is None:
        raise ScheduleNotFound(schedule_id)
    return found


def every() -> Operation[list[Document]]:
    """Return all, by id."""
    found: list[Document] = yield schedules("find", {}, sort=[("_id", 1)])
    return found


def remove(schedule_id: str) -> Operation[bool]:
    """Remove one; return whether it was there. What it has published stays."""
    result = yield schedules("delete_one", {"_id": schedule_id})
    return bool(result.deleted_count)


@dataclass(frozen=True, slots=True)
class PageEnd:
    """Where one page of what is coming ended, for the next to begin: None where there is no more of a kind."""

    #: Of what clients have stored: the instant and the id of the last one.
    fires: tuple[datetime, str] | None
    #: Of what has been begun: the id of the last one.
    begun: str | None


@dataclass(frozen=True, slots=True)
class Coming:
    """One page of the schedules that fire before long, the server's time where there are any, and where it ended."""

    documents: list[Document]
    server_time: datetime | None
    #: None: nothing comes after it.
    end: PageEnd | None


def coming(
    horizon_ms: int,
    limit: int,
    declared: Sequence[str] = (),
    left_out: Sequence[str] = (),
    after: PageEnd | None = None,
) -> Operation[Coming]:
    """Return what clients have stored, or is among `declared`, and fires within the horizon or has begun to.

    What clients have stored comes the earliest first, at most `limit` at once; what lies beyond comes with the next
    page, `after` this one. What is declared comes whole, with the first page. `left_out`: not these.
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
    # None: a service in another language may leave the field out.
    return {"paused": {"$in": [False, None]}, _NEXT: {"$type": "date"}, **until}


def _fires(horizon_ms: int, limit: int, left_out: Sequence[str], after: tuple[datetime, str] | None) -> list[Document]:
    """Find what clients have stored: what an app declares is found by its id, however much of it nobody declares."""
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
    """Match the ids of schedules, which are text, but for these."""
    beyond = {"$gt": after} if after is not None else {}
    return {"$type": "string", "$nin": list(left_out), **beyond}


def is_finished(task_id: str) -> Operation[bool]:
    """Whether a task is final, or gone."""
    final = [status.value for status in FINAL_STATUSES]
    found = yield tasks("find_one", {"_id": task_id, "task_state.status": {"$nin": final}}, {"_id": 1})
    return found is None


@dataclass(frozen=True, slots=True)
class Firing:
    """One firing: when, and the task that it publishes."""

    pending: Pending
    task: NewTask


def advance(schedule: Schedule, plan: Plan, firings: Sequence[Firing]) -> Operation[list[Firing] | None]:
    """Move a schedule on, and write down what `publish` is to make; return that, None where it has changed meanwhile.

    With overlap "skip" that is the newest firing alone, and none where the last one's task has not finished.
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


def publish(schedule_id: str, firings: Sequence[Firing]) -> Operation[None]:
    """Publish the tasks of firings that are still to be published, and cross them off.

    Whether they are, the server looks up in the schedule as it inserts them: a process that was frozen in between
    publishes nothing that another has published, and that may have been done and removed since.
    """
    for start in range(0, len(firings), _AT_ONCE):
        group = firings[start : start + _AT_ONCE]
        # The newest state, not the majority's: another process may have crossed them off just now.
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


def _published(schedule_id: str, firings: Sequence[Firing]) -> list[Document]:
    """Return the pipeline that inserts the tasks of those of these firings that the schedule holds as pending."""
    times = [firing.pending.fire_time for firing in firings]
    asked = [
        {"fire_time": f.pending.fire_time, "_id": f.task.task_id, "key": f.task.key, "start_time": f.pending.start_time}
        for f in firings
    ]
    common = firings[0].task.fixed()  # but for id and key the same for all
    is_pending = {"$in": ["$$this.fire_time", f"${_PENDING}.fire_time"]}
    made: list[x.Expression] = [
        # In the order of every task's fields.
        {"_id": "$firing._id"},
        {"name": x.literal(common["name"])},
        {"key": "$firing.key"},
        x.literal({name: common[name] for name in ("queue", "params", "task_option")}),
        requests.task_document({}, "$firing.start_time", x.NOW),
    ]
    return [
        {"$match": {"_id": schedule_id, f"{_PENDING}.fire_time": {"$in": times}}},
        {"$project": {"firing": {"$filter": {"input": x.literal(asked), "cond": is_pending}}}},
        {"$unwind": "$firing"},
        {"$replaceWith": {"$mergeObjects": made}},
        # "keepExisting" would insert the same, with its fields in another order.
        {"$merge": {"into": "tasks", "on": "_id", "whenMatched": [{"$replaceWith": "$$ROOT"}]}},
    ]
