"""The order in which workers take the due tasks of a queue, and the estimate of a task's start."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from datetime import datetime, timedelta

from mtask.kernel.document import rules
from mtask.kernel.document.task import Task

#: Only tasks that finished within this time count for the rate of a queue.
LATELY = timedelta(minutes=10)


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


def rate(finished: Sequence[datetime], now: datetime) -> float | None:
    """Return the number of tasks that a queue finished per second lately. None: not enough of them did."""
    recent = [time for time in finished if now - time <= LATELY]
    if len(recent) < 2:
        return None
    return len(recent) / max((now - min(recent)).total_seconds(), 0.001)


def start_estimate(due: datetime, ahead: int, per_second: float | None, now: datetime) -> datetime | None:
    """Return the time at which a task probably starts; None: there is no rate to estimate it by."""
    begin = max(due, now)
    if ahead == 0:
        return begin
    if per_second is None:
        return None
    # If the task is due only later, the tasks ahead of it are done meanwhile.
    return max(begin, now + timedelta(seconds=min(ahead / per_second, LATELY.total_seconds() * 10_000)))
