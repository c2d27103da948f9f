"""Judges tasks that other tasks publish: children, and the tasks as which others go on.

Such a task is owed first: its complete document lies in its owner's, from the moment at which a handler added it or
its owner succeeded. So it must exist in the end, once, whatever died in between. Nobody else may make such a task.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from mtask.kernel.document.status import RunStatus, TaskStatus
from mtask.kernel.document.task import Run, Task
from tests.chaos.history import Clock, Document, Note
from tests.chaos.judge.record.asked import TOLERANCE, Asked
from tests.chaos.judge.record.change import Change
from tests.chaos.judge.record.logs import RunLog, TaskLog
from tests.chaos.judge.record.verdict import Verdict


@dataclass(frozen=True, slots=True)
class _Owed:
    owner: str
    run_id: str | None  #: the run that added it, or that went on as it
    is_next: bool
    flow_key: str | None
    ancestors: tuple[str, ...]


class OwedJudge:
    """Follows what tasks owe. Versions of all tasks come in the order in which the database wrote them.

    `tell` hears of each task of a flow from the moment at which it is owed: its id, its ancestors and the time.
    """

    def __init__(self, verdict: Verdict, asked: Asked, tell: Callable[[str, tuple[str, ...], datetime], None]) -> None:
        self._verdict = verdict
        self._asked = asked
        self._tell = tell
        self._owed: dict[str, _Owed] = {}
        self._existing: set[str] = set()
        #: Tasks that owe others, and tasks of no flow with a mark.
        self._owing: set[str] = set()
        self._marked: set[str] = set()
        #: The runs that went on as another task, and those that succeeded and were not to.
        self._went_on: set[str] = set()
        self._excused: set[str] = set()

    def created(self, task: Task, at: datetime) -> None:
        """Judge a new task that has an owner, as its document says."""
        owed = self._owed.get(task.id)
        if owed is None:
            self._report(task.id, "exists, and no task owed it", at=at.isoformat())
            return
        if task.id in self._existing:
            self._report(task.id, "exists for a second time", owner=owed.owner, at=at.isoformat())
        self._existing.add(task.id)
        flow_key, ancestors = (task.flow.key, tuple(task.flow.ancestors)) if task.flow is not None else (None, ())
        before = task.chain.before if task.chain is not None else None
        names_owner = before == owed.owner if owed.is_next else before is None
        if (flow_key, ancestors) != (owed.flow_key, owed.ancestors) or not names_owner:
            self._report(task.id, "is not as it was owed", owner=owed.owner, flow=flow_key, ancestors=ancestors)

    def changed(self, change: Change) -> None:
        """Judge one write to a task that may owe others."""
        before, after = change.before, change.after
        if after.flow is None:
            (self._marked.add if after.owed_since is not None else self._marked.discard)(after.id)
        if before.owed_tasks or after.owed_tasks:
            self._follow(change)
        for task_id in set(after.task_state.unpublished) - set(before.task_state.unpublished):
            self._report(task_id, "is said not to be published, since another task has its id", owner=after.id)
        if after.chain is not None and after.status is TaskStatus.FAIL and before.status is not TaskStatus.FAIL:
            # No handler of a chain fails, but for one that misses what the task before returned.
            self._report(after.id, "failed, as no next task does", why=after.fail_reason, at=change.at.isoformat())
        was, now = before.task_state.next_id, after.task_state.next_id
        if was != now:
            self._judge_next(change, was, now)
        elif change.closed:
            self._judge_staying(change)

    # --- what becomes owed ------------------------------------------------------------------------------------

    def _follow(self, change: Change) -> None:
        before, after = change.before, change.after
        (self._owing.add if after.owed_tasks else self._owing.discard)(after.id)
        old = {document["_id"] for document in before.owed_tasks}
        new = [document for document in after.owed_tasks if document["_id"] not in old]
        for document in new:
            chain = document.get("chain")
            is_next = isinstance(chain, dict) and chain.get("before") == after.id
            if is_next:
                self._judge_owed_next(change, document)
            else:
                self._judge_child(change, document)
            self._take_in(change, document, is_next)
        for task_id in old - {document["_id"] for document in after.owed_tasks}:
            if task_id not in self._existing:
                self._report(task_id, "is not owed any more, and does not exist", owner=after.id, at=change.at)

    def _take_in(self, change: Change, document: Document, is_next: bool) -> None:
        task_id, owner = document["_id"], change.after
        known = self._owed.get(task_id)
        part = document.get("flow") or {}
        run_id = next((run.run_id for run in change.before.runs if run.status is RunStatus.RUNNING), None)
        owed = _Owed(owner.id, run_id, is_next, part.get("key"), tuple(part.get("ancestors", ())))
        if owed.flow_key != (owner.flow.key if owner.flow is not None else None) or owed.ancestors != _ancestors(
            owner, is_next
        ):
            what = "names another flow, or other ancestors, than its owner has"
            self._report(task_id, what, owner=owner.id, flow=owed.flow_key, ancestors=owed.ancestors)
        if known is None:
            self._owed[task_id] = owed
            if owed.flow_key is not None:
                self._tell(task_id, owed.ancestors, change.at)
        elif known.owner != owner.id:
            self._report(task_id, "two tasks owe it", owner=known.owner, other=owner.id)
        elif is_next:
            self._report(task_id, "is owed as the next task for a second time", owner=owner.id, at=change.at)

    def _judge_child(self, change: Change, document: Document) -> None:
        before = change.before
        now: Any = document.get("task_state", {}).get("create_time")
        told = {"owner": before.id, "at": change.at.isoformat()}
        if before.flow is None:
            self._report(document["_id"], "is a child of a task of no flow", **told)
        if not isinstance(now, datetime) or not any(run.is_live(now) for run in before.runs):
            self._report(document["_id"], "was added by no run that held its lease", **told, now=now)
        elif before.task_state.cancel_requested:
            self._report(document["_id"], "was added, although its owner's end was asked for", **told)

    # --- next tasks -------------------------------------------------------------------------------------------

    def _judge_owed_next(self, change: Change, document: Document) -> None:
        task_id, state = document["_id"], change.after.task_state
        told = {"owner": change.task_id, "at": change.at.isoformat()}
        if task_id != state.next_id:
            self._report(task_id, "is owed as a next task that its owner does not name", **told, next_id=state.next_id)
        run_id = document["chain"].get("run_id")
        if run_id not in {run.run_id for run in _successes(change)}:
            self._report(task_id, "is owed as the next task of a run that did not succeed", **told, run=run_id)
        if change.was_final or change.after.status is not TaskStatus.SUCCESS:
            self._report(task_id, "is owed as the next task, and its owner did not become SUCCESS", **told)
        if change.before.task_state.cancel_requested:
            self._report(task_id, "is owed as the next task, although its owner's end was asked for", **told)
        self._went_on.add(str(run_id))

    def _judge_next(self, change: Change, was: str | None, now: str | None) -> None:
        if was is None:
            if now not in {document["_id"] for document in change.after.owed_tasks}:
                self._report(str(now), "is named as the next task, and was never owed", owner=change.task_id)
        elif now is not None:
            self._report(now, "is a second next task", owner=change.task_id, first=was, at=change.at.isoformat())
        elif not self._asked.may_update(change.task_id, change.at.timestamp()):
            # Only a round that begins with a new publish goes on anew.
            self._report(was, "is the next task, and its owner has forgotten it", owner=change.task_id)

    def _judge_staying(self, change: Change) -> None:
        state = change.before.task_state
        if state.cancel_requested or state.next_id is not None or change.after.status is not TaskStatus.SUCCESS:
            self._excused |= {run.run_id for run in _successes(change)}

    # --- in the end -------------------------------------------------------------------------------------------

    def removed(self, task_id: str) -> None:
        """Forget what a task that was removed owed."""
        self._owing.discard(task_id)
        self._marked.discard(task_id)

    def conclude(self) -> None:
        """Judge what is left, when all versions have gone by."""
        for task_id in sorted(self._owing):
            self._report(task_id, "still owes tasks in the end")
        for task_id in sorted(self._marked):
            self._report(task_id, "is still marked in the end")
        for task_id, owed in self._owed.items():
            if task_id not in self._existing:
                self._report(task_id, "was owed, and never existed", owner=owed.owner)

    def judge_handlers(
        self,
        added: Iterable[Note],
        going_on: Collection[str],
        runs: Mapping[str, RunLog],
        tasks: Mapping[str, TaskLog],
        clock: Clock,
    ) -> None:
        """Compare what handlers noted: children that they were told of, and runs that were to go on."""
        acknowledged: set[tuple[str, str]] = set()
        for note in added:
            acknowledged.update((task_id, note.run_id) for task_id in note.detail)
            for task_id in note.detail:
                self._judge_acknowledged(task_id, note, tasks.get(task_id), clock.epoch + note.at)
        for run_id in going_on:
            run = runs.get(run_id)
            is_due = run is not None and run.status is RunStatus.SUCCESS and run_id not in self._excused
            if run is not None and is_due and run_id not in self._went_on:
                self._report(run.task_id, "succeeded, and did not go on as another task", run=run_id)
        for run_id in self._went_on - set(going_on):
            owner = runs[run_id].task_id if run_id in runs else run_id
            self._report(owner, "went on as another task, and its handler did not ask for it", run=run_id)
        self._count(acknowledged, going_on)

    def _judge_acknowledged(self, task_id: str, note: Note, log: TaskLog | None, told: float) -> None:
        owed = self._owed.get(task_id)
        if log is None or not any(life.meets(0.0, told + TOLERANCE) for life in log.lives):
            self._report(task_id, "a handler was told of it, and it did not exist", owner=note.task_id, run=note.run_id)
        elif owed is None or owed.owner != note.task_id:
            self._report(task_id, "a handler was told that it added it, and another did", handler=note.task_id)

    def _count(self, acknowledged: Collection[tuple[str, str]], going_on: Collection[str]) -> None:
        children = {task_id: owed for task_id, owed in self._owed.items() if not owed.is_next}
        if children:
            parents = {owed.owner for owed in children.values()}
            self._verdict.figures.controls["children of steps"] = {
                "children": len(children),
                "of children": sum(owed.owner in children for owed in children.values()),
                "parents": len(parents),
                # Of others, a later run of the task was told, or none.
                "acknowledged to their runs": sum(
                    (task_id, owed.run_id) in acknowledged for task_id, owed in children.items()
                ),
            }
        if len(children) < len(self._owed) or going_on:
            nexts = [owed for owed in self._owed.values() if owed.is_next]
            self._verdict.figures.controls["next tasks"] = {
                "runs that returned one": len(going_on),
                "went on": len(nexts),
                "of flows": sum(owed.flow_key is not None for owed in nexts),
            }

    def _report(self, task_id: str, what: str, **evidence: object) -> None:
        self._verdict.report("wrong_owed", task_id, what, **evidence)


def _successes(change: Change) -> list[Run]:
    return [run for _, run in change.closed if run.status is RunStatus.SUCCESS]


def _ancestors(owner: Task, is_next: bool) -> tuple[str, ...]:
    """Return the ancestors of a task that this task owes."""
    if owner.flow is None:
        return ()
    if is_next and owner.chain is not None:
        return tuple(owner.flow.ancestors)  # all tasks of a chain are children of its first one
    return (*owner.flow.ancestors, owner.id)
