"""Settles changes of steps: tells the other tasks of a flow that a task has ended, or that it is open again.

Each change of a step into or out of a final status sets the mark `owed_since` in the same update. To settle the change
is to do all that other tasks are owed because of it, and then to remove the mark, unless a new change has renewed it.
So nothing is lost if a process dies at any point: whoever finds the mark settles the change again. Settling twice, or
at the same time, changes nothing twice, because each statement has a guard.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, get_args

from bson.timestamp import Timestamp
from pydantic import ValidationError

from mtask.errors import DocumentTooLarge, OperationFailed
from mtask.logs import fields
from mtask.model import flows as rules
from mtask.model.documents import MAX_STEPS, OnFailed, StoredTask, describe_validation
from mtask.model.flows import Awaited, Verdict
from mtask.model.status import FINAL_STATUSES, TaskStatus
from mtask.store.driver.operation import Operation, command, tasks
from mtask.store.driver.stores import TASKS
from mtask.store.flows import retention
from mtask.store.layout.schema import CHILDREN_INDEX, FLOW_INDEX, HELD_INDEX, OWED_INDEX
from mtask.store.statements import filters, flows, owing
from mtask.store.statements.derive import Pipeline
from mtask.store.tasks import claims

Document = dict[str, Any]
_logger = logging.getLogger("mtask.store")
#: The most tasks that one statement changes or reads.
BATCH = 500
#: Time limit of a statement that may change all steps of a flow.
_LONG = timedelta(seconds=60)
#: The most rounds of one operation. Each round makes progress, or another process has made some. So this limit is only
#: reached if others keep changing the same tasks. The mark then stays, and a later scan goes on.
_ROUNDS = 100
#: More tasks than a flow can have.
_MANY = 4 * MAX_STEPS
#: What the document of a task that cannot be changed names as the writer of its FAIL, and the short reason if the task
#: has no room left in its document.
_WRITER = "flow"
TOO_LARGE = "too large: a change would exceed MongoDB's 16 MB; put less into params"
_STATUSES = frozenset(status.value for status in TaskStatus)
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


def owed(age: timedelta, limit: int = BATCH, besides: Iterable[str] = ()) -> Operation[list[str]]:
    """Return the tasks of whose last change others have not been told for this time, besides these tasks."""
    matched = flows.owed_before(age // timedelta(milliseconds=1))
    if besides:
        matched["_id"] = {"$nin": list(besides)}
    found = yield tasks("find", matched, {"_id": 1}, sort=[("owed_since", 1)], limit=limit, hint=OWED_INDEX)
    # The `_id` of a malformed document may be something other than text. No task waits for such a document.
    return [document["_id"] for document in found if isinstance(document["_id"], str)]


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
        owing_rows = [row for row in rows if row.get("owed_tasks")]
        if owing_rows:
            further += yield from _publish_owed(owing_rows)
            continue  # only now have the tasks ended that owed others
        alone = [row for row in rows if row.get("flow") is None]
        # A task of no flow only owes its next task, and no other task waits for its end.
        is_done = yield from _cross_off(alone, flows.cross_off_alone())
        told = yield from _settle_steps([row for row in rows if row.get("flow") is not None])
        further += told.further
        if not told.is_complete:
            break  # the marks stay, and a later scan goes on
        if is_done and told.is_crossed_off:
            break
    return further


def _settle_steps(rows: Sequence[Document]) -> Operation[_Settled]:
    """Settle the changes of these steps. They owe no tasks any more."""
    if not rows:
        return _Settled([])
    further: list[str] = []
    reopened = {_text(row, "key") for row in rows if _status(row) not in _FINAL}
    yield from retention.revive(sorted(filter(None, reopened)))
    decided = yield from _decide([row["_id"] for row in rows if _status(row) == TaskStatus.WAITING])
    further += decided.further
    further += yield from _reopen_undue(rows)
    for row in rows:
        if _status(row) == TaskStatus.FAIL and _part(row).get("fail_fast"):
            further += yield from _fail_fast(row)
    told = yield from _tell(rows)
    further += told.further
    if not told.is_complete:
        return _Settled(further, is_complete=False, is_crossed_off=False)
    done = [row for row in rows if _status(row) != TaskStatus.WAITING or decided.stays(row)]
    is_crossed_off = yield from _cross_off(done, flows.cross_off())
    return _Settled(further, is_crossed_off=is_crossed_off and len(done) == len(rows))


@dataclass(frozen=True, slots=True)
class _Settled:
    further: Sequence[str]  #: the tasks whose own changes followed
    is_complete: bool = True  #: whether all others have been told
    is_crossed_off: bool = True  #: whether all marks are removed


@dataclass(slots=True)
class _Decided:
    """What became of WAITING tasks."""

    #: The tasks of whose change others must be told now: those that ended, and those that were marked before.
    further: list[str] = field(default_factory=list)
    #: The marks of the tasks that wait on as they are, as the deciding read saw them.
    marks: dict[str, datetime | None] = field(default_factory=dict)

    def stays(self, row: Document) -> bool:
        """Whether the task of this row waits on, and the read that decided this saw its mark.

        Right after a failover, that read may still show how things were before the mark.
        """
        mark: datetime = row["owed_since"]
        return self.marks.get(row["_id"]) == mark


@dataclass(frozen=True, slots=True)
class _Told:
    further: list[str]  #: the tasks that changed so that others must be told
    is_complete: bool  #: whether there was nothing left to tell in the end


def decide(task_ids: Sequence[str]) -> Operation[list[str]]:
    """Release or end the WAITING tasks among these, or let an open task hold them.

    Return the tasks of whose change others must be told now: those that ended, and those that were marked before.
    """
    return (yield from _decide(task_ids)).further


def _decide(task_ids: Sequence[str]) -> Operation[_Decided]:
    decided = _Decided()
    further = decided.further
    refusal: OperationFailed | None = None
    pending = list(task_ids)
    for try_cnt in range(_ROUNDS):
        if not pending:
            break
        rows = yield from look(pending)
        pending = []
        moved: list[Document] = []
        decided.marks |= {row["_id"]: row.get("owed_since") for row in rows if _stays(row)}
        for verdict in Verdict:
            group = [row for row in rows if row["verdict"] == verdict and not _stays(row)]
            if not group:
                continue
            guard = flows.waiting({row["_id"]: row.get("held_by") for row in group})
            others = {row["_id"]: row["other"] for row in group}
            changed_cnt = len(group)
            try:
                if verdict is Verdict.RELEASE:
                    guard |= flows.read_at(group[0]["now"], try_cnt)
                    further += [row["_id"] for row in group if row.get("owed_since") is not None]
                    changed_cnt = yield from _release(guard, len(group))
                elif verdict is Verdict.WAIT:
                    moved += group
                    changed_cnt = yield from change(guard, flows.move(others))
                else:
                    further += others
                    changed_cnt = yield from change(guard, flows.end(verdict, others))
            except OperationFailed as error:
                refusal = error  # the other tasks of the group are changed, and the other groups must not wait
            if changed_cnt < len(group):
                pending += others  # another process was faster with some of them
        pending += yield from _confirm(moved)
        pending = [*dict.fromkeys(pending)]
    if refusal is not None:
        raise refusal
    return decided


def _stays(row: Document) -> bool:
    """Whether the task waits on, and its holder is open: nothing changes."""
    return bool(row["verdict"] == Verdict.WAIT and row["other"] == row.get("held_by"))


def _release(guard: filters.Filter, count: int) -> Operation[int]:
    """Release the tasks that match the guard; return their number. Nearly all have never begun: a short form suffices.

    A task that the short statement has released is no longer WAITING, so the general one leaves it alone.
    """
    unbegun = {**guard, "$and": [*guard.get("$and", ()), flows.never_begun()]}
    released_cnt = yield from change(unbegun, flows.release_unbegun())
    if released_cnt < count:
        released_cnt += yield from change(guard, flows.release())
    return released_cnt


def change(guard: filters.Filter, update: Pipeline | Mapping[str, Any]) -> Operation[int]:
    """Change the tasks that match the guard, which names their `_id`s; return their number.

    The server stops at a task that it cannot change. Then each task is changed by itself, and such a task is marked
    FAIL, if it is malformed or too large. Else the error is raised, after all other tasks are changed.
    """
    try:
        result = yield tasks("update_many", guard, update, hint="_id_")
    except OperationFailed as error:
        return (yield from _change_apart(guard, update, error))
    return int(result.matched_count)


def _change_apart(
    guard: filters.Filter, update: Pipeline | Mapping[str, Any], error: OperationFailed
) -> Operation[int]:
    named = guard["_id"]
    task_ids = named["$in"] if isinstance(named, dict) and "$in" in named else [named]
    changed_cnt = refused_cnt = 0
    refusal: OperationFailed | None = None
    for task_id in task_ids:
        try:
            result = yield tasks("update_one", {**guard, "_id": task_id}, update, hint="_id_")
            changed_cnt += int(result.matched_count)
        except OperationFailed as refused:
            refused_cnt += 1
            if not (yield from _mark_unchangeable(task_id, refused)):
                refusal = refused
    if refusal is not None:
        raise refusal
    return changed_cnt + refused_cnt


def _mark_unchangeable(task_id: str, refused: OperationFailed) -> Operation[bool]:
    """Mark a task FAIL that the server cannot change, if it is malformed or too large; return whether it is marked."""
    document = yield tasks("find_one", {"_id": task_id})
    if document is None:
        return True  # it was removed
    reason = TOO_LARGE
    if not isinstance(refused, DocumentTooLarge):
        try:
            StoredTask.model_validate(document)
        except ValidationError as wrong:
            reason = describe_validation(wrong)
        else:
            return False
    try:
        return (yield from claims.quarantine(task_id, _WRITER, reason))
    except OperationFailed:
        return False


def _confirm(moved: Sequence[Document]) -> Operation[list[str]]:
    """Read the new holders of moved tasks; return the tasks whose new holder has ended meanwhile.

    Without this second read, the new holder could have ended, and told the tasks that it held, between the first read
    and the move.
    """
    if not moved:
        return []
    steps, moment = yield from _at_one_moment(flows.waiting_now, [row["_id"] for row in moved], flows.STEP_VIEW)
    held_by = {step["_id"]: _text(step, "held_by") for step in steps}
    holders = yield from _awaited([holder for holder in held_by.values() if holder is not None], moment)
    is_open = {task_id: holder in holders and rules.is_open(holders[holder]) for task_id, holder in held_by.items()}
    was_marked = {row["_id"] for row in moved if row.get("owed_since") is not None}
    done = {step["_id"]: step["owed_since"] for step in steps if is_open[step["_id"]] and "owed_since" in step}
    marks = {task_id: mark for task_id, mark in done.items() if task_id not in was_marked}
    if marks:
        statuses = dict.fromkeys(marks, TaskStatus.WAITING.value)
        yield tasks("update_many", flows.owed_as_read(marks, statuses), flows.cross_off(), hint="_id_")
    return [task_id for task_id in held_by if not is_open[task_id]]


def look(task_ids: Sequence[str]) -> Operation[list[Document]]:
    """Decide on the WAITING tasks among these by the rules; change nothing.

    All is read as it was at one moment. A row holds `_id`, `held_by`, `owed_since`, `verdict`, `other`, and `now`, the
    server's time. For the verdict "wait", `other` is an open task: the present holder, if it is open. For "cancel" and
    "fail", it is a task that has failed.
    """
    steps, moment = yield from _at_one_moment(flows.waiting_now, task_ids, flows.STEP_VIEW)
    groups: dict[tuple[str, ...], list[Document]] = {}
    for step in steps:
        groups.setdefault(_after(step), []).append(step)
    found = yield from _awaited([*{task_id for after in groups for task_id in after}], moment)
    below = yield from _descendants([task_id for task_id, one in found.items() if one.has_children], moment)
    rows = []
    for after, group in groups.items():
        awaited: list[Awaited] = [found.get(task_id) or Awaited(task_id, None) for task_id in after]
        awaited += {one.task_id: one for task_id in after for one in below.get(task_id, ())}.values()
        holders, culprits = rules.holders(awaited), rules.culprits(awaited)
        verdicts = {on_failed: rules.verdict(on_failed, awaited) for on_failed in get_args(OnFailed)}
        among = frozenset(holders)
        for step in group:
            held_by = _text(step, "held_by")
            # The holders of many dependents must differ, and none may be moved many times. So the choice is random.
            holder = held_by if held_by in among else random.choice(holders) if holders else None
            rows.append(
                {
                    "_id": step["_id"],
                    "held_by": held_by,
                    "owed_since": step.get("owed_since"),
                    "now": step["now"],
                    "verdict": verdicts.get(_text(step, "on_failed"), verdicts["fail"]),
                    "other": holder or next(iter(culprits), None),
                }
            )
    return rows


def _after(step: Document) -> tuple[str, ...]:
    """Return the dependencies. A malformed step may have none; whoever claims it finds out."""
    return _texts(_part(step).get("after"))


@dataclass(frozen=True, slots=True)
class _Found(Awaited):
    has_children: bool = False
    ancestors: Sequence[str] = ()


def _awaited(task_ids: Sequence[str], moment: Timestamp) -> Operation[dict[str, _Found]]:
    """Read these tasks as they were at that moment."""
    rows, _ = yield from _at_one_moment(filters.by_ids, task_ids, flows.awaited_view(), moment)
    return {row["_id"]: _parsed(row) for row in rows}


def _descendants(parents: Sequence[str], moment: Timestamp) -> Operation[dict[str, list[Awaited]]]:
    """Read the descendants of each of these tasks as they were at that moment.

    Those that ended as SUCCESS are left out, unless one of them is all that is open.
    """
    below: dict[str, list[Awaited]] = {parent: [] for parent in parents}
    for matched in (flows.descendants, flows.owing_descendants):
        wanted = [parent for parent in parents if not any(map(rules.is_open, below[parent]))]
        rows, _ = yield from _at_one_moment(matched, wanted, flows.awaited_view(), moment, CHILDREN_INDEX)
        for one in map(_parsed, rows):
            for parent in below.keys() & {*one.ancestors}:
                below[parent].append(one)
    return below


def _parsed(row: Document) -> _Found:
    status = _status(row)
    # A task whose status is none is open until a worker marks it FAIL.
    known = TaskStatus(status) if status in _STATUSES else TaskStatus.INIT
    part = _part(row)
    return _Found(row["_id"], known, row["owes"], bool(part.get("has_children")), _texts(part.get("ancestors")))


def _part(row: Document) -> Document:
    """Return the task's part in its flow."""
    part = row.get("flow")
    return part if isinstance(part, dict) else {}


