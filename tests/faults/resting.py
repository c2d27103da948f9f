"""Lets half of the workers of a run rest their change streams, as they do in a deep backlog where writes are dense.

A run under faults has neither: its load is small, and one of its queues has a limit. So these workers take any traffic
for dense, and a few tasks for a backlog. The number of its process decides whether a worker is one of them.
"""

from __future__ import annotations

import os

from mtask.store.streams import traffic
from mtask.worker import assembly
from mtask.worker.discovery.scans import Scans

_CAPACITY = 40


def rest_often() -> None:
    """Let this process rest its stream as often as possible, if its number is odd."""
    # A worker of the former version, which an upgrade rolls back to, has no rest.
    if os.getpid() % 2 and hasattr(Scans, "is_in_backlog"):
        traffic.DENSE_FROM = traffic.DENSE_UNTIL = 0.0
        assembly._QUEUE_CAPACITY = _CAPACITY
        Scans.is_in_backlog = property(lambda scans: scans.was_cut.is_set())  # type: ignore[assignment, method-assign]
