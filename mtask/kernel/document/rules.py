"""The rules: pure functions of a task, a worker_id and the current time.

For each rule there is an expression of the same name in `mtask.kernel.statements.rules`, which the server evaluates. A
property test checks that both give the same answers.

The docstrings use these letters for a task. The runs of earlier rounds (`past`) do not count.

- S: the workers with a SUCCESS
- R: the RUNNING runs with a live lease
- F: failed_cnt plus the number of RUNNING runs with a lapsed lease
- k: concurrent_worker_cnt, the number of the task's seats
- m: max_unexpected_retries
"""

from __future__ import annotations

from datetime import datetime, timedelta

from mtask.kernel.document.status import RunStatus, TaskStatus
from mtask.kernel.document.task import Run, Task

#: The time by which workers look ahead. Workers learn of every task that becomes due within this time.
HORIZON = timedelta(seconds=10)
#: The greatest number of failed runs of this round that a task without a retry limit keeps. For every task, the same
#: bound applies to canceled runs of this round, and to runs of earlier rounds.
KEPT_RUNS = 20
#: The largest fraction of a delay by which jitter can shorten it. Jitter applies only if retry_backoff is above 1.
JITTER = 0.25

_COUNTED = frozenset({RunStatus.FAIL, RunStatus.TIMEOUT})

#: The rank of a due task, the best one first: 0 if it was interrupted, else 1; its priority, negated; and its stored
#: next_preempt_time.
Rank = tuple[int, int, datetime]


def current_runs(task: Task) -> list[Run]:
    """Return the runs of this round, the oldest first."""
    return [run for run in task.runs if not run.past]


def is_waiting(task: Task) -> bool:
    """Whether the task waits for other tasks of its flow: it has not been released yet."""
    return task.flow is not None and task.flow.release_time is None


def succeeded_workers(task: Task) -> set[str]:
    """Return S: the workers with a SUCCESS."""
    return {run.worker_id for run in current_runs(task) if run.status is RunStatus.SUCCESS}


def live_runs(task: Task, now: datetime) -> list[Run]:
    """Return R: the runs whose lease is live."""
    return [run for run in current_runs(task) if run.is_live(now)]


def failures(task: Task, now: datetime) -> int:
    """Return F: the number of failed and timed-out runs, including RUNNING runs whose lease has lapsed."""
    return task.task_state.failed_cnt + sum(run.is_lapsed(now) for run in current_runs(task))


def worker_failures(task: Task, worker_id: str, now: datetime) -> int:
    """Return the number of one worker's failed and timed-out runs of this round."""
    return sum(
        run.worker_id == worker_id and (run.status in _COUNTED or run.is_lapsed(now)) for run in current_runs(task)
    )


def is_worker_exhausted(task: Task, worker_id: str, now: datetime) -> bool:
    """Whether this worker has used up its own limit or had a final failure. Use this for retry_scope "worker"."""
    option = task.task_option
    if any(run.final and run.worker_id == worker_id for run in current_runs(task)):
        return True
    return option.has_retry_limit and worker_failures(task, worker_id, now) > option.max_unexpected_retries


def is_exhausted(task: Task, now: datetime) -> bool:
    """Whether the limit is used up, or a run ended in a final failure. Then no new run may begin.

    With retry_scope "worker", the task is only exhausted when each worker in specific_worker_ids has succeeded or is
    exhausted. If specific_worker_ids is empty, another worker may still come, so only a final failure ends the task.
    """
    option = task.task_option
    if option.retry_scope == "worker" and option.specific_worker_ids:
        succeeded = succeeded_workers(task)
        return all(
            worker_id in succeeded or is_worker_exhausted(task, worker_id, now)
            for worker_id in option.specific_worker_ids
        )
    if any(run.final for run in current_runs(task)):
        return True
    if option.retry_scope == "worker":
        return False
    return option.has_retry_limit and failures(task, now) > option.max_unexpected_retries


def is_expired(task: Task, now: datetime) -> bool:
    """Whether no run of the task may start any more, because its not_after has passed."""
    end = task.task_state.not_after
    return end is not None and end <= now


def status(task: Task, now: datetime) -> TaskStatus:
    """Return the task's status at `now`. If the stored status is final, it does not change."""
    state = task.task_state
    if state.status.is_final:
        return state.status
    if is_waiting(task):
        return TaskStatus.CANCELED if state.cancel_requested else TaskStatus.WAITING
    if len(succeeded_workers(task)) >= task.task_option.concurrent_worker_cnt:
        return TaskStatus.SUCCESS
    if live_runs(task, now):
        return TaskStatus.RUNNING
    if state.cancel_requested:
        return TaskStatus.CANCELED
    if is_exhausted(task, now):
        return TaskStatus.FAIL
    if is_expired(task, now):
        return TaskStatus.FAIL if failures(task, now) else TaskStatus.CANCELED
    return TaskStatus.INIT


