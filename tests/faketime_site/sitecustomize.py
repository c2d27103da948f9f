"""Mends `time.sleep` in a process with a wrong clock. Python imports this module at its start, from PYTHONPATH.

libfaketime 0.9.10 shifts the deadline of `clock_nanosleep` by its offset, even if it leaves the monotonic clock alone.
The system refuses the deadline, and each `time.sleep` raises OSError: that of a handler, of `Popen.wait`, and of the
driver's threads, which end by that. `select` waits for a duration, and is right.
"""

from __future__ import annotations

import select
import time
from typing import SupportsIndex


def _sleep(seconds: float | SupportsIndex) -> None:
    duration = float(seconds)
    if duration < 0:
        raise ValueError("sleep length must be non-negative")
    select.select([], [], [], duration)


time.sleep = _sleep
