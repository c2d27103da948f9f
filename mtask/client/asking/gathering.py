"""Checks the arguments of publish calls that gather, or that publish once a window."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any, TypedDict

from mtask.errors import MAX_DELAY, InvalidInput, InvalidParams, shown
from mtask.model.documents import MAX_CALL_ID
from mtask.model.gathering import MAX_GATHERED_BYTES
from mtask.model.options import TaskOption
from mtask.store.driver.encoding import stored_size
from mtask.store.tasks.publishing import GatherPolicy, IfRunning, Policy, milliseconds

_LEAST = timedelta(milliseconds=1)


class GatherArguments(TypedDict, total=False):
    """The arguments of `publish` that gather calls. A duration is a timedelta, or seconds."""

    debounce: timedelta | float | None
    max_wait: timedelta | float | None
    collect: bool
    if_running: IfRunning
    window: timedelta | float | None
    call_id: str | None


def prepare(
    debounce: timedelta | float | None = None,
    max_wait: timedelta | float | None = None,
    collect: bool = False,
    if_running: IfRunning = "keep",
    window: timedelta | float | None = None,
    call_id: str | None = None,
) -> tuple[GatherPolicy | None, timedelta | None]:
    """Check the arguments; return how calls gather, and the window."""
    if if_running not in ("keep", "again"):
        raise InvalidInput(f'if_running is "keep" or "again", not {shown(if_running)}.', field="if_running")
    if not isinstance(collect, bool):
        raise InvalidInput(f"collect is True or False, not {shown(collect)}.", field="collect")
    wait, most, kept = _duration("debounce", debounce), _duration("max_wait", max_wait), _duration("window", window)
    if most is not None and wait is None:
        raise InvalidInput("max_wait bounds a debounce: give debounce, too.", field="max_wait")
    if most is not None and wait is not None and most < wait:
        raise InvalidInput("max_wait is shorter than debounce: give at least debounce.", field="max_wait")
    gathers = wait is not None or collect or if_running == "again"
    if kept is not None and gathers:
        message = 'window keeps the first call and drops later ones: it does not go with debounce, collect or "again".'
        raise InvalidInput(message, field="window")
    if call_id is not None and not gathers:
        raise InvalidInput('call_id belongs to debounce, collect and if_running="again".', field="call_id")
    if call_id is not None and (not isinstance(call_id, str) or not 0 < len(call_id) <= MAX_CALL_ID):
        raise InvalidInput(f"call_id is text of 1 to {MAX_CALL_ID} characters, not {shown(call_id)}.", field="call_id")
    policy = GatherPolicy("calls" if collect else "latest", wait, most, call_id) if gathers else None
    return policy, kept


def _duration(field: str, given: Any) -> timedelta | None:
    if given is None:
        return None
    if isinstance(given, bool) or not isinstance(given, timedelta | int | float):
        raise InvalidInput(f"{field} is a timedelta or seconds, not {type(given).__name__}.", field=field)
    try:
        wait = given if isinstance(given, timedelta) else timedelta(seconds=given)
    except (OverflowError, ValueError):
        raise InvalidInput(f"{field} {shown(given)} is no length of time.", field=field) from None
    if not _LEAST <= wait <= MAX_DELAY:
        raise InvalidInput(f"{field} {wait.total_seconds():g} s lies outside of 1 ms to 10 years.", field=field)
    return wait


def check_task(
    policy: Policy, key: str | None, start_time: datetime | None, delay: timedelta | float | None, option: TaskOption
) -> None:
    """Check that a task fits the way in which it gathers; raise InvalidInput."""
    gather = policy.gather
    if gather is None and policy.window is None:
        return
    if key is None:
        raise InvalidInput("give a key: debounce, collect, if_running and window are about one key.", field="key")
    sets_start = gather is not None and (gather.debounce is not None or gather.kind == "calls")
    if sets_start and (start_time is not None or delay is not None):
        raise InvalidInput("debounce and collect set the start themselves: drop delay and start_time.", field="delay")
    retained = option.retain_success_ms
    if policy.window is not None and retained is not None and retained < milliseconds(policy.window):
        raise InvalidInput(
            "retain_success_ms is shorter than window: the task would be removed before, and then published anew.",
            field="window",
        )


def check_size(name: str, params: Any) -> None:
    """Check that the params of one call can be collected; raise InvalidParams."""
    if stored_size(params) > MAX_GATHERED_BYTES:
        raise InvalidParams(name, "they exceed 4 MB, the most that is collected: pass a reference")
