"""Requests to hold back a queue after failures in a row."""

from __future__ import annotations

from datetime import timedelta

from mtask.client import requests
from mtask.errors import InvalidInput, shown
from mtask.features.controls.client import Change
from mtask.features.controls.rules import check_target
from mtask.kernel.document.handlers import MAX_BREAKER_FAILURES, MAX_BREAKER_WAIT_MS, MIN_BREAKER_WAIT_MS
from mtask.kernel.operations.publish import milliseconds


def breaker(queue: str, failures: int | None, wait: timedelta | float, timeout: timedelta | float | None) -> Change:
    """Return the checked request to set the breaker of a queue, or to remove it; raise InvalidInput."""
    kind, target = check_target(queue, None)
    waiting = requests.wait_policy(f"{kind}:{target}", timeout)
    if failures is None:
        return Change(kind, target, {"breaker": None, "opened": None}, "without a breaker", waiting, "breaker", "none")
    if isinstance(failures, bool) or not isinstance(failures, int) or not 1 <= failures <= MAX_BREAKER_FAILURES:
        raise InvalidInput(f"failures {shown(failures)}: use 1 to {MAX_BREAKER_FAILURES:,}.", field="failures")
    try:
        wait_ms = milliseconds(wait if isinstance(wait, timedelta) else timedelta(seconds=wait))
    except (TypeError, ValueError, OverflowError):
        wait_ms = -1
    if isinstance(wait, bool) or not MIN_BREAKER_WAIT_MS <= wait_ms <= MAX_BREAKER_WAIT_MS:
        raise InvalidInput(f"wait {shown(wait)}: use 0.1 s to ten minutes, in seconds or a timedelta.", field="wait")
    fields = {"breaker": {"failures": failures, "wait_ms": wait_ms}}
    said = f"{failures} failures, {wait_ms} ms"
    return Change(kind, target, fields, "guarded by a breaker", waiting, "breaker", said)
