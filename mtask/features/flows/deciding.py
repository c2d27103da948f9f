"""Decides on WAITING steps: releases them, ends them, or lets an open task hold them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from mtask.errors import OperationFailed
from mtask.features.flows import looking
from mtask.features.flows import statements as flows
from mtask.features.flows.looking import text_of
from mtask.features.flows.rules import Verdict
from mtask.features.flows.steps import change
from mtask.kernel.document.status import TaskStatus
from mtask.kernel.driver.operation import Operation, tasks
from mtask.kernel.statements import filters

Document = dict[str, Any]
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
        rows = yield from looking.look(pending)
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
    rows = yield from looking.newest(flows.watched([*task_ids]), {"_id": 1}, "_id_")
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
    steps = yield from looking.newest(flows.waiting_now(moved_ids), {"flow.held_by": 1, "owed_since": 1}, "_id_")
    held_by = {step["_id"]: text_of(step, "held_by") for step in steps}
    watched = yield from _watch({holder for holder in held_by.values() if holder is not None})
    was_marked = {row["_id"] for row in moved if row.get("owed_since") is not None}
    done = [step for step in steps if held_by[step["_id"]] in watched and step["_id"] not in was_marked]
    marks = {step["_id"]: step["owed_since"] for step in done if "owed_since" in step}
    if marks:
        statuses = dict.fromkeys(marks, TaskStatus.WAITING.value)
        yield tasks("update_many", flows.owed_as_read(marks, statuses), flows.cross_off(), hint="_id_")
    return [task_id for task_id, holder in held_by.items() if holder not in watched]