def has_free_seat(task: Task, now: datetime) -> bool:
    """Whether a seat is free: S + R < k."""
    taken = len(succeeded_workers(task)) + len(live_runs(task, now))
    return taken < task.task_option.concurrent_worker_cnt


def is_admitted(task: Task, worker_id: str) -> bool:
    """Whether specific_worker_ids allows this worker."""
    allowed = task.task_option.specific_worker_ids
    return not allowed or worker_id in allowed


def _latest(*instants: datetime | None) -> datetime | None:
    given = [instant for instant in instants if instant is not None]
    return max(given) if given else None


def due_time(task: Task) -> datetime:
    """Return the time at which the task is first due: its start_time or, without a start_time, its create_time.

    A task of a flow is not due before its release.
    """
    start = task.task_state.start_time or task.task_state.create_time
    released = task.flow.release_time if task.flow else None
    return max(start, released) if released else start


def retry_time(task: Task, worker_id: str) -> datetime | None:
    """Return the end of the retry delay that applies to this worker; None: no delay applies.

    With retry_scope "worker", each worker has a delay of its own.
    """
    own_only = task.task_option.retry_scope == "worker"
    return _latest(*(run.retry_time for run in current_runs(task) if not own_only or run.worker_id == worker_id))


def is_candidate(task: Task, worker_id: str, now: datetime) -> bool:
    """Whether this worker may take the task as soon as the task is due and has a free seat."""
    if not is_admitted(task, worker_id) or worker_id in succeeded_workers(task):
        return False
    if any(run.worker_id == worker_id for run in live_runs(task, now)):
        return False
    return not (task.task_option.retry_scope == "worker" and is_worker_exhausted(task, worker_id, now))


def may_take(task: Task, worker_id: str, now: datetime) -> bool:
    """Whether this worker may take the task at `now`."""
    if status(task, now).is_final or task.task_state.cancel_requested or is_exhausted(task, now):
        return False
    if is_waiting(task) or is_expired(task, now):
        return False
    if not has_free_seat(task, now) or not is_candidate(task, worker_id, now):
        return False
    return max(due_time(task), retry_time(task, worker_id) or due_time(task)) <= now


def preemptable_at(task: Task, worker_id: str, now: datetime) -> datetime | None:
    """Return the earliest time at which this worker's claim can succeed; None: the task must change first.

    The claim of an expired task succeeds if it ends the task.
    """
    thresholds = [now, due_time(task), *(run.ping_expire_time for run in live_runs(task, now))]
    delayed_until = retry_time(task, worker_id)
    if delayed_until is not None:
        thresholds.append(delayed_until)
    if task.task_state.not_after is not None:
        thresholds.append(task.task_state.not_after)
    return next((m for m in sorted(thresholds) if m >= now and is_claimable(task, worker_id, m)), None)


def is_claimable(task: Task, worker_id: str, now: datetime) -> bool:
    """Whether this worker's claim changes the task at `now`: it takes the task, or ends it because it has expired.

    Only a worker that might have taken the task ends it.
    """
    if may_take(task, worker_id, now):
        return True
    is_over = is_expired(task, now) and not task.status.is_final and status(task, now).is_final
    return is_over and is_candidate(task, worker_id, now)


def is_interrupted(task: Task, now: datetime) -> bool:
    """Whether a run of this round ended without an outcome of its handler, and no run has followed it.

    Its lease has lapsed, or its worker handed it back. Such a task was under way, so it goes before those that wait for
    their first run.
    """
    runs = current_runs(task)
    if any(run.is_lapsed(now) for run in runs):
        return True
    ended = [run.fail_time for run in runs if _is_cut_off(run) and run.fail_time is not None]
    return bool(ended) and all(run.claim_time < max(ended) for run in runs)


def _is_cut_off(run: Run) -> bool:
    """Whether the run lapsed and was closed, or was handed back. A handler that asks to be tried again sets a time."""
    return run.status is RunStatus.TIMEOUT or (run.status is RunStatus.CANCELED and run.retry_time is None)


def rank(task: Task, now: datetime) -> Rank:
    """Return the rank of a due task: workers begin the tasks in the order of their ranks."""
    stored = task.task_state.next_preempt_time or due_time(task)
    return (0 if is_interrupted(task, now) else 1, -task.task_option.priority, stored)
