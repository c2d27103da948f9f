"""Decides about breakers: when one opens, who makes the next probe, and how long the wait is."""

from __future__ import annotations

from datetime import datetime, timedelta

from mtask.features.controls.rules import Opened
from mtask.kernel.document.handlers import MAX_BREAKER_WAIT_MS
from mtask.kernel.document.status import RunStatus
from mtask.kernel.statements.finish import Outcome

#: For how long a worker that makes the probe may be silent, before another one makes it.
HOLD = timedelta(seconds=30)
#: For how long after the wait the worker that has opened a breaker alone may begin the probe.
GRACE = timedelta(seconds=5)


def verdict(outcome: Outcome | None) -> bool | None:
    """Return whether a run has succeeded (True) or failed (False), for a breaker.

    None: the run tells nothing of what the handler needs: the task itself was wrong, or the run went back. `outcome`:
    None stands for a SUCCESS.
    """
    if outcome is None or outcome.status is RunStatus.SUCCESS:
        return True
    return False if outcome.status is RunStatus.FAIL and not outcome.is_verdict else None


def longer(wait_ms: int) -> int:
    """Return the wait after a probe that has failed."""
    return min(2 * wait_ms, MAX_BREAKER_WAIT_MS)


def may_probe(opened: Opened, worker_id: str, now: datetime) -> bool:
    """Whether this worker may take the next probe at `now`, by the server's clock."""
    return now >= opened.until and (opened.by == worker_id or now >= opened.held_until)


def probe_time(opened: Opened, worker_id: str) -> datetime:
    """Return when this worker may take the next probe at the earliest."""
    return opened.until if opened.by == worker_id else max(opened.until, opened.held_until)
