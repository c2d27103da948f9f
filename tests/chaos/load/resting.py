"""Lets workers of a run do at a small load what they otherwise do in a deep backlog, or in a quiet fleet.

Half of them rest their change streams now and then, as in a deep backlog with dense writes.

A run under faults has neither: its load is small, and one of its queues has a limit. So these workers take any traffic
for dense, and each time the clock is in the first half of a period, they take what waits for a backlog. The number of
its process decides whether a worker is one of them. Often all these numbers are odd, so their second bit decides.

The other half hear only of the new tasks for which they rank first or second, as in a fleet in which nothing changes.
Under faults, workers come and go all the time, and often only three live.
"""

from __future__ import annotations

import os
from importlib.util import find_spec
from time import monotonic

from mtask.kernel.operations import change_stream
from mtask.kernel.worker.discovery.fetch_loop import Scans

#: Seconds.
_PERIOD = 4.0


def rest_often() -> None:
    """Let this process rest its stream half of the time, or let it hear of little."""
    # A worker of the former version, which an upgrade rolls back to, has neither.
    is_resting = bool(os.getpid() & 2)
    if is_resting and hasattr(Scans, "is_in_backlog"):
        change_stream.DENSE_FROM = change_stream.DENSE_UNTIL = 0.0
        Scans.is_in_backlog = property(_is_in_first_half)  # type: ignore[assignment, method-assign]
    if find_spec("mtask.kernel.worker.discovery.stream") is not None:
        from mtask.kernel.worker.discovery import fleet, stream

        fleet.FLEET = 2
        # One of the run's queues has a limit.
        stream.Hearing.is_plain = property(lambda _: True)  # type: ignore[assignment, method-assign]
        if not is_resting:
            stream.WIDE_FOR = 0.5


def _is_in_first_half(_: Scans) -> bool:
    return monotonic() % _PERIOD < _PERIOD / 2
