"""What becomes of a job of Agenda: a task, a schedule, or nothing, and why. Pure functions of the job's document."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from pydantic import ValidationError

from mtask.errors import InvalidName, shown
from mtask.features.schedules.triggers import Cron, Every
from mtask.kernel.document.identity import check_name
from mtask.kernel.document.task import describe_validation

#: The field that a job gets beside `disabled` when it is moved. Agenda leaves it alone.
MOVED = "mtask"
#: The reasons for which a job stays, whatever its name. Other reasons name what is odd.
BEFORE, DISABLED, FINISHED, FAILED = "moved before", "disabled", "finished", "failed, and not tried again"
UNPLANNED, GONE = "it has no nextRunAt", "removed meanwhile"
REVIVED = "moved before, and enabled again since: it is disabled again"
LOCKED = "running, or locked by a process that died"
SKIPS = "it has skipDays, which no schedule has"

#: The units that Agenda knows in an interval, in seconds.
_UNITS = {
    "second": 1,
    "minute": 60,
    "hour": 3_600,
    "day": 86_400,
    "week": 7 * 86_400,
    "month": 30 * 86_400,
    "year": 365 * 86_400,
}
_WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
_COUNT = re.compile(rf"(?:([0-9]+(?:\.[0-9]+)?)|({'|'.join(_WORDS)}))? ?({'|'.join(_UNITS)})s?")
_NUMBER = re.compile(r"[0-9]+(?:\.[0-9]+)?")
_TIME = re.compile(r"(?:at )?([0-9]{1,2})(?::([0-9]{2}))? ?(am|pm)?")
_NAMED_CRONS = {
    "@yearly": "0 0 1 1 *",
    "@monthly": "0 0 1 * *",
    "@weekly": "0 0 * * 0",
    "@daily": "0 0 * * *",
    "@hourly": "0 * * * *",
    "@minutely": "* * * * *",
}


class Left(Exception):
    """The job stays where it is, for this reason. That is no error: most jobs of an old collection have finished."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Repeat:
    """When a job runs again and again."""

    trigger: Cron | Every
    start_time: datetime
    end_time: datetime | None


@dataclass(frozen=True, slots=True)
class Move:
    """What becomes of a job."""

    name: str  #: of the task
    key: str  #: of the task, and the id of the schedule
    params: Any
    priority: int
    next_run: datetime
    repeat: Repeat | None  #: None: the job runs once


def move_of(job: Mapping[str, Any], names: Mapping[str, str], timezone: str) -> Move:
    """Return what becomes of a job; raise Left.

    `names` has the names of tasks by those of jobs. `timezone` is that of times that name none.
    """
    next_run = _is_waiting(job)
    return Move(
        _name(job["name"], names),
        f"agenda/{job['_id']}",
        job.get("data"),
        _priority(job.get("priority")),
        next_run,
        _repeat(job, next_run, timezone),
    )


def _is_waiting(job: Mapping[str, Any]) -> datetime:
    """Return when the job runs next; raise Left."""
    if not isinstance(job.get("name"), str):
        raise Left("it is no job of Agenda: it has no name")
    if MOVED in job:
        raise Left(BEFORE if job.get("disabled") else REVIVED)
    if job.get("disabled"):
        raise Left(DISABLED)
    if job.get("lockedAt") is not None:
        raise Left(LOCKED)
    next_run = job.get("nextRunAt")
    if isinstance(next_run, datetime):
        return next_run
    if next_run is not None:
        raise Left(f"its nextRunAt is no date: {shown(next_run)}")
    if job.get("lastRunAt") is None:
        raise Left(UNPLANNED)
    raise Left(FAILED if _has_failed(job) else FINISHED)


def _has_failed(job: Mapping[str, Any]) -> bool:
    failed, finished = job.get("failedAt"), job.get("lastFinishedAt")
    return isinstance(failed, datetime) and not (isinstance(finished, datetime) and finished > failed)


def _name(name: str, names: Mapping[str, str]) -> str:
    try:
        return check_name(names.get(name, name))
    except InvalidName:
        made = re.sub(r"[^A-Za-z0-9_.\-/]+", "_", name) or "NAME"
        raise Left(f"its name is no name of a task: give --name {shown(f'{name}={made}')}") from None


def _priority(given: Any) -> int:
    if given is None:
        return 0
    if isinstance(given, bool) or not isinstance(given, int | float) or given != given // 1:
        raise Left(f"its priority is no whole number: {shown(given)}")
    return int(given)


