"""Settles changes of steps: tells the other tasks of a flow that a task has ended, or that it is open again.

Each change of a step into or out of a final status sets the mark `owed_since` in the same update. To settle the change
is to do all that other tasks are owed because of it, and then to remove the mark, unless a new change has renewed it.
So nothing is lost if a process dies at any point: whoever finds the mark settles the change again. Settling twice, or
at the same time, changes nothing twice, because each statement has a guard.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from pydantic import ValidationError

from mtask.errors import DocumentTooLarge, OperationFailed
from mtask.features.flows import read, retention
from mtask.features.flows import statements as flows
from mtask.features.flows.read import BATCH, newest, part_of, status_of, text_of
from mtask.features.flows.rules import Verdict
from mtask.kernel.document.status import FAILED, FINAL, TaskStatus
from mtask.kernel.document.task import MAX_STEPS, StoredTask, describe_validation
from mtask.kernel.driver.indexes import FLOW_INDEX, HELD_INDEX
from mtask.kernel.driver.operation import Operation, tasks
from mtask.kernel.operations import claim as claims
from mtask.kernel.operations.relays import Relay
from mtask.kernel.statements import expressions as x
from mtask.kernel.statements import filters
from mtask.kernel.statements.derive import Pipeline
from mtask.logs import SureLogger, fields

Document = dict[str, Any]
_logger = SureLogger("mtask.store")
_VIEW = {
    "tenant": 1,
    "task_state.status": 1,
    "owed_since": 1,
    "owed_tasks": 1,
    "flow.key": 1,
    "flow.held_by": 1,
    "flow.fail_fast": 1,
    "owed_by": x.OWED_VALUES,
}


def settle_all(task_ids: Iterable[str]) -> Operation[list[str]]:
    """Settle the changes of these tasks, and the changes that follow from them; return the tasks of the latter."""
    waiting = [*dict.fromkeys(task_ids)]
    following: dict[str, None] = {}
    for _ in range(2 * MAX_STEPS):
        if not waiting:
            break
        batch, waiting = waiting[:BATCH], waiting[BATCH:]
        further = yield from settle(batch)
        waiting = [*dict.fromkeys([*waiting, *further])]
        following |= dict.fromkeys(further)
    return [*following]


RELAY = Relay("owed_since", settle_all, lambda run, goes_on: "flow" in run.owes or goes_on)


def settle(task_ids: Sequence[str]) -> Operation[list[str]]:
    """Settle the changes of these tasks; return the tasks whose own changes followed from it."""
    further: list[str] = []
    for _ in range(ROUNDS):
        rows = yield from _read({"_id": {"$in": list(task_ids)}, "owed_since": {"$exists": True}})
        # A task whose value is still to come has not ended for others. Whoever stores the value settles the task.
        rows = [row for row in rows if not row.get("owed_by")]
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
    reopened = {text_of(row, "key") for row in rows if status_of(row) not in FINAL}
    yield from retention.revive(sorted(filter(None, reopened)))
    decided = yield from decide([row["_id"] for row in rows if status_of(row) == TaskStatus.WAITING])
    further += decided.further
    further += yield from _reopen_undue(rows)
    for row in rows:
        if status_of(row) == TaskStatus.FAIL and part_of(row).get("fail_fast"):
            further += yield from _fail_fast(row)
    told = yield from _tell(rows)
    further += told.further
    if not told.is_complete:
        return _Settled(further, is_complete=False, is_crossed_off=False)
    done = [row for row in rows if status_of(row) != TaskStatus.WAITING or decided.stays(row)]
    is_crossed_off = yield from _cross_off(done, flows.cross_off())
    return _Settled(further, is_crossed_off=is_crossed_off and len(done) == len(rows))


@dataclass(frozen=True, slots=True)
class _Settled:
    further: Sequence[str]  #: the tasks whose own changes followed
    is_complete: bool = True  #: whether all others have been told
    is_crossed_off: bool = True  #: whether all marks are removed


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
    for key in sorted(filter(None, {text_of(row, "key") for row in rows if part_of(row).get("fail_fast")})):
        failed = yield tasks("find_one", flows.failed_fast(key), {"tenant": 1, "flow.key": 1}, hint=FLOW_INDEX)
        if failed is not None:
            ended += yield from _fail_fast(failed)
    yield tasks("update_many", parents, flows.take_out(list(owed_tasks)), hint="_id_")
    return ended


def _note_strangers(owed_tasks: Sequence[Document], parents: filters.Filter) -> Operation[None]:
    """Note in the parents which of these owed tasks are not published, because other tasks have their ids.

    The server gave an owed task its create_time. A task with another one was published by somebody else, unless it is a
    child of the same parent: two runs of the parent may have owed it.
    """
    if not owed_tasks:
        return
    owed = {document["_id"]: document for document in owed_tasks}
    view = {"task_state.create_time": 1, "flow.ancestors": 1, "chain.before": 1}
    found = yield tasks("find", filters.by_ids(list(owed)), view, hint="_id_")
    strangers = [row["_id"] for row in found if not _is_same(row, owed[row["_id"]])]
    if not strangers:
        return
    _logger.error("not published: another task has the id", extra=fields(task_ids=strangers))
    yield tasks("update_many", parents, flows.note_unpublished(strangers), hint="_id_")


def _is_same(row: Document, owed_task: Document) -> bool:
    """Whether the task that exists is the owed one."""
    if row.get("task_state", {}).get("create_time") == owed_task["task_state"]["create_time"]:
        return True
    # One task goes on as another once, so two next tasks with one id are two tasks.
    is_child = "chain" not in row and "chain" not in owed_task
    parent = owed_task.get("flow", {}).get("ancestors", [])[-1:]
    ancestors = part_of(row).get("ancestors")
    return is_child and parent != [] and isinstance(ancestors, list) and ancestors[-1:] == parent


def _reopen_undue(rows: Sequence[Document]) -> Operation[list[str]]:
    """Open the tasks again whose end was caused by a task that is no longer failed."""
    caused = [row for row in rows if status_of(row) in FAILED and text_of(row, "held_by") is not None]
    if not caused:
        return []
    culprits = yield from _read({"_id": {"$in": [*{text_of(row, "held_by") for row in caused}]}})
    recovered = {row["_id"] for row in culprits if status_of(row) not in FAILED}
    return (yield from _reopen([row for row in caused if text_of(row, "held_by") in recovered]))


def _reopen(rows: Sequence[Document]) -> Operation[list[str]]:
    culprits = {row["_id"]: held_by for row in rows if (held_by := text_of(row, "held_by")) is not None}
    if culprits:
        yield from change(flows.ended_by(culprits), flows.reopen())
    return [*culprits]


def _fail_fast(failed: Document) -> Operation[list[str]]:
    """Cancel the open tasks of the flow, until a pass changes none; return the tasks that ended.

    Tasks of another tenant stay: an older mtask published flows of a tenant into those of nobody.
    """
    task_id, key = failed["_id"], text_of(failed, "key")
    if key is None:
        return []  # a malformed document is in no flow
    # The failed task itself may be open again: its own failure must not cancel the retry.
    matched = {**flows.open_in_flow(key), "_id": {"$ne": task_id}, "tenant": {"$eq": failed.get("tenant")}}
    ended: list[str] = []
    for _ in range(2 * MAX_STEPS // BATCH):
        ids = [document["_id"] for document in (yield from newest(matched, {"_id": 1}, FLOW_INDEX))]
        if not ids:
            break
        guard = {**matched, "_id": {"$in": ids}}
        yield from change(guard, flows.fail_fast(task_id))
        ended += ids
    return ended


def _tell(rows: Sequence[Document]) -> Operation[_Settled]:
    """Decide on the tasks that these tasks hold, and open the tasks again whose end they caused and that are not due.

    A row that has become stale does no harm. What is decided is read anew, and what is opened again too soon is marked.
    A change that came meanwhile has renewed the row's mark.

    Right after a failover, the reads that decide may not show yet that a task has ended. Then the same tasks are found
    again, and the rest is left to a later scan.
    """
    further: list[str] = []
    former: set[str] = set()
    for round_cnt in range(ROUNDS):
        if round_cnt:
            rows = yield from _read({"_id": {"$in": [row["_id"] for row in rows]}})
        ended = [row["_id"] for row in rows if status_of(row) in FINAL and not _owes(row)]
        recovered = [row["_id"] for row in rows if status_of(row) not in FAILED]
        if not (ended or recovered):
            return _Settled(further)
        view = {"task_state.status": 1, "flow.held_by": 1}
        rows_found = yield from newest(flows.held_or_ended_by(ended, recovered), view, HELD_INDEX)
        # A malformed document may hold a list of tasks there. Nobody can decide on it.
        found = [row for row in rows_found if text_of(row, "held_by") is not None]
        if not found:
            return _Settled(further)
        if former == (former := {row["_id"] for row in found}):
            break
        decided = yield from decide([row["_id"] for row in found if status_of(row) == TaskStatus.WAITING])
        further += decided.further
        further += yield from _reopen([row for row in found if status_of(row) in FAILED])
    return _Settled(further, is_complete=False)


def _owes(row: Document) -> bool:
    return bool(row.get("owed_tasks") or row.get("owed_by"))


def _cross_off(rows: Sequence[Document], crossed_off: Pipeline | Mapping[str, Any]) -> Operation[bool]:
    """Remove the marks of these tasks; return whether all are removed. A mark that a new change has renewed stays."""
    if not rows:
        return True
    marks: Mapping[str, datetime] = {row["_id"]: row["owed_since"] for row in rows}
    statuses = {row["_id"]: str(status_of(row)) for row in rows}
    return (yield from change(flows.owed_as_read(marks, statuses), crossed_off)) == len(rows)


def _read(matched: filters.Filter) -> Operation[list[Document]]:
    return (yield from newest(matched, _VIEW, "_id_"))


# --- deciding --------------------------------------------------------------------------------------------

# Decides on WAITING steps: releases them, ends them, or lets an open task hold them.

#: The most rounds of one operation. Each round makes progress, or another process has made some. So this limit is only
#: reached if others keep changing the same tasks. The mark then stays, and a later scan goes on.
ROUNDS = 100


@dataclass(slots=True)
class Decided:
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


def decide(task_ids: Sequence[str]) -> Operation[Decided]:
    """Release or end the WAITING tasks among these, or let an open task hold them."""
    decided = Decided()
    further = decided.further
    refusal: OperationFailed | None = None
    pending = list(task_ids)
    for try_cnt in range(ROUNDS):
        if not pending:
            break
        rows = yield from read.look(pending)
        pending = []
        moved: list[Document] = []
        staying = [row for row in rows if _stays(row)]
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
        watched = yield from _watch({row["other"] for row in staying if row["unwatched"]})
        for row in staying:
            if row["unwatched"] and row["other"] not in watched:
                pending.append(row["_id"])
            else:
                decided.marks[row["_id"]] = row.get("owed_since")
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


def _watch(task_ids: Collection[str]) -> Operation[Collection[str]]:
    """Let the ends of these tasks be marked; return those of them that are open and whose end will be marked.

    A majority has the watch before the mark of the step that watches is removed. So a failover undoes both or none.
    """
    if not task_ids:
        return task_ids
    open_cnt = yield from change(flows.still_open([*task_ids]), flows.watch())
    if open_cnt == len(task_ids):
        return task_ids
    rows = yield from read.newest(flows.watched([*task_ids]), {"_id": 1}, "_id_")
    return {row["_id"] for row in rows}


def _confirm(moved: Sequence[Document]) -> Operation[list[str]]:
    """Watch the new holders of moved tasks; return the tasks whose new holder has ended meanwhile.

    The new holder could have ended between the first read and the move: unmarked, or told its dependents before the
    move. The steps are read before the watch. So if a mark is still there when it is removed, the step was held by an
    open task whose end will be marked.
    """
    if not moved:
        return []
    moved_ids = [row["_id"] for row in moved]
    steps = yield from read.newest(flows.waiting_now(moved_ids), {"flow.held_by": 1, "owed_since": 1}, "_id_")
    held_by = {step["_id"]: text_of(step, "held_by") for step in steps}
    watched = yield from _watch({holder for holder in held_by.values() if holder is not None})
    was_marked = {row["_id"] for row in moved if row.get("owed_since") is not None}
    done = [step for step in steps if held_by[step["_id"]] in watched and step["_id"] not in was_marked]
    marks = {step["_id"]: step["owed_since"] for step in done if "owed_since" in step}
    if marks:
        statuses = dict.fromkeys(marks, TaskStatus.WAITING.value)
        yield tasks("update_many", flows.owed_as_read(marks, statuses), flows.cross_off(), hint="_id_")
    return [task_id for task_id, holder in held_by.items() if holder not in watched]


# --- steps -----------------------------------------------------------------------------------------------

# Changes many steps in one statement. A step that the server cannot change holds up no other.

#: What the document of a task that cannot be changed names as the writer of its FAIL, and the short reason if the task
#: has no room left in its document.
_WRITER = "flow"
TOO_LARGE = "too large: a change would exceed MongoDB's 16 MB; put less into params"


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
