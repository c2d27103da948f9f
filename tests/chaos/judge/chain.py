"""Walks through all versions of all tasks in the order in which they were written, and has each write judged."""

from __future__ import annotations

from datetime import datetime

from pydantic import ValidationError

from mtask.kernel.document.status import RunStatus
from mtask.kernel.document.task import StoredTask, describe_validation
from tests.chaos.history import Version
from tests.chaos.judge.fields import FieldJudge
from tests.chaos.judge.flows import FlowJudge
from tests.chaos.judge.owed import OwedJudge
from tests.chaos.judge.record.asked import Asked
from tests.chaos.judge.record.change import COUNTED, Change
from tests.chaos.judge.record.course import Course
from tests.chaos.judge.record.logs import Life, TaskLog, Write
from tests.chaos.judge.record.verdict import Verdict
from tests.chaos.judge.rounds import RoundJudge
from tests.chaos.judge.runs import RunJudge


class Chain:
    """All tasks, as their versions go by."""

    def __init__(self, verdict: Verdict, asked: Asked, course: Course) -> None:
        self._verdict = verdict
        self._asked = asked
        self._course = course
        self._run_judge = RunJudge(verdict, asked)
        self._field_judge = FieldJudge(verdict, asked)
        self._flow_judge = FlowJudge(verdict)
        self.round_judge = RoundJudge(verdict, asked)
        self.owed_judge = OwedJudge(verdict, asked, self._flow_judge.owed)
        self.tasks: dict[str, TaskLog] = {}
        self.runs = self._run_judge.runs
        self.version_count = 0

    def follow(self, version: Version) -> None:
        """Judge the next version."""
        self.version_count += 1
        log = self.tasks.get(version.task_id)
        if log is None:
            log = self.tasks[version.task_id] = TaskLog(version.task_id, version.task_id in self._asked.by_task)
        at = version.at.timestamp()
        if version.document is None:
            self._removed(log, version.at)
            return
        try:
            task = StoredTask.model_validate(version.document)
        except ValidationError as error:
            self._verdict.report(
                "wrong_fields", version.task_id, "malformed", at=version.at.isoformat(), why=describe_validation(error)
            )
            task = None
        if task is not None and log.is_asked:
            is_final = task.status.is_final
            is_ending = is_final or task.task_state.cancel_requested
            log.writes.append(Write(at, log.is_final and not is_final, is_ending))
        if not log.is_there:
            self._created(log, task, version.at)
        elif task is not None and log.task is not None:
            self._changed(log, Change(log.task, task, version.at, self.runs))
        log.keep(version.document, task)

    def conclude(self) -> None:
        """Judge what shows only in the end, when all versions have gone by."""
        self._flow_judge.conclude(self.tasks)
        self.owed_judge.conclude()

    def _created(self, log: TaskLog, task: StoredTask | None, at: datetime) -> None:
        log.lives.append(Life(at.timestamp()))
        if task is None:
            return
        log.begin_round(task.task_option.concurrent_worker_cnt)
        if task.runs or task.task_state.status.is_final:
            self._verdict.doubt(f"the first version seen of {log.task_id} is not that of a new task")
            for run in task.runs:
                self._run_judge.register(log.task_id, run)
            return
        if task.chain is not None or (task.flow is not None and task.flow.ancestors):
            self.owed_judge.created(task, at)
        elif not self._asked.may_write(log.task_id, at.timestamp(), "publish", "update", "gather"):
            self._verdict.report("wrong_fields", log.task_id, "created, and nobody had asked for it", at=at.isoformat())
        self._field_judge.created(task, at)
        self._course.created(task, at)
        self._flow_judge.created(task, at)
        self.round_judge.created(task)

    def _removed(self, log: TaskLog, at: datetime) -> None:
        if not log.is_there:
            self._verdict.doubt(f"{log.task_id} was removed, and no version showed it before")
            return
        document = log.document or {}
        expire_time = document.get("expire_time")
        instant = at.timestamp()
        is_expired = isinstance(expire_time, datetime) and expire_time <= at
        if not is_expired and not self._asked.may_write(log.task_id, instant, "remove"):
            self._verdict.report(
                "lost", log.task_id, "removed, and nobody had asked for it", at=at.isoformat(), expiry=expire_time
            )
        log.lives[-1].removed = instant
        log.forget()
        self._flow_judge.removed(log.task_id)
        self.owed_judge.removed(log.task_id)
        self.round_judge.removed(log.task_id)

    def _changed(self, log: TaskLog, change: Change) -> None:
        after, at = change.after, change.at.timestamp()
        if change.before == after:
            return  # only params or returns are others
        self._run_judge.judge(change, log)
        self._field_judge.judge(change, log)
        self._course.changed(change, log)
        self.owed_judge.changed(change)
        self.round_judge.changed(change)
        self._flow_judge.changed(change)
        if change.is_aged or change.is_reopened:
            # Where places were taken back, more than are left may still be held.
            held = sum(not run.past and run.status in (RunStatus.RUNNING, RunStatus.SUCCESS) for run in after.runs)
            log.begin_round(max(after.task_option.concurrent_worker_cnt, held))
            return
        log.most_places = max(log.most_places, after.task_option.concurrent_worker_cnt)
        if after.task_state.failed_cnt == 0 and self._asked.may_update(change.task_id, at):
            log.tried, log.tried_by = 0, None  # cleaned
        else:
            log.count([run for _, run in change.closed if run.status in COUNTED])
