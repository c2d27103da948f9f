"""The doctor's checks of flows: which flows cannot end by themselves, and why.

Clients and workers make no such flow. Somebody has changed or removed documents by hand, or no worker is live.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from mtask.client import views
from mtask.features.flows import read, statements
from mtask.kernel.document.status import TaskStatus
from mtask.kernel.driver.indexes import FLOW_INDEX, HELD_INDEX, OWED_INDEX
from mtask.kernel.driver.operation import Operation, server_time, tasks
from mtask.kernel.driver.stores import TASKS
from mtask.kernel.operations import workers
from mtask.kernel.statements import expressions as x
from mtask.kernel.statements import filters
from mtask.search.findings import Check, Finding, Findings, examples, fail, listed, ok, warn

#: The longest time for which a change of a step may stay untold. Any live worker tells it within seconds.
OWED_GRACE = timedelta(minutes=1)
_CHECK = "flows"
_EXAMPLES = 20


def flows() -> Findings:
    """Look for flows that cannot end by themselves."""
    if not (yield from read.is_any()):
        return [ok(_CHECK, "there are none")]
    now = yield from server_time()
    live = [worker for worker in views.workers_of((yield from workers.live())) if worker.is_live(now)]
    found = [
        *_old_workers((yield from workers.without_flows(_EXAMPLES))),
        *_untold((yield from owed_for(OWED_GRACE, _EXAMPLES)), has_worker=bool(live)),
        *_unheld((yield from without_holder(_EXAMPLES))),
        *(yield from _with_ended_holder(has_worker=bool(live))),
        *_released((yield from held_though_released(_EXAMPLES))),
        *_headless((yield from headless(_EXAMPLES))),
    ]
    return found or [ok(_CHECK, "each can end by itself")]


def _old_workers(old: Sequence[str]) -> list[Finding]:
    if not old:
        return []
    message = f"live workers of an older mtask mark WAITING steps FAIL: {listed(old, 5)}"
    return [fail(_CHECK, message, "Upgrade or stop them (`mtask stop-worker`).", worker_ids=list(old))]


def _untold(owed: Sequence[str], *, has_worker: bool) -> list[Finding]:
    if not owed:
        return []
    message = f"ended or changed over 1 min ago, and its dependents were not told: {examples(owed, _EXAMPLES)}"
    if has_worker:
        remedy = "Any live worker does it: look into the workers' logs."
        return [fail(_CHECK, message, remedy, task_ids=list(owed))]
    return [fail(_CHECK, f"{message}; no worker is live", "Start a worker: it tells them.", task_ids=list(owed))]


def _unheld(lost: Sequence[str]) -> list[Finding]:
    if not lost:
        return []
    message = f"WAITING, but no task holds it, so no end releases it: {examples(lost, _EXAMPLES)}"
    return [fail(_CHECK, message, _open_anew(lost[0]), task_ids=list(lost))]


def _with_ended_holder(*, has_worker: bool) -> Findings:
    rows = yield from with_ended_holder(_EXAMPLES)
    found = []
    gone = [str(row["_id"]) for row in rows if row.get("holder") is None]
    if gone:
        message = f"WAITING for a task that was removed by hand: {examples(gone, _EXAMPLES)}"
        remedy = "Any live worker decides on it within a minute." if has_worker else "Start a worker: it decides on it."
        found.append(warn(_CHECK, message, remedy, task_ids=gone))
    ended = [row for row in rows if row.get("holder") is not None]
    if ended:
        ids = [str(row["_id"]) for row in ended]
        holder = f"{ended[0]['held_by']} ({ended[0]['holder']})"
        message = f"WAITING for a task that has ended and tells nobody: {examples(ids, _EXAMPLES)}, held by {holder}"
        found.append(fail(_CHECK, message, _open_anew(ids[0]), task_ids=ids))
    return found


def _released(held: Sequence[str]) -> list[Finding]:
    if not held:
        return []
    message = f"not WAITING, but another task holds it: {examples(held, _EXAMPLES)}"
    return [warn(_CHECK, message, "It runs all the same; nobody should write flow.held_by.", task_ids=list(held))]


def _headless(keys: Sequence[str]) -> list[Finding]:
    if not keys:
        return []
    message = f"the first task is gone, so the retention of the other steps never begins: {listed(keys, 5)}"
    return [warn(_CHECK, message, "Remove the other steps when they have ended: `mtask remove`.", keys=list(keys))]


def _open_anew(task_id: str) -> str:
    return f"Decide on it anew: `mtask cancel {task_id}`, then `mtask retry {task_id}`."


CHECKS = [Check(_CHECK, flows)]


# --- faults ----------------------------------------------------------------------------------------------

# Looks for flows that cannot end by themselves. Only somebody who writes documents by hand makes such a flow.
#
# Each search reads a partial index, which holds only tasks of flows.

Document = dict[str, Any]
#: Time limit of each search, in ms.
SCAN_MS = 5_000
_ID = {"_id": 1}
_WAITING = {statements.STATUS: TaskStatus.WAITING.value}
_UNMARKED = {"owed_since": None}


def without_holder(limit: int) -> Operation[list[str]]:
    """Return WAITING steps that no task holds and that are not marked: nobody looks at them again."""
    lost = {"flow.key": {"$exists": True}, **_WAITING, "flow.held_by": None, **_UNMARKED}
    return _ids((yield tasks("find", lost, _ID, limit=limit, hint=FLOW_INDEX, max_time_ms=SCAN_MS)))


def with_ended_holder(limit: int) -> Operation[list[Document]]:
    """Return unmarked WAITING steps whose holder has ended unmarked, or does not exist.

    Each row has the field `holder`: the holder's status, or None if there is no such task.
    """
    found = yield from find_ended_holders({}, limit)
    if not found:
        return []
    # The server reads a step before its holder. The holder may have ended and released the step in between. Such a step
    # is no longer found by a second search.
    again = yield from find_ended_holders(filters.by_ids([row["_id"] for row in found]), limit)
    return again


def find_ended_holders(among: filters.Filter, limit: int) -> Operation[list[Document]]:
    """Return those of these steps whose holder has ended, at most `limit`. `with_ended_holder` asks twice."""
    held = {**among, "flow.held_by": {"$exists": True}, **_WAITING, **_UNMARKED}
    is_open = {"$or": [{"$not": [x.is_final()]}, statements.owes()]}
    will_tell = {"$and": [is_open, {"$ne": ["$flow.unwatched", True]}]}
    holder = {"open": will_tell, "owed": {"$gt": ["$owed_since", None]}, "status": f"${statements.STATUS}"}
    join = {"from": TASKS, "localField": "held_by", "foreignField": "_id", "as": "it"}
    stages = [
        {"$match": held},
        {"$project": {"held_by": "$flow.held_by"}},
        {"$lookup": {**join, "pipeline": [{"$project": holder}]}},
        {"$match": {"it.open": {"$ne": True}, "it.owed": {"$ne": True}}},
        {"$limit": limit},
        {"$project": {"held_by": 1, "holder": {"$first": "$it.status"}}},
    ]
    found: list[Document] = yield tasks("rows", stages, hint="_id_" if among else HELD_INDEX, maxTimeMS=SCAN_MS)
    return found


def held_though_released(limit: int) -> Operation[list[str]]:
    """Return open steps that a task holds although they are not WAITING, and that nobody asked to stop."""
    open_and_released = {"$in": [TaskStatus.INIT.value, TaskStatus.RUNNING.value]}
    held = {
        "flow.held_by": {"$exists": True},
        statements.STATUS: open_and_released,
        "task_state.cancel_requested": False,
    }
    return _ids((yield tasks("find", held, _ID, limit=limit, hint=HELD_INDEX, max_time_ms=SCAN_MS)))


def owed_for(age: timedelta, limit: int) -> Operation[list[str]]:
    """Return the tasks of whose last change others have not been told for this time."""
    matched = statements.owed_before(age // timedelta(milliseconds=1))
    order = [("owed_since", 1)]
    return _ids((yield tasks("find", matched, _ID, sort=order, limit=limit, hint=OWED_INDEX, max_time_ms=SCAN_MS)))


def headless(limit: int) -> Operation[list[str]]:
    """Return the keys of flows whose first task was removed, and that have steps whose retention waits for the end."""
    unended = {"flow.key": {"$exists": True}, "$or": [statements.open_steps(), statements.without_retention()]}
    head = {
        "from": TASKS,
        "localField": "_id",
        "foreignField": "flow.head",
        "as": "head",
        "pipeline": [{"$project": _ID}],
    }
    stages = [
        {"$match": unended},
        {"$group": {"_id": "$flow.key"}},
        {"$lookup": head},
        {"$match": {"head": []}},
        {"$limit": limit},
    ]
    return _ids((yield tasks("rows", stages, hint=FLOW_INDEX, maxTimeMS=SCAN_MS)))


def _ids(rows: list[Document]) -> list[str]:
    return [str(row["_id"]) for row in rows]
