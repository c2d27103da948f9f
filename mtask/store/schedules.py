"""The schedules: stored, changed and found, and the one transaction that makes a firing.

A firing publishes its tasks and moves the schedule on in one transaction, guarded by where the schedule stood: of
any number of processes one makes it, and a process that dies has made all of it or nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from mtask.errors import DuplicateKey, OperationFailed, ScheduleExists, ScheduleNotFound, SchemaMismatch
from mtask.model.schedules import Plan, Schedule
from mtask.model.status import FINAL_STATUSES
from mtask.store import expressions as x
from mtask.store import publishing
from mtask.store.operation import Operation, command, schedules, tasks
from mtask.store.publishing import NewTask, Policy

Document = dict[str, Any]
_STATE = "schedule_state"
_NEXT = f"{_STATE}.next_fire_time"
#: Whoever changes one reads it first; it may take several tries beside others that do.
_RACES = 20
#: What the server says where the schedule itself is at fault, not the connection to it.
REFUSALS = (OperationFailed, SchemaMismatch)


def server_time() -> Operation[datetime]:
    """Return the server's clock."""
    now: datetime = (yield command("hello"))["localTime"]
    return now


#: Given the server's time and the document as it is, the one to be stored; None leaves it.
Changed = Callable[[datetime, Document | None], Document | None]
ChangedExisting = Callable[[datetime, Document], Document | None]


def put(schedule_id: str, changed: Changed, *, must_be_new: bool) -> Operation[Document]:
    """Store a new schedule, or another in place of what is there; return it as it is then. Raises ScheduleExists."""
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
    try:
        yield schedules("insert_one", document)
    except DuplicateKey:
        return False
    return True


def _replace(former: Document, document: Document) -> Operation[bool]:
    """Put the document in place of the former one; return False where that has changed or gone meanwhile."""
    guard = {"_id": former["_id"], "update_time": former["update_time"], _STATE: former[_STATE]}
    result = yield schedules("replace_one", guard, document)
    return bool(result.matched_count)


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
    """The schedules that fire before long."""

    documents: list[Document]
    server_time: datetime


def coming(horizon_ms: int, limit: int) -> Operation[Coming]:
    """Return what fires within the horizon, the earliest first."""
    is_soon = {"$expr": {"$lte": [f"${_NEXT}", x.add_ms(x.NOW, horizon_ms)]}}
    criteria = {"paused": {"$ne": True}, _NEXT: {"$type": "date"}, **is_soon}
    found: list[Document] = yield schedules(
        "rows", [{"$match": criteria}, {"$sort": {_NEXT: 1}}, {"$limit": limit}, {"$set": {"now": x.NOW}}]
    )
    now = found[0]["now"] if found else (yield from server_time())
    return Coming(found, now)


def is_finished(task_id: str) -> Operation[bool]:
    """Whether a task is final, or gone."""
    final = [status.value for status in FINAL_STATUSES]
    found = yield tasks("find_one", {"_id": task_id, "task_state.status": {"$nin": final}}, {"_id": 1})
    return found is None


def fire(schedule: Schedule, plan: Plan, new: Sequence[NewTask]) -> Operation[int | None]:
    """Move the schedule on and publish its tasks, to be run in a transaction.

    Returns how many were published, None where the schedule has changed since it was read: then nothing was done.

    With overlap "skip" only the first is published, and only if the schedule's last task has finished.
    """
    state = schedule.schedule_state
    published = list(new)
    if schedule.overlap == "skip":
        is_free = state.last_task_id is None or (yield from is_finished(state.last_task_id))
        published = published[-1:] if is_free else []
    change: Document = {_NEXT: plan.next_fire_time}
    if published:
        change |= {
            f"{_STATE}.last_fire_time": plan.firings[-1],
            f"{_STATE}.last_task_id": published[-1].task_id,
        }
    counts = {
        f"{_STATE}.fired_cnt": len(published),
        f"{_STATE}.skipped_cnt": len(new) - len(published),
    }
    guard = {
        "_id": schedule.id,
        "paused": {"$ne": True},
        "update_time": schedule.update_time,
        _NEXT: state.next_fire_time,
    }
    result = yield schedules("update_one", guard, {"$set": change, "$inc": counts})
    if not result.matched_count:
        return None
    if published:
        yield from publishing.publish_many(published, Policy(), in_session=True)
    return len(published)
