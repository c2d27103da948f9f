"""Reads of flows that exist: their steps, their counts, whether they have ended, and for whom a step waits.

No read sends params or returns.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from mtask.errors import FlowNotFound
from mtask.features.flows import statements as flows
from mtask.kernel.document.status import FINAL, TaskStatus
from mtask.kernel.driver.indexes import FLOW_INDEX, OWED_INDEX
from mtask.kernel.driver.operation import Operation, tasks
from mtask.kernel.operations.change import by_index
from mtask.kernel.statements import expressions as x
from mtask.kernel.statements import filters

Document = dict[str, Any]
#: Time limit of a read of all steps of a flow.
_LONG = timedelta(seconds=60)
#: The most characters of a reason that a read of a whole flow sends.
REASON_LENGTH = 1_000
_ID = {"_id": 1}


def _text(value: x.Expression) -> x.Expression:
    """Return the beginning of a text. A malformed document may have a value of any type."""
    return {"$cond": [{"$eq": [{"$type": value}, "string"]}, {"$substrCP": [value, 0, REASON_LENGTH]}, None]}


def _list(value: x.Expression) -> x.Expression:
    return {"$cond": [{"$isArray": [value]}, value, []]}


def _last_run() -> x.Expression:
    """Return the last run of this round, without its returns."""
    last = {"$last": x.runs_where({"$ne": ["$$run.past", True]}, _list(x.RUNS))}
    fields = ("worker_id", "status", "attempt", "claim_time", "ping_expire_time", "progress")
    kept = {field: f"$$last.{field}" for field in fields} | {"fail_reason": _text("$$last.fail_reason")}
    return {"$let": {"vars": {"last": last}, "in": {"$cond": [{"$gt": ["$$last", None]}, kept, None]}}}


#: The fields of a step that a read of its flow sends.
_STEP_VIEW: Document = {
    "step": "$flow.step",
    "after": _list("$flow.after"),
    "on_failed": "$flow.on_failed",
    "ancestors": _list("$flow.ancestors"),
    "continues": "$chain.before",
    "held_by": "$flow.held_by",
    "head": "$flow.head",
    "release_time": "$flow.release_time",
    "status": x.STATUS,
    "create_time": f"{x.STATE}.create_time",
    "next_preempt_time": f"{x.STATE}.next_preempt_time",
    "finish_time": f"{x.STATE}.finish_time",
    "cancel_requested": f"{x.STATE}.cancel_requested",
    "reason": _text(f"{x.STATE}.reason"),
    "run": _last_run(),
    "owes": {"$or": [{"$gt": [x.OWED_SINCE, None]}, {"$gt": [{"$size": _list("$owed_tasks")}, 0]}]},
    "now": x.NOW,
}


def steps(key: str) -> Operation[list[Document]]:
    """Return what a client shows of each step of a flow, in any order; raise FlowNotFound."""
    found = yield from by_index(tasks("find", {"flow.key": key}, _STEP_VIEW, hint=FLOW_INDEX).within(_LONG))
    if not found:
        raise FlowNotFound(key)
    rows: list[Document] = found
    return rows


def first_open(key: str) -> Operation[Document | None]:
    """Return an open step of the flow, or a step that still owes others something; raise FlowNotFound.

    None: the flow has ended. A WAITING step is preferred, because it ends late.
    """
    view = {"task_state.status": 1}
    last_to_end = [("task_state.status", -1)]
    is_open = {"flow.key": key, **flows.open_steps()}
    found: Document | None = yield from by_index(tasks("find_one", is_open, view, sort=last_to_end, hint=FLOW_INDEX))
    if found is None:
        found = yield tasks("find_one", {"flow.key": key, **flows.owed_steps()}, view, hint=OWED_INDEX)
    if found is None:
        yield from must_exist(key)
    return found


def must_exist(key: str) -> Operation[None]:
    """Raise FlowNotFound if no task is of this flow."""
    if (yield from by_index(tasks("find_one", {"flow.key": key}, _ID, hint=FLOW_INDEX))) is None:
        raise FlowNotFound(key)


def counts(keys: Sequence[str]) -> Operation[dict[str, dict[str, int]]]:
    """Count the steps of these flows by status. Only the index is read, so the flows must be those of the caller."""
    group = {"_id": {"key": "$flow.key", "status": "$task_state.status"}, "count": {"$sum": 1}}
    stages = [
        {"$match": {"flow.key": {"$in": list(keys)}}},
        {"$project": {"_id": 0, "flow.key": 1, "task_state.status": 1}},
        {"$group": group},
    ]
    found: dict[str, dict[str, int]] = {key: {} for key in keys}
    for row in (yield from by_index(tasks("rows", stages, hint=FLOW_INDEX).within(_LONG).for_everybody())):
        found[row["_id"]["key"]][str(row["_id"].get("status"))] = row["count"]
    return found


def heads(prefix: str | None, limit: int) -> Operation[list[Document]]:
    """Return the first steps of flows, the newest flow first: at most `limit` of them, or all if `limit` is 0."""
    matched: Document = {"flow.head": {"$exists": True}}
    if prefix:
        # A regular expression cannot hold the character NUL, except as an escape.
        matched["flow.head"]["$regex"] = "^" + re.escape(prefix).replace("\0", r"\x00")
    view = {"flow.head": 1, "flow.end_time": 1, "task_state.create_time": 1}
    order = [("task_state.create_time", -1), ("_id", -1)]
    # Without a hint: a collection that is sharded by another field than `flow.head` lacks the index.
    found: list[Document] = yield tasks("find", matched, view, sort=order, limit=limit).within(_LONG)
    return found


@dataclass(frozen=True, slots=True)
class Waits:
    """For whom a WAITING step waits."""

    dependency_cnt: int  #: the number of its dependencies
    open_cnt: int  #: the number of its dependencies that are open
    #: The open task whose end makes the step look again, and a few open dependencies, with their statuses. If all
    #: dependencies have ended, these are descendants of dependencies.
    examples: Sequence[tuple[str, str]]
    is_held: bool  #: whether `held_by` names a task that exists
    owed_since: datetime | None


def waits(task_id: str, examples: int) -> Operation[Waits | None]:
    """Return for whom a step waits; None: it is not WAITING."""
    view = {"flow.after": 1, "flow.held_by": 1, "owed_since": 1}
    wanted = {"_id": task_id, flows.STATUS: TaskStatus.WAITING.value}
    found = yield tasks("find_one", wanted, view)
    if found is None:
        return None
    flow = found.get("flow") or {}
    after, held_by = list(flow.get("after") or ()), flow.get("held_by")
    is_open = {**filters.by_ids(after), **flows.open_steps()}
    open_cnt = yield tasks("count_documents", is_open, hint="_id_")
    rows = yield tasks("find", is_open, {flows.STATUS: 1}, limit=examples, hint="_id_")
    holder = yield tasks("find_one", {"_id": {"$in": [held_by]}, "flow": {"$ne": None}}, {flows.STATUS: 1})
    shown = {row["_id"]: _status(row) for row in [*([holder] if holder else []), *rows]}
    listed = [(other, status) for other, status in shown.items() if status not in FINAL][:examples]
    return Waits(len(after), open_cnt, listed, holder is not None, found.get("owed_since"))


def _status(row: Document) -> str:
    return str(row["task_state"]["status"])
