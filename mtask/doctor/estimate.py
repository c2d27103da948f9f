"""The order in which workers take the due tasks of a queue, and the estimate of a task's start."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta

#: Only tasks that finished within this time count for the rate of a queue.
LATELY = timedelta(minutes=10)


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
