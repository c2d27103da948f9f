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
from mtask.store import expressions as x
from mtask.store import publishing, setup
from mtask.store.operation import Operation, command, schedules, tasks
from mtask.store.publishing import NewTask, Policy

Document = dict[str, Any]
_STATE = "schedule_state"
_NEXT = f"{_STATE}.next_fire_time"
_PENDING = f"{_STATE}.pending"
#: Whoever changes one reads it first; it may take several tries beside others that do.
_RACES = 20

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
class Coming:
    """The schedules that fire before long, and the server's time where there are any."""

    documents: list[Document]
    server_time: datetime | None


def coming(horizon_ms: int, limit: int) -> Operation[Coming]:
    """Return what fires within the horizon, or has begun to; the earliest first."""
    is_soon = {"$expr": {"$lte": [f"${_NEXT}", x.add_ms(x.NOW, horizon_ms)]}}
    fires = {"paused": {"$ne": True}, _NEXT: {"$type": "date"}, **is_soon}
    found: list[Document] = yield schedules(
        "rows",
        [
            {"$match": {"$or": [fires, {f"{_PENDING}.0": {"$exists": True}}]}},
            {"$sort": {_NEXT: 1}},
            {"$limit": limit},
            {"$set": {"now": x.NOW}},
        ],
    )
    return Coming(found, found[0]["now"] if found else None)


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
    """Publish the tasks of firings and cross them off; of two that do, one makes the tasks."""
    if not firings:
        return
    yield from publishing.publish_many([firing.task for firing in firings], Policy(), in_session=False)
    times = [firing.pending.fire_time for firing in firings]
    crossed_off = {"$pull": {_PENDING: {"fire_time": {"$in": times}}}, "$inc": {"revision": 1}}
    yield schedules("update_one", {"_id": schedule_id, f"{_PENDING}.fire_time": {"$in": times}}, crossed_off)
