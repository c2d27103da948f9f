"""The rules that only the server applies, as the judges of tests: pure functions beside those of production.

`mtask.kernel.document.rules` holds what workers and clients decide by, too. For each rule here there is an expression
of the server, and a property compares both.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from datetime import datetime

from mtask.kernel.document import rules
from mtask.kernel.document.options import MAX_COUNTED_RUNS, MAX_DURATION_MS, TaskOption
from mtask.kernel.document.parts import TOLD
from mtask.kernel.document.rules import JITTER, KEPT_RUNS
from mtask.kernel.document.status import TaskStatus
from mtask.kernel.document.task import Task


def next_preempt_time(task: Task, now: datetime) -> datetime | None:
    """Return the earliest moment at which some worker could take or settle the task.

    It is None if the status is final, or if the task waits for other tasks of its flow.
    """
    if rules.status(task, now).is_final or rules.is_waiting(task):
        return None
    moments = [run.ping_expire_time for run in rules.live_runs(task, now)]
    is_over = task.task_state.cancel_requested or rules.is_exhausted(task, now) or rules.is_expired(task, now)
    if not is_over and rules.has_free_seat(task, now):
        moments += free_seat_times(task, now)
        moments += [] if task.task_state.not_after is None else [task.task_state.not_after]
    return min(moments, default=rules.due_time(task))


def free_seat_times(task: Task, now: datetime) -> list[datetime]:
    """Return the earliest times at which workers could take a free seat.

    There is one time for each worker in specific_worker_ids that is a candidate. If specific_worker_ids is empty, there
    is one time for all workers together.
    """
    option = task.task_option
    due = rules.due_time(task)
    if option.specific_worker_ids:
        candidates = [w for w in option.specific_worker_ids if rules.is_candidate(task, w, now)]
        return [max(due, rules.retry_time(task, w) or due) for w in candidates]
    if option.retry_scope == "worker":
        return [due]  # a worker that has not tried the task yet has no retry delay
    return [max(due, rules.retry_time(task, "") or due)]


def kept_runs(task: Task) -> int:
    """Return how many failed and timed-out runs of this round may stay in the document."""
    option = task.task_option
    if not option.has_retry_limit:
        return KEPT_RUNS
    per_worker = option.max_unexpected_retries + 1
    if option.retry_scope == "worker":
        named = len(option.specific_worker_ids)
        per_worker = per_worker * named if named else MAX_COUNTED_RUNS
    return min(max(KEPT_RUNS, per_worker), MAX_COUNTED_RUNS)


def retry_delay_ms(option: TaskOption, failures: int, jitter: float) -> int:
    """Return the delay after failed run number `failures`, in ms. The first failed run has number 1.

    Each further failure multiplies the delay by retry_backoff, up to retry_max_delay_ms. If retry_backoff is above 1,
    `jitter` shortens the delay by up to a quarter. So tasks that failed together are not all tried again at the same
    time.

    `jitter`: a number from 0 to 1. The caller must draw it at random.
    """
    limit = MAX_DURATION_MS if option.retry_max_delay_ms is None else option.retry_max_delay_ms
    if option.retry_backoff <= 1:
        return min(option.unexpected_retry_delay_ms, limit)
    exponent = min(max(failures - 1, 0), 64)
    try:
        grown = option.unexpected_retry_delay_ms * option.retry_backoff**exponent
    except OverflowError:
        grown = MAX_DURATION_MS
    return int(min(grown, limit) * (1 - JITTER * jitter))


def must_tell(status: TaskStatus, *, unwatched: bool, is_marked: bool, owes_tasks: bool) -> bool:
    """Whether a step's end with this status is to be marked, so that somebody tells other steps of it.

    A success concerns only the steps that watch the task. It needs no mark if none does, unless an earlier change is
    marked, or the task owes tasks.
    """
    return not (status is TaskStatus.SUCCESS and unwatched and not is_marked and not owes_tasks)


def is_told(on: Sequence[str], status: str, *, was_final: bool) -> bool:
    """Whether a change to this status is an end that is to be told. A final status that stays is told once."""
    return status in TOLD and status in on and not was_final


def is_ahead(other: Task, task: Task, names: Collection[str] | None, now: datetime, *, is_fair: bool = False) -> bool:
    """Whether the other task is due and goes before this task: by its rank (`rules.rank`), then by `_id`.

    Only a task that the same workers may take goes before this task: a task of the same queue that admits any worker,
    or one of the workers that this task names. `names` are the names of tasks that these workers run; None: any name.
    `is_fair`: the tenants of the queue take turns, so ranks order the tasks of one tenant. But interrupted tasks go
    before those of all tenants.
    """
    mine, theirs = task.task_state.next_preempt_time, other.task_state.next_preempt_time
    if other.id == task.id or other.queue != task.queue or mine is None or theirs is None or theirs > now:
        return False
    allowed = set(other.task_option.specific_worker_ids)
    if allowed and not allowed & set(task.task_option.specific_worker_ids):
        return False
    if names is not None and other.name not in names:
        return False
    first, second = (*rules.rank(other, now), other.id), (*rules.rank(task, now), task.id)
    return first < second and (not is_fair or other.tenant == task.tenant or first[0] < second[0])