def _text(row: Document, name: str) -> str | None:
    """Return a field of the task's part in its flow. A malformed document may hold something other than text there."""
    value = _part(row).get(name)
    return value if isinstance(value, str) else None


def _texts(value: Any) -> tuple[str, ...]:
    return tuple(one for one in value if isinstance(one, str)) if isinstance(value, list) else ()


def _publish_owed(rows: Sequence[Document]) -> Operation[list[str]]:
    """Publish the tasks that these tasks owe: children, and next tasks. Return the tasks that ended because of it.

    A task that exists stays as it is. If it is another task than the owed one, this is noted. A failure in a flow that
    fails fast may have been settled before a task was added to it, so it is settled again. The tasks are taken out
    last, so nothing is forgotten if this process dies.
    """
    owed_tasks = {document["_id"]: document for row in rows for document in row["owed_tasks"]}
    parents = {"_id": {"$in": [row["_id"] for row in rows]}}
    documents = list(owed_tasks.values())
    present = yield tasks("insert_new", documents)
    yield from _note_strangers([documents[position] for position in present], parents)
    ended: list[str] = []
    for key in sorted(filter(None, {_text(row, "key") for row in rows if _part(row).get("fail_fast")})):
        failed = yield tasks("find_one", flows.failed_fast(key), {"flow.key": 1}, hint=FLOW_INDEX)
        if failed is not None:
            ended += yield from _fail_fast(failed)
    yield tasks("update_many", parents, owing.take_out(list(owed_tasks)), hint="_id_")
    return ended


