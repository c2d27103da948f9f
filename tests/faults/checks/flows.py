"""Judges flows: each step was released once, none before its dependencies had ended, and none was left waiting."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta

from mtask.model.documents import Task
from mtask.model.status import TaskStatus
from tests.faults.checks.change import Change
from tests.faults.checks.logs import TaskLog
from tests.faults.checks.verdict import Verdict

#: A release follows from a read of the dependencies that is a few seconds old at most. A dependency that is opened
#: again within this time may be open when its dependents are released.
_FRESH = timedelta(seconds=6)
_FAILED = (TaskStatus.FAIL, TaskStatus.CANCELED)


@dataclass(slots=True)
class _Step:
    status: TaskStatus
    since: datetime
    #: The status before this one, if the step was opened again.
    former: TaskStatus | None = None

    def was(self, at: datetime) -> set[TaskStatus]:
        """Return the statuses that a read may have shown that decided on a change at this time."""
        is_recent = self.former is not None and at - self.since <= _FRESH
        return {self.status, self.former} if is_recent and self.former is not None else {self.status}


class FlowJudge:
    """Follows the steps of flows. Versions of all tasks come in the order in which the database wrote them."""

    def __init__(self, verdict: Verdict) -> None:
        self._verdict = verdict
        self._steps: dict[str, _Step] = {}
        self._released: set[str] = set()
        self._ended_unreleased = 0
        self._early_cnt = self._twice_cnt = 0

    def created(self, task: Task, at: datetime) -> None:
        """Follow a new step."""
        if task.flow is None:
            return
        self._steps[task.id] = _Step(task.status, at)
        if task.flow.after and task.status is not TaskStatus.WAITING:
            self._verdict.report("wrong_releases", task.id, "was never WAITING", at=at.isoformat())

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
        if before.status is not after.status:
            former = self._steps.get(after.id)
            is_reopened = before.status.is_final and not after.status.is_final
            keeps = former is not None and not after.status.is_final and not is_reopened
            self._steps[after.id] = _Step(
                after.status,
                former.since if keeps and former is not None else at,
                before.status if is_reopened else former.former if keeps and former is not None else None,
            )

    def _judge_release(self, change: Change) -> None:
        after, at = change.after, change.at
        assert after.flow is not None
        if change.before.status is not TaskStatus.WAITING:
            self._verdict.report("wrong_releases", after.id, "released, and it was not WAITING", at=at.isoformat())
        self._released.add(after.id)
        for other in after.flow.after:
            step = self._steps.get(other)
            statuses = {TaskStatus.CANCELED} if step is None else step.was(at)
            ended = {status for status in statuses if status.is_final}
            if not ended:
                self._early_cnt += 1
                what = "released before a dependency had ended"
                self._verdict.report("wrong_releases", after.id, what, dependency=other, at=at.isoformat())
            elif after.flow.on_failed != "run" and TaskStatus.SUCCESS not in ended:
                what = "released, although a dependency had failed"
                self._verdict.report("wrong_releases", after.id, what, dependency=other, at=at.isoformat())

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
                "ended without a release": self._ended_unreleased,
                "lost": lost,
                "early": self._early_cnt,
                "twice": self._twice_cnt,
            }
