"""Judges what the engine derives: status, counters, preemption time and ends, at each $$NOW a write can have had."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import Any

from mtask.kernel.document import rules
from mtask.kernel.document.status import RunStatus, TaskStatus
from mtask.kernel.document.task import Run, Task
from tests.chaos.judge.record.asked import Asked
from tests.chaos.judge.record.change import LOG_LAG, MILLISECOND, Change
from tests.chaos.judge.record.logs import TaskLog
from tests.chaos.judge.record.verdict import Verdict
from tests.oracles import rules as oracle


class FieldJudge:
    """Judges the fields of documents. A document is judged as what its write made of the one before it."""

    def __init__(self, verdict: Verdict, asked: Asked) -> None:
        self._verdict = verdict
        self._asked = asked

    def created(self, task: Task, at: datetime) -> None:
        """Judge a new document."""
        state = task.task_state
        is_waiting = rules.is_waiting(task)
        wrong = {
            "status": state.status is not (TaskStatus.WAITING if is_waiting else TaskStatus.INIT),
            "failed_cnt": state.failed_cnt != 0,
            "worker_states": bool(state.worker_states),
            "cancel_requested": state.cancel_requested,
            "finish_time": state.finish_time is not None,
            "expire_time": task.expire_time is not None,
            "next_preempt_time": state.next_preempt_time != (None if is_waiting else rules.due_time(task)),
            "create_time": state.create_time > at + LOG_LAG,
        }
        for name in (name for name, is_wrong in wrong.items() if is_wrong):
            self._report(task, at, f"a new task with another {name}", value=getattr(state, name, task.expire_time))

    def judge(self, change: Change, log: TaskLog) -> None:
        """Judge one write."""
        at = change.at.timestamp()
        self._constants(change, at)
        if len(change.exact_nows) > 1:
            self._report(change.after, change.at, "instants of one write disagree", nows=_told(change.exact_nows))
        if not change.is_ping and any(now > change.at + LOG_LAG for now in change.exact_nows):
            self._report(change.after, change.at, "an instant lies ahead of its write", nows=_told(change.exact_nows))
        self._end_stays(change, at)
        self._failed_cnt(change, log, at)
        self._cancel_requested(change, at)
        self._lapsed_are_closed(change)
        for earlier, run in change.closed:
            self._retry_time(change, earlier, run)
        if not self._is_mark(change, at):
            self._derived(change)
        self._ended(change)

    # --- what must not change -----------------------------------------------------------------------------------

    def _constants(self, change: Change, at: float) -> None:
        before, after = change.before, change.after
        fixed = {"create_time": before.task_state.create_time != after.task_state.create_time}
        replaced = {
            "task_option": before.task_option != after.task_option,
            "queue": before.queue != after.queue,
            "start_time": before.task_state.start_time != after.task_state.start_time,
        }
        is_other = change.begins_next_round or self._asked.may_update(change.task_id, at)
        if any(replaced.values()) and not is_other:
            fixed |= replaced
        for name in (name for name, is_changed in fixed.items() if is_changed):
            self._report(after, change.at, f"{name} was changed and nobody asked for it")

    def _end_stays(self, change: Change, at: float) -> None:
        if not change.was_final or change.after == change.before or self._asked.may_reopen(change.task_id, at):
            return
        if _is_settled(change):
            return
        # Where fewer places are asked for than are held, the others may come to their end.
        of_holders = change.after.status is change.before.status and not (
            change.appended or change.vanished or change.altered or change.is_aged
        )
        if not (of_holders and (change.closed or change.moved)):
            was, became = change.before.status, change.after.status
            self._verdict.report(
                "second_success",
                change.task_id,
                "changed after its end, and nobody had asked for it",
                was=was,
                became=became,
                at=change.at.isoformat(),
            )

    # --- what the rules say ---------------------------------------------------------------------------------------

    def _failed_cnt(self, change: Change, log: TaskLog, at: float) -> None:
        count, expected = change.after.task_state.failed_cnt, change.before.task_state.failed_cnt + change.newly_counted
        is_reset = change.is_reopened or change.begins_next_round or self._asked.may_update(change.task_id, at)
        if count == expected or (count == 0 and is_reset):
            return
        self._report(change.after, change.at, "failed_cnt", value=count, expected=expected, tried=log.tried)

    def _cancel_requested(self, change: Change, at: float) -> None:
        before, after = change.before.task_state, change.after.task_state
        if before.cancel_requested and not after.cancel_requested and not after.status.is_final:
            self._report(change.after, change.at, "cancel_requested was taken back")
        if _has_caused_end(change.after):
            return  # another step of its flow has failed
        is_asked = after.cancel_requested or (after.status is TaskStatus.CANCELED and not change.was_final)
        was_asked = before.cancel_requested or self._asked.may_write(change.task_id, at, "cancel", "remove")
        if is_asked and not was_asked:
            self._report(change.after, change.at, "canceled, and nobody asked for it", status=after.status)
        if after.cancel_requested and after.status.is_final:
            self._report(change.after, change.at, "cancel_requested after its end")

    def _lapsed_are_closed(self, change: Change) -> None:
        if change.is_ping or not change.exact_nows:
            return
        now = max(change.exact_nows)
        for run in change.after.runs:
            if run.is_lapsed(now):
                self._report(change.after, change.at, "a lapsed run was left open", run=run.run_id, now=now.isoformat())

    def _retry_time(self, change: Change, earlier: Run, run: Run) -> None:
        if run.fail_time is None or run.status is RunStatus.SUCCESS:
            return
        if run.status is RunStatus.TIMEOUT:
            if run.retry_time is not None:
                self._report(change.after, change.at, "a wait after a timeout", run=run.run_id)
            return
        if run.retry_time is None and run.status is RunStatus.CANCELED:
            return  # handed back: it is due as it was
        if run.retry_time is None or run.retry_time < run.fail_time:
            self._report(change.after, change.at, "retry_time", run=run.run_id, value=run.retry_time)
            return
        if run.status is not RunStatus.FAIL:
            return
        before = change.before
        option, now = before.task_option, run.fail_time
        others = rules.failures(before, now)
        if option.retry_scope == "worker":
            others = rules.worker_failures(before, earlier.worker_id, now)
        shortest, longest = (oracle.retry_delay_ms(option, others + 1, jitter) * MILLISECOND for jitter in (1.0, 0.0))
        if not shortest <= run.retry_time - run.fail_time <= longest:
            wait = run.retry_time - run.fail_time
            self._report(
                change.after, change.at, "retry_time", run=run.run_id, wait=wait, expected=f"{shortest} to {longest}"
            )

    def _is_mark(self, change: Change, at: float) -> bool:
        """Whether this is the mark that goes before a removal: it derives nothing."""
        before, after = change.before.task_state, change.after.task_state
        return (
            after.cancel_requested
            and not before.cancel_requested
            and after.worker_states == before.worker_states
            and (after.status, after.next_preempt_time) == (before.status, before.next_preempt_time)
            and self._asked.may_write(change.task_id, at, "remove")
        )

    def _derived(self, change: Change) -> None:
        after = change.after
        state = after.task_state
        if change.was_final and state.status.is_final:
            return  # a final status stays; whether it did is judged as an end
        if change.before.status is TaskStatus.WAITING and state.status.is_final and _has_caused_end(after):
            return  # the end of a step whose dependency failed
        found = []
        for now in change.nows:
            with _before_derivation(change):
                status = rules.status(after, now)
                next_time = oracle.next_preempt_time(after, now)
            if status is state.status and (status.is_final or next_time == state.next_preempt_time):
                break
            found.append(f"{status} and {next_time.isoformat() if next_time else None} at {now.isoformat()}")
        else:
            value = state.next_preempt_time.isoformat() if state.next_preempt_time else None
            self._report(
                after,
                change.at,
                "status or next_preempt_time",
                value=f"{state.status} and {value}",
                expected=" or ".join(found),
            )

    def _ended(self, change: Change) -> None:
        before, after = change.before, change.after
        state, option = after.task_state, after.task_option
        is_final = state.status.is_final
        if (state.finish_time is not None) is not is_final:
            self._report(after, change.at, "finish_time", value=state.finish_time, status=state.status)
        elif change.was_final and is_final and before.task_state.finish_time != state.finish_time:
            self._report(after, change.at, "finish_time was moved", value=state.finish_time)
        if is_final and state.next_preempt_time is not None:
            self._report(after, change.at, "next_preempt_time after its end", status=state.status)
        retain = option.retain_success_ms if state.status is TaskStatus.SUCCESS else option.retain_fail_ms
        expected = None
        # A task that owes its next task stays until that is published.
        if is_final and retain is not None and state.finish_time is not None and after.owed_since is None:
            expected = state.finish_time + retain * MILLISECOND
        # The retention of a step begins when its flow has ended.
        if after.expire_time != expected and after.flow is None:
            self._report(after, change.at, "expire_time", value=after.expire_time, expected=expected)

    def _report(self, task: Task, at: datetime, what: str, **evidence: object) -> None:
        self._verdict.report("wrong_fields", task.id, what, at=at.isoformat(), **evidence)


def _has_caused_end(task: Task) -> bool:
    """Whether another step of its flow caused the end of this step. `FlowJudge` judges whether that one has failed."""
    return task.flow is not None and task.flow.held_by is not None


def _is_settled(change: Change) -> bool:
    """Whether a task that has ended changed as others make it change.

    What it owed is published, its mark is removed, its flow ends, the value of a success has come or is lost, or it is
    opened again because the step that caused its end is not failed now.
    """
    before, after = change.before, change.after
    if before.model_dump(exclude={"quiet_time"}) == after.model_dump(exclude={"quiet_time"}):
        return True  # its value was sent again
    if (before.flow is None) is not (after.flow is None) or (before.flow is None and before.owed_since is None):
        return False
    if _has_caused_end(before) and before.status is not TaskStatus.SUCCESS and not after.status.is_final:
        return True
    left: dict[str, Any] = dict.fromkeys(("flow", "owed_since", "owed_tasks", "quiet_time", "expire_time"), True)
    if change.valued and not (change.appended or change.vanished or change.closed or change.moved or change.altered):
        left["task_state"] = {"worker_states"}
    return before.model_dump(exclude=left) == after.model_dump(exclude=left)


@contextmanager
def _before_derivation(change: Change) -> Iterator[None]:
    """Take back what the write's last stage derived, so that the rules derive it anew."""
    state = change.after.task_state
    status, cancel_requested = state.status, state.cancel_requested
    if status.is_final:
        state.cancel_requested = change.before.task_state.cancel_requested or status is TaskStatus.CANCELED
    state.status = TaskStatus.INIT
    try:
        yield
    finally:
        state.status, state.cancel_requested = status, cancel_requested


def _told(nows: set[datetime]) -> str:
    return ", ".join(now.isoformat() for now in sorted(nows))