def _note_strangers(owed_tasks: Sequence[Document], parents: filters.Filter) -> Operation[None]:
    """Note in the parents which of these owed tasks are not published, because other tasks have their ids.

    The server gave an owed task its create_time. A task with another one was published by somebody else.
    """
    if not owed_tasks:
        return
    created = {document["_id"]: document["task_state"]["create_time"] for document in owed_tasks}
    found = yield tasks("find", filters.by_ids(list(created)), {"task_state.create_time": 1}, hint="_id_")
    times = {row["_id"]: row.get("task_state", {}).get("create_time") for row in found}
    strangers = [task_id for task_id, time in times.items() if time != created[task_id]]
    if not strangers:
        return
    _logger.error("not published: another task has the id", extra=fields(task_ids=strangers))
    yield tasks("update_many", parents, owing.note_unpublished(strangers), hint="_id_")


def _reopen_undue(rows: Sequence[Document]) -> Operation[list[str]]:
    """Open the tasks again whose end was caused by a task that is no longer failed."""
    caused = [row for row in rows if _status(row) in _FAILED and _text(row, "held_by") is not None]
    if not caused:
        return []
    culprits = yield from _read({"_id": {"$in": [*{_text(row, "held_by") for row in caused}]}})
    recovered = {row["_id"] for row in culprits if _status(row) not in _FAILED}
    return (yield from _reopen([row for row in caused if _text(row, "held_by") in recovered]))


