"""Options of tasks and calls: what mtask calls the options that Celery's `@app.task` and `apply_async` take."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any
from zoneinfo import ZoneInfo

from mtask.contrib.celery import words
from mtask.contrib.celery.exceptions import NotMapped

_UNKNOWN = "neither Celery nor mtask has an option of this name"


def check_task_options(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a declaration that have an effect; raise NotMapped for one that does not map."""
    kept = {}
    for option, value in options.items():
        if option in words.TASK_OPTIONS:
            kept[option] = value
        elif option not in words.IDLE_TASK_OPTIONS:
            instead = words.REFUSED_TASK_OPTIONS.get(option, words.REFUSED_CALL_OPTIONS.get(option, _UNKNOWN))
            raise NotMapped(f"the option {option!r} of task {name}", instead)
        elif option == "serializer":
            _check_serializer(name, value)
    return kept


def publish_arguments(name: str, options: Mapping[str, Any], timezone: str) -> dict[str, Any]:
    """Return the keyword arguments of `client.publish` for the options of a call; raise NotMapped.

    `timezone` is that of instants without one.
    """
    given: dict[str, Any] = {}
    for option, value in options.items():
        if option in words.IDLE_CALL_OPTIONS:
            if option == "serializer":
                _check_serializer(name, value)
        elif option not in words.CALL_OPTIONS:
            if value is not None:
                instead = words.REFUSED_CALL_OPTIONS.get(option, _UNKNOWN)
                raise NotMapped(f"the option {option!r} of a call of task {name}", instead)
        elif value is not None:
            given |= _argument(name, option, value, timezone)
    return given


def _argument(name: str, option: str, value: Any, timezone: str) -> dict[str, Any]:
    """Return the argument of mtask for an option that maps."""
    if option == "countdown":
        return {"delay": max(seconds(value), timedelta(0))}
    if option == "eta":
        return {"start_time": instant(value, timezone)}
    if option == "expires":
        is_instant = isinstance(value, datetime | str)
        return {"expires": instant(value, timezone) if is_instant else seconds(value)}
    if option == "time_limit":
        return {"run_timeout": seconds(value)}
    if option == "task_id":
        return {"key": str(value).removeprefix(f"{name}:")}
    if option == "queue" and not isinstance(value, str):
        raise NotMapped(f"the queue {value!r} of a call of task {name}", "name the queue by a text")
    return {option: value}


def task_options(kept: Mapping[str, Any], max_retries: int | None, default_retry_delay: float) -> dict[str, Any]:
    """Return the options of `mtask.App.task` for the checked options of a declaration."""
    options: dict[str, Any] = {
        "max_retries": -1 if max_retries is None else max_retries,
        "retry_delay": seconds(default_retry_delay),
    }
    for option in ("priority", "expires"):
        if kept.get(option) is not None:
            options[option] = kept[option]
    return options


def limited(time_limit: float | timedelta) -> dict[str, Any]:
    """Return the arguments of `mtask.App.task` that end a run after this time, by force: in a child process."""
    return {"run_timeout": seconds(time_limit), "isolation": "process"}


def kept_for(time: timedelta) -> dict[str, Any]:
    """Return the options of a task that is removed so long after its end."""
    return {"retain_success": time, "retain_fail": time}


def seconds(value: timedelta | float) -> timedelta:
    """Return a length of time that is given in seconds."""
    return value if isinstance(value, timedelta) else timedelta(seconds=value)


def instant(value: datetime | str, timezone: str) -> datetime:
    """Return an instant of which text and time zone may have been left out."""
    moment = datetime.fromisoformat(value) if isinstance(value, str) else value
    return moment if moment.tzinfo is not None else moment.replace(tzinfo=ZoneInfo(timezone))


def until(value: datetime | str, timezone: str) -> timedelta:
    """Return the time from now to an instant, by the clock of this machine. It is zero if the instant is past."""
    return max(instant(value, timezone) - datetime.now(UTC), timedelta(0))


def _check_serializer(name: str, value: Any) -> None:
    if value not in (None, "json"):
        raise NotMapped(f"the serializer {value!r} of task {name}", words.SERIALIZER)
