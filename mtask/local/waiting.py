"""Waits for a condition until a deadline."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

T = TypeVar("T")

POLL_INTERVAL = timedelta(milliseconds=20)


class Deadline:
    """A deadline on the monotonic clock."""

    def __init__(self, timeout: timedelta) -> None:
        self.timeout = timeout
        self._end = time.monotonic() + timeout.total_seconds()

    def remaining(self) -> float:
        """Return the seconds left, never below 0."""
        return max(0.0, self._end - time.monotonic())

    def is_over(self) -> bool:
        """Whether the deadline has passed."""
        return self.remaining() <= 0


def wait_until(condition: Callable[[], T], deadline: Deadline, interval: timedelta = POLL_INTERVAL) -> T:
    """Poll the condition until its value is true or the deadline has passed. Return its last value."""
    while True:
        value = condition()
        if value or deadline.is_over():
            return value
        time.sleep(min(interval.total_seconds(), deadline.remaining()))
