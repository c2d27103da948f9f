"""Lets half of the workers of a run rest their change streams now and then, as in a deep backlog with dense writes.

A run under faults has neither: its load is small, and one of its queues has a limit. So these workers take any traffic
for dense, and each time the clock is in the first half of a period, they take what waits for a backlog. The number of
its process decides whether a worker is one of them.
"""

from __future__ import annotations

import os
from time import monotonic

from mtask.store.streams import traffic
from mtask.worker.discovery.scans import Scans

#: Seconds.
_PERIOD = 4.0


def rest_often() -> None:
    """Let this process rest its stream half of the time, if its number is odd."""
    # A worker of the former version, which an upgrade rolls back to, has no rest.
    if os.getpid() % 2 and hasattr(Scans, "is_in_backlog"):
        traffic.DENSE_FROM = traffic.DENSE_UNTIL = 0.0
        Scans.is_in_backlog = property(_is_in_first_half)  # type: ignore[assignment, method-assign]


def _is_in_first_half(_: Scans) -> bool:
    return monotonic() % _PERIOD < _PERIOD / 2
