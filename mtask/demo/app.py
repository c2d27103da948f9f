"""The demo's app: one handler, which counts one file. Workers are started with `mtask-worker mtask.demo.app:app`."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from mtask import App, Context, Fail
from mtask.demo.counting import count_file, unreadable

app = App()

_PAUSE_STEP = 0.05


# The leases are short, so that a killed worker's tasks are soon preempted. On a busy machine, leases of living workers
# may lapse, too.
@app.task(
    queue="demo",
    ping_interval_ms=800,
    worker_timeout_ms=2500,
    max_unexpected_retries=20,
    unexpected_retry_delay_ms=200,
)
def count(context: Context, file: str | bytes, pause_ms: int = 0) -> dict[str, Any]:
    """Count one file. Before that, the first try waits for `pause_ms` milliseconds, like a slow task."""
    end = time.monotonic() + (pause_ms / 1000 if context.attempt == 1 else 0)
    while time.monotonic() < end and not context.is_cancelled:
        time.sleep(_PAUSE_STEP)
    try:
        return count_file(Path(os.fsdecode(file)))
    except OSError as error:
        raise Fail(unreadable(error)) from error