# --- repeats ---------------------------------------------------------------------------------------------

# When a job repeats: milliseconds, words such as "3 minutes", cron fields, or a time of the day.


def _repeat(job: Mapping[str, Any], next_run: datetime, timezone: str) -> Repeat | None:
    interval, at = job.get("repeatInterval"), job.get("repeatAt")
    if interval is None and at is None:
        return None
    if job.get("skipDays"):
        raise Left(SKIPS)
    given = job.get("repeatTimezone")
    zone = given if isinstance(given, str) else timezone
    try:
        trigger = daily(at, zone) if interval is None else trigger_of(interval, zone)
    except ValueError as error:
        told = describe_validation(error) if isinstance(error, ValidationError) else str(error)
        said = told.removeprefix("document: ")
        raise Left(f"it repeats {shown(at if interval is None else interval)}: {said}") from None
    end = job.get("endDate")
    return Repeat(trigger, next_run, end if isinstance(end, datetime) else None)


def names_no_zone(job: Mapping[str, Any], repeat: Repeat) -> bool:
    """Whether the job repeats by a wall clock, and leaves open which: Agenda takes that of its machine."""
    return isinstance(repeat.trigger, Cron) and not isinstance(job.get("repeatTimezone"), str)


def trigger_of(interval: Any, timezone: str) -> Cron | Every:
    """Return the trigger of a repeatInterval; raise ValueError."""
    if isinstance(interval, str):
        text = " ".join(interval.split())
        if not _NUMBER.fullmatch(text):
            seconds = _seconds(text)
            return _cron(_NAMED_CRONS.get(text, text), timezone) if seconds is None else _every(seconds * 1000)
        interval = float(text)
    if isinstance(interval, bool) or not isinstance(interval, int | float):
        raise ValueError("use milliseconds, words such as '3 minutes', or the fields of a cron")
    return _every(interval)


def _every(milliseconds: float) -> Every:
    if not 1000 <= milliseconds <= 3_660 * 86_400_000:
        raise ValueError("a schedule fires every second at most, and every 3,660 days at least")
    return Every(interval_ms=round(milliseconds))


def _seconds(text: str) -> float | None:
    """Return the length that words such as "1 hour and 30 minutes" mean. None: they are something else."""
    rest = re.sub(r"[ ,]+(and )?", " ", text.lower())
    total = 0.0
    for part in _COUNT.finditer(rest):
        digits, word, unit = part.groups()
        total += (float(digits) if digits else _WORDS.index(word) if word else 1) * _UNITS[unit]
    return None if _COUNT.sub("", rest).strip() or not rest else total


def _cron(text: str, timezone: str) -> Cron:
    """Return the trigger of five fields, or of six: the first one are seconds. Raises ValueError."""
    parts = text.replace("?", "*").split()
    if len(parts) not in (5, 6):
        raise ValueError("it is neither an interval in words nor a cron of five or six fields")
    *seconds, minute, hour, day, month, weekday = parts
    trigger = Cron.parse(" ".join([minute, hour, "last" if day in ("L", "l") else day, month, weekday]), timezone)
    return Cron(**{**trigger.fields(), "second": seconds[0]}, timezone=timezone) if seconds else trigger


def daily(at: Any, timezone: str) -> Cron:
    """Return the trigger of a repeatAt, such as "3:40 pm" or "15:40"; raise ValueError."""
    text = " ".join(at.lower().split()) if isinstance(at, str) else ""
    found = _TIME.fullmatch({"noon": "12:00", "midnight": "0:00"}.get(text, text))
    if found is None or (found[2] is None and found[3] is None):
        raise ValueError("use a time of the day, such as '3:40 pm' or '15:40'")
    hour, minute = int(found[1]), int(found[2] or 0)
    if found[3] is not None:
        if not 1 <= hour <= 12:
            raise ValueError(f"{hour} {found[3]} is no hour")
        hour = hour % 12 + (12 if found[3] == "pm" else 0)
    return Cron(hour=str(hour), minute=str(minute), timezone=timezone)


def is_near(firing: datetime | None, planned: datetime) -> bool:
    """Whether a firing comes when Agenda has planned a run: Agenda knows milliseconds, and a cron seconds."""
    return firing is not None and abs(firing - planned) < timedelta(seconds=1)