def _reopen(rows: Sequence[Document]) -> Operation[list[str]]:
    culprits = {row["_id"]: held_by for row in rows if (held_by := _text(row, "held_by")) is not None}
    if culprits:
        yield from change(flows.ended_by(culprits), flows.reopen())
    return [*culprits]


def _fail_fast(failed: Document) -> Operation[list[str]]:
    """Cancel the open tasks of the flow, until a pass changes none; return the tasks that ended."""
    task_id, key = failed["_id"], _text(failed, "key")
    if key is None:
        return []  # a malformed document is in no flow
    # The failed task itself may be open again: its own failure must not cancel the retry.
    matched = {**flows.open_in_flow(key), "_id": {"$ne": task_id}}
    ended: list[str] = []
    for _ in range(2 * MAX_STEPS // BATCH):
        ids = [document["_id"] for document in (yield from _newest(matched, _ID, FLOW_INDEX))]
        if not ids:
            break
        guard = {**matched, "_id": {"$in": ids}}
        yield from change(guard, flows.fail_fast(task_id))
        ended += ids
    return ended


def _tell(rows: Sequence[Document]) -> Operation[_Told]:
    """Decide on the tasks that these tasks hold, and open the tasks again whose end they caused and that are not due.

    A row that has become stale does no harm. What is decided is read anew, and what is opened again too soon is marked.
    A change that came meanwhile has renewed the row's mark.

    Right after a failover, the reads that decide may not show yet that a task has ended. Then the same tasks are found
    again, and the rest is left to a later scan.
    """
    further: list[str] = []
    former: set[str] = set()
    for round_cnt in range(_ROUNDS):
        if round_cnt:
            rows = yield from _read({"_id": {"$in": [row["_id"] for row in rows]}})
        ended = [row["_id"] for row in rows if _status(row) in _FINAL and not row.get("owed_tasks")]
        recovered = [row["_id"] for row in rows if _status(row) not in _FAILED]
        if not (ended or recovered):
            return _Told(further, is_complete=True)
        view = {"task_state.status": 1, "flow.held_by": 1}
        rows_found = yield from _newest(flows.held_or_ended_by(ended, recovered), view, HELD_INDEX)
        # A malformed document may hold a list of tasks there. Nobody can decide on it.
        found = [row for row in rows_found if _text(row, "held_by") is not None]
        if not found:
            return _Told(further, is_complete=True)
        if former == (former := {row["_id"] for row in found}):
            break
        further += yield from decide([row["_id"] for row in found if _status(row) == TaskStatus.WAITING])
        further += yield from _reopen([row for row in found if _status(row) in _FAILED])
    return _Told(further, is_complete=False)


def _cross_off(rows: Sequence[Document], crossed_off: Pipeline | Mapping[str, Any]) -> Operation[bool]:
    """Remove the marks of these tasks; return whether all are removed. A mark that a new change has renewed stays."""
    if not rows:
        return True
    marks: Mapping[str, datetime] = {row["_id"]: row["owed_since"] for row in rows}
    statuses = {row["_id"]: str(_status(row)) for row in rows}
    return (yield from change(flows.owed_as_read(marks, statuses), crossed_off)) == len(rows)


def _read(matched: filters.Filter) -> Operation[list[Document]]:
    return (yield from _newest(matched, _VIEW, "_id_"))


def _newest(matched: filters.Filter, view: Document, hint: str) -> Operation[list[Document]]:
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


def _at_one_moment(
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
        options = {"projection": view, "hint": hint, "batchSize": _MANY, "readConcern": concern}
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


def _status(row: Document) -> str | None:
    state = row.get("task_state")
    status = state.get("status") if isinstance(state, dict) else None
    return status if isinstance(status, str) else None
