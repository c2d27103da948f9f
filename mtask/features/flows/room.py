"""Room in flows: counts the tasks that are added to a flow, so that it has no more than it may have, whoever adds some
at the same time.

The count is in the collection `places`, and not in a task: a handler's transaction ends by a write to its task, and
would conflict with each count there. The first count is that of the tasks that are there. Room is taken before tasks
are added, so a process that dies in between leaves the count too high, and removed tasks stay counted. A count that
leaves no room is made anew, unless room was taken a moment ago.
"""

from __future__ import annotations

from mtask.errors import DatabaseTimeout, InvalidFlow
from mtask.kernel.document.task import MAX_STEPS, SCHEMA_VERSION
from mtask.kernel.driver.indexes import FLOW_INDEX
from mtask.kernel.driver.operation import Operation, places, tasks
from mtask.kernel.statements import expressions as x
from mtask.kernel.statements.outbox import OwedTask

#: The tasks for which room was taken are there after this time, in ms, or never will be.
_ADDED_MS = 60_000
#: The time for which a count is kept after its last use, in ms.
_KEPT_MS = 3_600_000
#: The most tries. Another one is needed where the count is made, or made anew.
_RACES = 20


def take(key: str, count: int) -> Operation[None]:
    """Count so many more tasks of a flow; raise InvalidFlow if it has no room for them."""
    place = {"_id": f"flow {key}"}
    used = {"count_time": x.NOW, "quiet_time": x.NOW, "expire_time": x.add_ms(x.NOW, _KEPT_MS)}
    more = [{"$set": {"task_cnt": {"$add": ["$task_cnt", count]}, **used}}]
    for _ in range(_RACES):
        counted = yield places("update_one", {**place, "task_cnt": {"$lte": MAX_STEPS - count}}, more)
        if counted.matched_count:
            return
        is_old = {"$lt": [{"$ifNull": ["$count_time", None]}, x.add_ms(x.NOW, -_ADDED_MS)]}
        found = yield places("find_one", place, {"task_cnt": 1, "is_old": is_old})
        if found is not None and found["task_cnt"] + count <= MAX_STEPS:
            continue  # another caller has made the count since the update
        if found is not None and not found["is_old"]:
            reason = f"{count} more tasks do not fit: it has {found['task_cnt']}, and {MAX_STEPS} are the most"
            raise InvalidFlow(key, reason)
        there = yield tasks("count_documents", {"flow.key": key}, hint=FLOW_INDEX)
        if found is None:
            yield places("insert_new", [{**place, "task_cnt": there, "schema_version": SCHEMA_VERSION}])
        else:
            fresh = [{"$set": {"task_cnt": there, **used}}]
            yield places("update_one", {**place, "task_cnt": found["task_cnt"]}, fresh)
    raise DatabaseTimeout(f"the flow {key!r} is counted all the time")


def flow_of(next_one: OwedTask | None) -> str | None:
    """Return the key of the flow that must have room for this next task; None: there is no task, or no flow."""
    part = None if next_one is None else next_one.fixed.get("flow")
    return None if part is None else str(part["key"])


def take_for(next_one: OwedTask | None) -> Operation[None]:
    """Count a next task, if it is one of a flow; raise InvalidFlow if there is no room for it."""
    key = flow_of(next_one)
    if key is not None:
        yield from take(key, 1)
