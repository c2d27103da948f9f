"""Reads of flows that exist: their steps, their counts, whether they have ended, and for whom a step waits.

No read sends params or returns.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, get_args

from bson.timestamp import Timestamp

from mtask.errors import FlowNotFound, OperationFailed
from mtask.features.flows import rules
from mtask.features.flows import statements as flows
from mtask.features.flows.rules import Awaited
from mtask.features.flows.views import texts
from mtask.kernel.document.status import FINAL, TaskStatus
from mtask.kernel.document.task import MAX_STEPS, OnFailed
from mtask.kernel.driver.indexes import CHILDREN_INDEX, FLOW_INDEX, HELD_INDEX, OWED_INDEX
from mtask.kernel.driver.operation import Operation, command, tasks
from mtask.kernel.driver.stores import TASKS
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
        key = row["_id"].get("key")
        if isinstance(key, str):  # a malformed document may hold a list of keys
            found[key][str(row["_id"].get("status"))] = row["count"]
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
    flow = part_of(found)
    after, held_by = list(texts(flow.get("after"))), flow.get("held_by")
    is_open = {**filters.by_ids(after), **flows.open_steps()}
    open_cnt = yield tasks("count_documents", is_open, hint="_id_")
    rows = yield tasks("find", is_open, {flows.STATUS: 1}, limit=examples, hint="_id_")
    holder = yield tasks("find_one", {"_id": {"$in": [held_by]}, "flow": {"$ne": None}}, {flows.STATUS: 1})
    shown = {row["_id"]: str(status_of(row)) for row in [*([holder] if holder else []), *rows]}
    listed = [(other, status) for other, status in shown.items() if status not in FINAL][:examples]
    return Waits(len(after), open_cnt, listed, holder is not None, found.get("owed_since"))


# --- looking ---------------------------------------------------------------------------------------------

# Reads what decides on the steps of flows: the WAITING steps, for whom they wait, and the verdicts of the rules.

#: The most tasks that one statement changes or reads.
BATCH = 500
#: More tasks than a flow can have. Tests tune it.
MANY = 4 * MAX_STEPS
_STATUSES = frozenset(status.value for status in TaskStatus)


def look(task_ids: Sequence[str]) -> Operation[list[Document]]:
    """Decide on the WAITING tasks among these by the rules; change nothing.

    All is read as it was at one moment. A row holds `_id`, `held_by`, `owed_since`, `verdict`, `other`, and `now`, the
    server's time. For the verdict "wait", `other` is an open task: the watched one, if it is open. `unwatched` tells
    that the end of `other` would not be marked. For "cancel" and "fail", `other` is a task that has failed.
    """
    steps, moment = yield from at_one_moment(flows.waiting_now, task_ids, flows.STEP_VIEW)
    groups: dict[tuple[str, ...], list[Document]] = {}
    for step in steps:
        groups.setdefault(_after(step), []).append(step)
    found = yield from awaited_at([*{task_id for after in groups for task_id in after}], moment)
    below = yield from _descendants([task_id for task_id, one in found.items() if one.has_children], moment)
    rows = []
    for after, group in groups.items():
        awaited: list[Awaited] = [found.get(task_id) or Awaited(task_id, None) for task_id in after]
        awaited += {one.task_id: one for task_id in after for one in below.get(task_id, ())}.values()
        unwatched = {one.task_id for one in awaited if isinstance(one, _Found) and one.unwatched}
        holders, culprits = rules.holders(awaited), rules.culprits(awaited)
        verdicts = {on_failed: rules.verdict(on_failed, awaited) for on_failed in get_args(OnFailed)}
        among = frozenset(holders)
        for step in group:
            held_by = text_of(step, "held_by")
            # The holders of many dependents must differ, and none may be moved many times. So the choice is random.
            holder = held_by if held_by in among else random.choice(holders) if holders else None
            rows.append(
                {
                    "_id": step["_id"],
                    "held_by": held_by,
                    "owed_since": step.get("owed_since"),
                    "now": step["now"],
                    "verdict": verdicts.get(text_of(step, "on_failed"), verdicts["fail"]),
                    "other": holder or next(iter(culprits), None),
                    "unwatched": holder in unwatched,
                }
            )
    return rows


def _after(step: Document) -> tuple[str, ...]:
    """Return the dependencies. A malformed step may have none; whoever claims it finds out."""
    return texts(part_of(step).get("after"))


@dataclass(frozen=True, slots=True)
class _Found(Awaited):
    has_children: bool = False
    unwatched: bool = False
    ancestors: Sequence[str] = ()


def awaited_at(task_ids: Sequence[str], moment: Timestamp) -> Operation[dict[str, _Found]]:
    """Read these tasks as they were at that moment."""
    rows, _ = yield from at_one_moment(filters.by_ids, task_ids, flows.awaited_view(), moment)
    return {row["_id"]: _parsed(row) for row in rows}


def open_by_id(task_ids: Sequence[str]) -> Operation[dict[str, bool]]:
    """Return whether these tasks, or descendants of them, are open. Tasks that are not there are left out."""
    rows, moment = yield from at_one_moment(filters.by_ids, task_ids, flows.awaited_view())
    found = {row["_id"]: _parsed(row) for row in rows}
    below = yield from _descendants([task_id for task_id, one in found.items() if one.has_children], moment)
    return {task_id: any(map(rules.is_open, [one, *below.get(task_id, ())])) for task_id, one in found.items()}


def _descendants(parents: Sequence[str], moment: Timestamp) -> Operation[dict[str, list[Awaited]]]:
    """Read the descendants of each of these tasks as they were at that moment.

    Those that ended as SUCCESS are left out, unless one of them is all that is open.
    """
    below: dict[str, list[Awaited]] = {parent: [] for parent in parents}
    for matched in (flows.descendants, flows.owing_descendants):
        wanted = [parent for parent in parents if not any(map(rules.is_open, below[parent]))]
        rows, _ = yield from at_one_moment(matched, wanted, flows.awaited_view(), moment, CHILDREN_INDEX)
        for one in map(_parsed, rows):
            for parent in below.keys() & {*one.ancestors}:
                below[parent].append(one)
    return below


def _parsed(row: Document) -> _Found:
    status = status_of(row)
    # A task whose status is none is open until a worker marks it FAIL.
    known = TaskStatus(status) if status in _STATUSES else TaskStatus.INIT
    part = part_of(row)
    return _Found(
        row["_id"],
        known,
        row["owes"],
        has_children=bool(part.get("has_children")),
        unwatched=part.get("unwatched") is True,
        ancestors=texts(part.get("ancestors")),
    )


def part_of(row: Document) -> Document:
    """Return the task's part in its flow."""
    part = row.get("flow")
    return part if isinstance(part, dict) else {}


