"""Checks the arguments of publish calls that gather, or that publish once a window."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias, TypedDict

from mtask.errors import MAX_DELAY, InvalidInput, InvalidParams, shown
from mtask.features.gathering.statements import MAX_GATHERED_BYTES
from mtask.kernel.document.options import TaskOption
from mtask.kernel.document.task import MAX_CALL_ID
from mtask.kernel.driver.bson import stored_size
from mtask.kernel.operations.publish import Policy, PublishPolicy, milliseconds
from mtask.lazy import LazyModule
from mtask.says import Says

if TYPE_CHECKING:
    from mtask.features.gathering import publish as publishing
else:
    publishing = LazyModule("mtask.features.gathering.publish")  # a plain publish needs it not

IfRunning = Literal["keep", "again"]
#: Gives an argument the name that a message calls it by. The command line calls it by its flag.
Naming: TypeAlias = Callable[[str], str]
_LEAST = timedelta(milliseconds=1)
_PANEL = "Calls under one key"
_AGAIN = 'if_running="again"'


class GatherArguments(TypedDict, total=False):
    """The arguments of `publish_many` that gather calls. A duration is a timedelta, or seconds."""

    debounce: Annotated[
        timedelta | float | None,
        Says("Start this long after the newest call. Its params win.", "DURATION", panel=_PANEL),
    ]
    max_wait: Annotated[
        timedelta | float | None, Says("Start this long after the first call.", "DURATION", panel=_PANEL)
    ]
    collect: Annotated[bool, Says("The handler gets the params of all calls.", panel=_PANEL, default=False)]
    if_running: Annotated[
        IfRunning,
        Says("Run at once, or once more after a live run.", flag="--again", panel=_PANEL, default="keep"),
    ]
    window: Annotated[
        timedelta | float | None, Says("Publish anew only this long after a success.", "DURATION", panel=_PANEL)
    ]


class CallArguments(GatherArguments, total=False):
    """The arguments of `publish` that gather calls."""

    call_id: Annotated[str | None, Says("A call sent again under this id counts once.", "TEXT", panel=_PANEL)]


def as_argument(name: str) -> str:
    """Return the name of an argument in Python."""
    return name


def prepare(
    debounce: timedelta | float | None = None,
    max_wait: timedelta | float | None = None,
    collect: bool = False,
    if_running: IfRunning = "keep",
    window: timedelta | float | None = None,
    call_id: str | None = None,
    *,
    named: Naming = as_argument,
) -> PublishPolicy | None:
    """Check the arguments; return the policy of calls that gather, or of a window. None: the publish is plain."""
    is_timed = debounce is not None or max_wait is not None or window is not None
    if collect is False and if_running == "keep" and call_id is None and not is_timed:
        return None  # the commonest
    given = {"debounce": debounce, "max_wait": max_wait, "window": window}
    if if_running not in ("keep", "again"):
        raise InvalidInput(f'if_running is "keep" or "again", not {shown(if_running)}.', field="if_running")
    if not isinstance(collect, bool):
        raise InvalidInput(f"collect is True or False, not {shown(collect)}.", field="collect")
    wait, most, kept = (_duration(field, value, named) for field, value in given.items())
    if most is not None and wait is None:
        message = f"{named('max_wait')} bounds a debounce: give {named('debounce')}, too."
        raise InvalidInput(message, field="max_wait")
    if most is not None and wait is not None and most < wait:
        message = f"{named('max_wait')} is shorter than {named('debounce')}: give at least {named('debounce')}."
        raise InvalidInput(message, field="max_wait")
    gathers = wait is not None or collect or if_running == "again"
    if kept is not None and gathers:
        raise InvalidInput(
            f"{named('window')} keeps the first call and drops later ones: it does not go with {named('debounce')}, "
            f"{named('collect')} or {named(_AGAIN)}.",
            field="window",
        )
    if call_id is not None and not gathers:
        ways = f"{named('debounce')}, {named('collect')} or {named(_AGAIN)}"
        raise InvalidInput(f"{named('call_id')} is the id of a call that gathers: give {ways}, too.", field="call_id")
    if call_id is not None and (not isinstance(call_id, str) or not 0 < len(call_id) <= MAX_CALL_ID):
        message = f"{named('call_id')} is text of 1 to {MAX_CALL_ID} characters, not {shown(call_id)}."
        raise InvalidInput(message, field="call_id")
    if kept is not None:
        return publishing.WindowPolicy(kept)
    return publishing.GatherPolicy("calls" if collect else "latest", wait, most, call_id) if gathers else None


def collects(policy: PublishPolicy) -> bool:
    """Whether the params of all calls are collected in a list."""
    if isinstance(policy, Policy):
        return False
    return isinstance(policy, publishing.GatherPolicy) and policy.kind == "calls"


def _duration(field: str, given: Any, named: Naming) -> timedelta | None:
    if given is None:
        return None
    allowed = "give 1 ms to 10 years, as a timedelta or in seconds"
    if isinstance(given, bool) or not isinstance(given, timedelta | int | float):
        message = f"{named(field)} is a length of time, not {type(given).__name__}: {allowed}."
        raise InvalidInput(message, field=field)
    try:
        wait = given if isinstance(given, timedelta) else timedelta(seconds=given)
    except (OverflowError, ValueError):
        raise InvalidInput(f"{named(field)} {shown(given)} is no length of time: {allowed}.", field=field) from None
    if not _LEAST <= wait <= MAX_DELAY:
        message = f"{named(field)} cannot be {wait.total_seconds():g} s: give 1 ms to 10 years."
        raise InvalidInput(message, field=field)
    return wait


def check_task(
    policy: PublishPolicy,
    key: str | None,
    start_time: datetime | None,
    delay: timedelta | float | None,
    option: TaskOption,
    named: Naming = as_argument,
    retention: str = "retain_success",
) -> None:
    """Check that a task fits the way in which it gathers; raise InvalidInput. `retention`: how to name that option."""
    if key is None:
        which = ", ".join(named(name) for name in ("debounce", "collect", _AGAIN))
        message = f"give {named('key')}, too: {which} and {named('window')} are about the calls of one key."
        raise InvalidInput(message, field="key")
    sets_start = isinstance(policy, publishing.GatherPolicy) and (policy.debounce is not None or policy.kind == "calls")
    if sets_start and (start_time is not None or delay is not None):
        raise InvalidInput(
            f"{named('debounce')} and {named('collect')} set the start themselves: drop {named('delay')} and "
            f"{named('start_time')}.",
            field="delay",
        )
    retained, window = option.retain_success_ms, policy.window if isinstance(policy, publishing.WindowPolicy) else None
    if window is not None and retained is not None and retained < milliseconds(window):
        raise InvalidInput(
            f"{retention} is shorter than {named('window')}: the task would be removed before, and "
            "then published anew.",
            field="window",
        )


def check_size(name: str, params: Any) -> None:
    """Check that the params of one call can be collected; raise InvalidParams."""
    if stored_size(params) > MAX_GATHERED_BYTES:
        raise InvalidParams(name, "they exceed 4 MB, the most that is collected: pass a reference")
