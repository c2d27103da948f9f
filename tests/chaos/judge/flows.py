"""Judges flows: each step was released once, none before its dependencies had ended, and none was left waiting."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta

from mtask.kernel.document.status import TaskStatus
from mtask.kernel.document.task import Task
from tests.chaos.judge.record.change import Change
from tests.chaos.judge.record.logs import TaskLog
from tests.chaos.judge.record.verdict import Verdict

#: A release follows from a read of the dependencies that is a few seconds old at most. A dependency that is opened
#: again within this time may be open when its dependents are released.
_FRESH = timedelta(seconds=6)
_FAILED = (TaskStatus.FAIL, TaskStatus.CANCELED)


@dataclass(slots=True)
class _Step:
    status: TaskStatus
    #: Since when the task is a step, or is owed to the flow as one.
    since: datetime
    ancestors: tuple[str, ...] = ()
    #: When the step was last opened again, and its status before that.
    reopened: datetime | None = None
    former: TaskStatus | None = None

    def was(self, at: datetime) -> set[TaskStatus]:
        """Return the statuses that a read may have shown that decided on a change at this time."""
        if self.former is not None and self.was_reopened(at):
            return {self.status, self.former}
        return {self.status}

    def was_reopened(self, at: datetime) -> bool:
        """Whether the step was opened again so shortly before that a read may have shown it as it was before."""
        return self.reopened is not None and at - self.reopened <= _FRESH


class FlowJudge:
    """Follows the steps of flows. Versions of all tasks come in the order in which the database wrote them."""

    def __init__(self, verdict: Verdict) -> None:
        self._verdict = verdict
        self._steps: dict[str, _Step] = {}
        #: The children of each step, theirs and so on, and the tasks as which these went on.
        self._descendants: dict[str, list[str]] = {}
        self._released: set[str] = set()
        self._waited_for_descendants = 0
        self._ended_unreleased = 0
        self._early_cnt = self._twice_cnt = 0

    def created(self, task: Task, at: datetime) -> None:
        """Follow a new step."""
        if task.flow is None:
            return
        owed = self._steps.get(task.id)
        since = at if owed is None else owed.since
        self._steps[task.id] = _Step(task.status, since, tuple(task.flow.ancestors))
        if task.flow.after and task.status is not TaskStatus.WAITING:
            self._verdict.report("wrong_releases", task.id, "was never WAITING", at=at.isoformat())

    def owed(self, task_id: str, ancestors: tuple[str, ...], at: datetime) -> None:
        """Follow a task from the moment at which it is owed to the flow: it is open, although it does not exist yet."""
        self._steps.setdefault(task_id, _Step(TaskStatus.INIT, at, ancestors))
        for ancestor in ancestors:
            self._descendants.setdefault(ancestor, []).append(task_id)

    def changed(self, change: Change) -> None:
        """Judge one write to a step."""
        before, after, at = change.before, change.after, change.at
        if after.flow is None or before.flow is None:
            return
        if before.flow.after != after.flow.after or before.flow.key != after.flow.key:
            self._verdict.report("wrong_releases", after.id, "its dependencies were changed", at=at.isoformat())
        was, now = before.flow.release_time, after.flow.release_time
        if was is None and now is not None:
            self._judge_release(change)
        elif was != now:
            self._twice_cnt += 1
            self._verdict.report("wrong_releases", after.id, "released again", first=was, again=now)
        elif now is None and after.status not in (TaskStatus.WAITING, *_FAILED):
            self._verdict.report("wrong_releases", after.id, "began before its release", status=after.status)
        step = self._steps.get(after.id)
        if step is None:
            self._steps[after.id] = _Step(after.status, at, tuple(after.flow.ancestors))
        elif before.status is not after.status:
            step.status = after.status
            if before.status.is_final and not after.status.is_final:
                step.reopened, step.former = at, before.status

    def _judge_release(self, change: Change) -> None:
        after, at = change.after, change.at
        assert after.flow is not None
        if change.before.status is not TaskStatus.WAITING:
            self._verdict.report("wrong_releases", after.id, "released, and it was not WAITING", at=at.isoformat())
        self._released.add(after.id)
        self._waited_for_descendants += any(other in self._descendants for other in after.flow.after)
        for other in after.flow.after:
            step = self._steps.get(other)
            statuses = {TaskStatus.CANCELED} if step is None else step.was(at)
            self._judge_awaited(change, "a dependency", other, statuses)
            for task_id in self._descendants.get(other, ()):
                descendant = self._steps.get(task_id)
                # A descendant that was removed is not waited for.
                if descendant is not None and not self._may_be_unread(descendant, other, at):
                    self._judge_awaited(change, "a descendant of a dependency", task_id, descendant.was(at))

    def _judge_awaited(self, change: Change, which: str, task_id: str, statuses: set[TaskStatus]) -> None:
        after, at = change.after, change.at.isoformat()
        assert after.flow is not None
        ended = {status for status in statuses if status.is_final}
        if not ended:
            self._early_cnt += 1
            what = f"released before {which} had ended"
            self._verdict.report("wrong_releases", after.id, what, dependency=task_id, at=at)
        elif after.flow.on_failed != "run" and TaskStatus.SUCCESS not in ended:
            what = f"released, although {which} had failed"
            self._verdict.report("wrong_releases", after.id, what, dependency=task_id, at=at)

    def _may_be_unread(self, descendant: _Step, dependency: str, at: datetime) -> bool:
        """Whether a read that decided at this time may lack this descendant of the dependency.

        It may if a task in between had ended, and was opened again shortly before: it added the descendant only then.
        """
        between = descendant.ancestors[descendant.ancestors.index(dependency) :]
        for ancestor in map(self._steps.get, between):
            is_later = ancestor is not None and ancestor.reopened is not None and ancestor.reopened <= descendant.since
            if ancestor is not None and is_later and ancestor.was_reopened(at):
                return True
        return False

    def removed(self, task_id: str) -> None:
        """Forget a step that was removed."""
        self._steps.pop(task_id, None)
        self._released.discard(task_id)

    def conclude(self, tasks: Mapping[str, TaskLog]) -> None:
        """Judge how the steps are in the end, when all versions have gone by."""
        lost = 0
        for task_id, step in self._steps.items():
            log = tasks.get(task_id)
            task = log.task if log is not None else None
            if task is None or task.flow is None:
                continue
            if step.status is TaskStatus.WAITING:
                lost += 1
                self._verdict.report("wrong_releases", task_id, "never released", held_by=task.flow.held_by)
            culprit = self._steps.get(task.flow.held_by or "")
            if step.status in _FAILED and culprit is not None and culprit.status not in _FAILED:
                lost += 1
                what = "ended because of a task that is not failed"
                self._verdict.report("wrong_releases", task_id, what, culprit=task.flow.held_by)
            if task.owed_since is not None:
                self._verdict.report("wrong_releases", task_id, "others were never told of its change")
            self._ended_unreleased += task.flow.release_time is None
        if self._steps:
            self._verdict.figures.controls["steps of flows"] = {
                "steps": len(self._steps),
                "released": len(self._released),
                "released after descendants": self._waited_for_descendants,
                "ended without a release": self._ended_unreleased,
                "lost": lost,
                "early": self._early_cnt,
                "twice": self._twice_cnt,
            }