def text_of(row: Document, name: str) -> str | None:
    """Return a field of the task's part in its flow. A malformed document may hold something other than text there."""
    value = part_of(row).get(name)
    return value if isinstance(value, str) else None


def status_of(row: Document) -> str | None:
    """Return the task's status."""
    state = row.get("task_state")
    status = state.get("status") if isinstance(state, dict) else None
    return status if isinstance(status, str) else None


def newest(matched: filters.Filter, view: Document, hint: str) -> Operation[list[Document]]:
    """Return up to `BATCH` tasks as the primary has them now, even if no majority has them yet.

    Right after a failover, a majority read may show how things were before a change that is long acknowledged. A mark
    that is removed by such a read would be lost. What a majority does not have yet can be undone. Then each change that
    followed from it is undone, too, or its guard does not match.
    """
    answer = yield command(
        "find",
        TASKS,
        filter=matched,
        projection=view,
        hint=hint,
        limit=BATCH,
        batchSize=BATCH,
        singleBatch=True,
        readConcern={"level": "local"},
    )
    rows: list[Document] = answer["cursor"]["firstBatch"]
    return rows


def at_one_moment(
    match: Callable[[Sequence[str]], filters.Filter],
    values: Sequence[str],
    view: Document,
    moment: Timestamp | None = None,
    hint: str = "_id_",
) -> Operation[tuple[list[Document], Timestamp]]:
    """Read the tasks that match these values as a majority had them at one moment.

    Return the tasks, and the moment, for further reads of it. Without `moment`, the server chooses it.
    """
    rows: list[Document] = []
    parts = [values] if values else []
    while parts:
        part = parts.pop()
        concern = {"level": "snapshot"} if moment is None else {"level": "snapshot", "atClusterTime": moment}
        options = {"projection": view, "hint": hint, "batchSize": MANY, "readConcern": concern}
        cursor = (yield command("find", TASKS, filter=match(part), **options))["cursor"]
        moment = cursor.get("atClusterTime", moment)
        if not cursor["id"]:
            rows += cursor["firstBatch"]
            continue
        # The reply is limited to 16 MB. What does not fit is read in parts.
        yield command("killCursors", TASKS, cursors=[cursor["id"]])
        if len(part) == 1:
            raise OperationFailed(f"too much to read for {part[0]}")
        parts += [part[: len(part) // 2], part[len(part) // 2 :]]
    return rows, moment or Timestamp(0, 0)


# --- finding ---------------------------------------------------------------------------------------------

# Finds what is left undone in flows: changes of which others have not been told, and steps whose holder is gone.


def is_any() -> Operation[bool]:
    """Whether the database holds a flow, or a task that owes others something."""
    found = yield tasks("find_one", {"flow.key": {"$exists": True}}, _ID, hint=FLOW_INDEX)
    return found is not None or (yield from is_any_owed())


def is_any_owed() -> Operation[bool]:
    """Whether the database holds a task that owes others something."""
    return (yield tasks("find_one", {"owed_since": {"$exists": True}}, _ID, hint=OWED_INDEX)) is not None


def owed(age: timedelta, limit: int = BATCH, besides: Iterable[str] = ()) -> Operation[list[str]]:
    """Return the tasks of whose last change others have not been told for this time, besides these tasks."""
    matched = flows.owed_before(age // timedelta(milliseconds=1))
    if besides:
        matched["_id"] = {"$nin": list(besides)}
    found = yield tasks("find", matched, _ID, sort=[("owed_since", 1)], limit=limit, hint=OWED_INDEX)
    # The `_id` of a malformed document may be something other than text. No task waits for such a document.
    return [document["_id"] for document in found if isinstance(document["_id"], str)]


def orphans(limit: int = BATCH) -> Operation[list[str]]:
    """Return WAITING tasks whose holder does not exist. Somebody has removed the holder by hand."""
    held = {"flow.held_by": {"$exists": True}, "task_state.status": TaskStatus.WAITING.value}
    join = {"from": TASKS, "localField": "_id", "foreignField": "_id", "as": "it"}
    pipeline = [
        {"$match": held},
        {"$group": {"_id": "$flow.held_by"}},
        {"$lookup": {**join, "pipeline": [{"$project": _ID}]}},
        {"$match": {"it": []}},
        {"$limit": limit},
    ]
    rows = yield tasks("rows", pipeline, hint=HELD_INDEX).within(_LONG)
    removed = [row["_id"] for row in rows]
    if not removed:
        return []
    found = yield tasks("find", {**held, "flow.held_by": {"$in": removed}}, _ID, limit=limit, hint=HELD_INDEX)
    return [document["_id"] for document in found]
