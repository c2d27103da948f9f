"""Wait for a condition until a deadline."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

T = TypeVar("T")

POLL_INTERVAL = timedelta(milliseconds=20)


class Deadline:
    """An instant on the monotonic clock by which something must have happened."""

    def __init__(self, timeout: timedelta) -> None:
        self.timeout = timeout
        self._end = time.monotonic() + timeout.total_seconds()

    def remaining(self) -> float:
        """Return the seconds left, never below 0."""
        return max(0.0, self._end - time.monotonic())

    def is_over(self) -> bool:
        """Tell whether the deadline has passed."""
        return self.remaining() <= 0


def wait_until(condition: Callable[[], T], deadline: Deadline, interval: timedelta = POLL_INTERVAL) -> T:
    """Poll the condition and return its first true value, or its last false one at the deadline."""
    while True:
        value = condition()
        if value or deadline.is_over():
            return value
        time.sleep(min(interval.total_seconds(), deadline.remaining()))
