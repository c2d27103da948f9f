"""Settles changes of steps: tells the other tasks of a flow that a task has ended, or that it is open again.

Each change of a step into or out of a final status sets the mark `owed_since` in the same update. To settle the change
is to do all that other tasks are owed because of it, and then to remove the mark, unless a new change has renewed it.
So nothing is lost if a process dies at any point: whoever finds the mark settles the change again. Settling twice, or
at the same time, changes nothing twice, because each statement has a guard.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

from mtask.model.documents import MAX_STEPS
from mtask.model.flows import Verdict
from mtask.model.status import FINAL_STATUSES, TaskStatus
from mtask.store.driver.operation import Operation, command, tasks
from mtask.store.driver.stores import TASKS
from mtask.store.flows import retention
from mtask.store.layout.schema import FLOW_INDEX, HELD_INDEX, OWED_INDEX
from mtask.store.statements import filters, flows, owing
from mtask.store.statements.derive import Pipeline

Document = dict[str, Any]
#: The most tasks that one statement changes or reads.
BATCH = 500
#: Time limit of a statement that may change all steps of a flow.
_LONG = timedelta(seconds=60)
#: The most rounds of one operation. Each round makes progress, or another process has made some. So this limit is only
#: reached if others keep changing the same tasks. The mark then stays, and a later scan goes on.
_ROUNDS = 100
_FAILED = frozenset({TaskStatus.FAIL.value, TaskStatus.CANCELED.value})
_FINAL = frozenset(status.value for status in FINAL_STATUSES)
_VIEW = {
    "task_state.status": 1,
    "owed_since": 1,
    "owed_tasks": 1,
    "flow.key": 1,
    "flow.held_by": 1,
    "flow.fail_fast": 1,
}


def settle_all(task_ids: Iterable[str]) -> Operation[None]:
    """Settle the changes of these tasks, and the changes that follow from them."""
    waiting = [*dict.fromkeys(task_ids)]
    for _ in range(2 * MAX_STEPS):
        if not waiting:
            break
        batch, waiting = waiting[:BATCH], waiting[BATCH:]
        further = yield from settle(batch)
        waiting = [*dict.fromkeys([*waiting, *further])]


def is_any() -> Operation[bool]:
    """Whether the database holds a flow, or a task that owes others something."""
    found = yield tasks("find_one", {"flow.key": {"$exists": True}}, _ID, hint=FLOW_INDEX)
    if found is None:
        found = yield tasks("find_one", {"owed_since": {"$exists": True}}, _ID, hint=OWED_INDEX)
    return found is not None


def owed(age: timedelta, limit: int = BATCH) -> Operation[list[str]]:
    """Return the tasks of whose last change others have not been told for this time."""
    matched = flows.owed_before(age // timedelta(milliseconds=1))
    found = yield tasks("find", matched, {"_id": 1}, sort=[("owed_since", 1)], limit=limit, hint=OWED_INDEX)
    return [document["_id"] for document in found]


def orphans(limit: int = BATCH) -> Operation[list[str]]:
    """Return WAITING tasks whose holder does not exist. Somebody has removed the holder by hand."""
    held = {"flow.held_by": {"$exists": True}, "task_state.status": TaskStatus.WAITING.value}
    pipeline = [
        {"$match": held},
        {"$group": {"_id": "$flow.held_by"}},
        {"$lookup": {"from": TASKS, "localField": "_id", "foreignField": "_id", "as": "it", "pipeline": [_ONLY_ID]}},
        {"$match": {"it": []}},
        {"$limit": limit},
    ]
    rows = yield tasks("rows", pipeline, hint=HELD_INDEX).within(_LONG)
    removed = [row["_id"] for row in rows]
    if not removed:
        return []
    found = yield tasks("find", {**held, "flow.held_by": {"$in": removed}}, _ID, limit=limit, hint=HELD_INDEX)
    return [document["_id"] for document in found]


_ID = {"_id": 1}
_ONLY_ID = {"$project": _ID}


def settle(task_ids: Sequence[str]) -> Operation[list[str]]:
    """Settle the changes of these tasks; return the tasks whose own changes followed from it."""
    further: list[str] = []
    for _ in range(_ROUNDS):
        rows = yield from _read({"_id": {"$in": list(task_ids)}, "owed_since": {"$exists": True}})
        if not rows:
            break
        yield from _publish_owed(rows)
        further += yield from _settle_steps([row for row in rows if row.get("flow") is not None])
        alone = [row for row in rows if row.get("flow") is None]
        if alone:  # a task of no flow only owes its next task, and no other task waits for its end
            yield from _cross_off(alone, flows.cross_off_alone())
    return further


def _settle_steps(rows: Sequence[Document]) -> Operation[list[str]]:
    if not rows:
        return []
    further: list[str] = []
    reopened = {row["flow"]["key"] for row in rows if _status(row) not in _FINAL}
    yield from retention.revive(sorted(reopened))
    further += yield from decide([row["_id"] for row in rows if _status(row) == TaskStatus.WAITING])
    further += yield from _reopen_undue(rows)
    for row in (yield from _failing_fast(rows)):
        further += yield from _fail_fast(row)
    further += yield from _tell([row["_id"] for row in rows])
    yield from _cross_off(rows, flows.cross_off())
    return further


def decide(task_ids: Sequence[str]) -> Operation[list[str]]:
    """Release or end the WAITING tasks among these, or let an open task hold them.

    Return the tasks of whose change others must be told now: those that ended, and those that were marked before.
    """
    further: list[str] = []
    pending = list(task_ids)
    for _ in range(_ROUNDS):
        if not pending:
            break
        rows = yield from _snapshot(flows.look(pending, TASKS), len(pending))
        pending = []
        moved: list[Document] = []
        for (kind, held_by, other), group in _grouped(rows, "verdict", "held_by", "other"):
            ids = [row["_id"] for row in group]
            if kind == Verdict.WAIT and other == held_by:
                continue
            if kind == Verdict.WAIT:
                pipeline = flows.move(other)
                moved += group
            elif kind == Verdict.RELEASE:
                pipeline = flows.release()
                further += [row["_id"] for row in group if row.get("owed_since") is not None]
            else:
                pipeline = flows.end(Verdict(kind), other)
                further += ids
            result = yield tasks("update_many", flows.waiting(ids, held_by), pipeline, hint="_id_")
            if result.matched_count < len(ids):
                pending += ids  # another process was faster with some of them
        pending += yield from _confirm(moved)
        pending = [*dict.fromkeys(pending)]
    return further


def _confirm(moved: Sequence[Document]) -> Operation[list[str]]:
    """Read the new holders of moved tasks; return the tasks whose new holder has ended meanwhile.

    Without this second read, the new holder could have ended, and told the tasks that it held, between the first read
    and the move.
    """
    if not moved:
        return []
    ids = [row["_id"] for row in moved]
    rows = yield from _snapshot(flows.holders(ids, TASKS), len(ids))
    was_marked = {row["_id"] for row in moved if row.get("owed_since") is not None}
    done = {row["_id"]: row["owed_since"] for row in rows if row["is_open"] and "owed_since" in row}
    marks = {task_id: mark for task_id, mark in done.items() if task_id not in was_marked}
    if marks:
        statuses = dict.fromkeys(marks, TaskStatus.WAITING.value)
        yield tasks("update_many", flows.owed_as_read(marks, statuses), flows.cross_off(), hint="_id_")
    return [row["_id"] for row in rows if not row["is_open"]]


def _publish_owed(rows: Sequence[Document]) -> Operation[None]:
    """Publish the tasks that these tasks owe: children, and next tasks. A task that exists stays as it is."""
    owed_tasks = {document["_id"]: document for row in rows for document in row.get("owed_tasks") or ()}
    if owed_tasks:
        yield tasks("insert_new", list(owed_tasks.values()))
        parents = {"_id": {"$in": [row["_id"] for row in rows if row.get("owed_tasks")]}}
        yield tasks("update_many", parents, owing.take_out(list(owed_tasks)), hint="_id_")


def _failing_fast(rows: Sequence[Document]) -> Operation[list[Document]]:
    """Return the tasks whose failure cancels the open tasks of their flow.

    The failure may have been settled before a task of the flow published what it owes. So a task that did so asks for
    the failure again.
    """
    failed = {
        row["flow"]["key"]: row for row in rows if _status(row) == TaskStatus.FAIL and row["flow"].get("fail_fast")
    }
    for row in rows:
        key = row["flow"]["key"]
        if row.get("owed_tasks") and row["flow"].get("fail_fast") and key not in failed:
            matched = flows.failed_fast(key)
            if (found := (yield tasks("find_one", matched, {"flow.key": 1}, hint=FLOW_INDEX))) is not None:
                failed[key] = found
    return list(failed.values())


def _reopen_undue(rows: Sequence[Document]) -> Operation[list[str]]:
    """Open the tasks again whose end was caused by a task that is no longer failed."""
    caused = [row for row in rows if _status(row) in _FAILED and row["flow"].get("held_by") is not None]
    if not caused:
        return []
    culprits = yield from _read({"_id": {"$in": [*{row["flow"]["held_by"] for row in caused}]}})
    recovered = {row["_id"] for row in culprits if _status(row) not in _FAILED}
    return (yield from _reopen([row for row in caused if row["flow"]["held_by"] in recovered]))


def _reopen(rows: Sequence[Document]) -> Operation[list[str]]:
    reopened: list[str] = []
    by_culprit: dict[str, list[str]] = defaultdict(list)
    for row in rows:
        by_culprit[row["flow"]["held_by"]].append(row["_id"])
    for culprit, ids in by_culprit.items():
        yield tasks("update_many", flows.ended_by(ids, culprit), flows.reopen(), hint="_id_")
        reopened += ids
    return reopened


def _fail_fast(failed: Document) -> Operation[list[str]]:
    """Cancel the open tasks of the flow, until a pass changes none; return the tasks that ended."""
    matched, task_id = flows.open_in_flow(failed["flow"]["key"]), failed["_id"]
    ended: list[str] = []
    for _ in range(2 * MAX_STEPS // BATCH):
        found = yield tasks("find", matched, _ID, limit=BATCH, hint=FLOW_INDEX)
        ids = [document["_id"] for document in found]
        if not ids:
            break
        guard = {**matched, "_id": {"$in": ids}}
        yield tasks("update_many", guard, flows.fail_fast(task_id), hint="_id_")
        ended += ids
    return ended


def _tell(task_ids: Sequence[str]) -> Operation[list[str]]:
    """Decide on the tasks that these tasks hold, and open the tasks again whose end they caused and that are not due.

    Return the tasks that changed so that others must be told.
    """
    further: list[str] = []
    for _ in range(_ROUNDS):
        rows = yield from _read({"_id": {"$in": list(task_ids)}})
        ended = [row["_id"] for row in rows if _status(row) in _FINAL and not row.get("owed_tasks")]
        recovered = [row["_id"] for row in rows if _status(row) not in _FAILED]
        if not (ended or recovered):
            break
        view = {"task_state.status": 1, "flow.held_by": 1}
        found = yield tasks("find", flows.held_or_ended_by(ended, recovered), view, limit=BATCH, hint=HELD_INDEX)
        if not found:
            break
        further += yield from decide([row["_id"] for row in found if _status(row) == TaskStatus.WAITING])
        further += yield from _reopen([row for row in found if _status(row) in _FAILED])
    return further


def _cross_off(rows: Sequence[Document], pipeline: Pipeline) -> Operation[None]:
    """Remove the marks of these tasks. A mark that a new change has renewed stays."""
    marks: Mapping[str, datetime] = {row["_id"]: row["owed_since"] for row in rows}
    statuses = {row["_id"]: str(_status(row)) for row in rows}
    yield tasks("update_many", flows.owed_as_read(marks, statuses), pipeline, hint="_id_")


def _read(matched: filters.Filter) -> Operation[list[Document]]:
    found: list[Document] = yield tasks("find", matched, _VIEW, hint="_id_")
    return found


def _snapshot(pipeline: Sequence[Mapping[str, Any]], count: int) -> Operation[list[Document]]:
    """Run an aggregation that reads all documents as they were at one moment."""
    answer = yield command(
        "aggregate",
        TASKS,
        pipeline=list(pipeline),
        cursor={"batchSize": count + 1},
        readConcern={"level": "snapshot"},
    )
    rows: list[Document] = answer["cursor"]["firstBatch"]
    return rows


def _status(row: Document) -> str | None:
    status = row["task_state"]["status"]
    return status if isinstance(status, str) else None


def _grouped(rows: Sequence[Document], *fields: str) -> Iterator[tuple[tuple[Any, ...], list[Document]]]:
    groups: dict[tuple[Any, ...], list[Document]] = defaultdict(list)
    for row in rows:
        groups[tuple(row.get(field) for field in fields)].append(row)
    yield from groups.items()
