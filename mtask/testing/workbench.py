"""Operations that users need to test their apps: find due tasks, let time pass for tasks, drop the database."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

from mtask.features.callbacks.rules import DELIVERY
from mtask.kernel.document.status import FINAL, TaskStatus
from mtask.kernel.driver.operation import Operation, command, tasks
from mtask.kernel.statements import expressions as x
from mtask.kernel.statements import outbox
from mtask.kernel.statements.filters import NEXT, RUNS

_MILLISECOND = timedelta(milliseconds=1)
_OPEN = {"task_state.status": {"$nin": FINAL}}
_DUE = {NEXT: {"$exists": True}, "$expr": {"$lte": [f"${NEXT}", x.NOW]}}
_UNDER_WAY = {"task_state.status": TaskStatus.RUNNING.value}
#: Other tasks of a flow must be told of a change. Then they may be due.
_OWED = {"owed_since": {"$exists": True}}
_EXAMPLES = 20
_DROP_TIMEOUT = timedelta(seconds=60)
_NO_DELIVERY: dict[str, Any] = {"name": {"$ne": DELIVERY}}


def is_idle(*, with_callbacks: bool = False) -> Operation[bool]:
    """Whether no task is due or running. Without `with_callbacks`, no worker delivers callbacks: they do not count."""
    told = [outbox.owing_ends()] if with_callbacks else []
    matched = {"$or": [_DUE, _UNDER_WAY, _OWED, *told], **({} if with_callbacks else _NO_DELIVERY)}
    return (yield tasks("find_one", matched, {"_id": 1})) is None


def due(*, with_callbacks: bool = False) -> Operation[list[str]]:
    """Return the ids of some tasks that are due or running."""
    matched = {"$or": [_DUE, _UNDER_WAY], **({} if with_callbacks else _NO_DELIVERY)}
    found = yield tasks("find", matched, {"_id": 1}, limit=_EXAMPLES)
    return [str(document["_id"]) for document in found]


def until_next() -> Operation[timedelta | None]:
    """Return the time until the next task is due; None if no task waits."""
    found = yield tasks(
        "find", {**_OPEN, NEXT: {"$exists": True}}, {"next": f"${NEXT}", "now": x.NOW}, sort=[(NEXT, 1)], limit=1
    )
    if not found or not isinstance(found[0]["next"], datetime):
        return None
    left: timedelta = found[0]["next"] - found[0]["now"] + _MILLISECOND
    return left


def bring_nearer(by: timedelta) -> Operation[None]:
    """Let time pass for waiting tasks: make every instant that they wait for earlier by `by`."""
    earlier = by // _MILLISECOND

    def moved(path: str) -> x.Expression:
        is_date = {"$eq": [{"$type": path}, "date"]}
        return {"$cond": [is_date, {"$subtract": [path, earlier]}, "$$REMOVE"]}

    runs = {
        "$map": {
            "input": f"${RUNS}",
            "as": "run",
            "in": {"$mergeObjects": ["$$run", {"$cond": [_waits("$$run"), _nearer("$$run", earlier), {}]}]},
        }
    }
    change: dict[str, Any] = {
        "task_state.create_time": {"$subtract": [f"{x.STATE}.create_time", earlier]},
        "task_state.start_time": moved(f"{x.STATE}.start_time"),
        NEXT: moved(f"${NEXT}"),
        RUNS: runs,
    }
    # Of calls that gather, only those of this round count.
    gather = {
        "first_time": {"$subtract": ["$gather.first_time", earlier]},
        "newest": {
            "$mergeObjects": ["$gather.newest", {"asked_time": {"$subtract": ["$gather.newest.asked_time", earlier]}}]
        },
    }
    change["gather"] = {"$cond": ["$gather.first_time", {"$mergeObjects": ["$gather", gather]}, "$gather"]}
    yield tasks("update_many", {**_OPEN, NEXT: {"$exists": True}}, [{"$set": change}])
    # The window of a publish counts from the end of a task.
    ended = {"task_state.finish_time": {"$subtract": [f"{x.STATE}.finish_time", earlier]}}
    yield tasks("update_many", {"task_state.status": TaskStatus.SUCCESS.value}, [{"$set": ended}])


def drop() -> Operation[None]:
    """Drop the database."""
    yield command("dropDatabase", writeConcern={"w": "majority"}).within(_DROP_TIMEOUT)


def _waits(run: str) -> x.Expression:
    return {"$eq": [{"$type": f"{run}.retry_time"}, "date"]}


def _nearer(run: str, earlier: int) -> x.Expression:
    return {"retry_time": {"$subtract": [f"{run}.retry_time", earlier]}}
