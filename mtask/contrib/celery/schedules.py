"""The times of `beat_schedule`: `mtask.contrib.celery.schedules` stands for `celery.schedules`."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from typing import Any

from mtask import Cron
from mtask.contrib.celery.exceptions import NotMapped
from mtask.contrib.celery.words import NAMES

_WEEKDAYS = ("sun", "mon", "tue", "wed", "thu", "fri", "sat")
_MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
#: What Celery takes in a field of a crontab.
Field = int | str | Iterable[int]


class schedule:
    """Fires again and again, always after the same time: seconds or a timedelta."""

    def __init__(self, run_every: timedelta | float, *, relative: bool = False, **unmapped: Any) -> None:
        if relative or unmapped:
            name = "relative" if relative else next(iter(unmapped))
            raise NotMapped(f"schedule({name}=...)", 'for whole minutes or hours write crontab(minute="*/5")')
        self.run_every = run_every if isinstance(run_every, timedelta) else timedelta(seconds=run_every)

    def __repr__(self) -> str:
        return f"<freq: {self.run_every}>"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, schedule) and self.run_every == other.run_every

    def __hash__(self) -> int:
        return hash(self.run_every)


class crontab:
    """Fires at each minute that matches all fields, also days of the month *and* weekdays.

    A field is a number, several numbers, or text such as "*/15", "mon-fri" or "8-17,20". Weekday 0 is Sunday. Raises
    ValueError.
    """

    def __init__(
        self,
        minute: Field = "*",
        hour: Field = "*",
        day_of_week: Field = "*",
        day_of_month: Field = "*",
        month_of_year: Field = "*",
        **unmapped: Any,
    ) -> None:
        if unmapped:
            raise NotMapped(f"crontab({next(iter(unmapped))}=...)", "the setting `timezone` is that of all crontabs")
        self.minute = expand(minute, 60)
        self.hour = expand(hour, 24)
        self.day_of_week = expand(day_of_week, 7)
        self.day_of_month = expand(day_of_month, 31, 1)
        self.month_of_year = expand(month_of_year, 12, 1)

    def _fields(self) -> tuple[frozenset[int], ...]:
        return self.minute, self.hour, self.day_of_week, self.day_of_month, self.month_of_year

    def __eq__(self, other: object) -> bool:
        return isinstance(other, crontab) and self._fields() == other._fields()

    def __hash__(self) -> int:
        return hash(self._fields())

    def __repr__(self) -> str:
        return f"<crontab: {self.cron('UTC')}>"

    def cron(self, timezone: str) -> Cron:
        """Return the trigger of mtask, on the wall clock of a time zone."""
        weekdays = ",".join(_WEEKDAYS[number] for number in sorted(self.day_of_week))
        return Cron(
            minute=_text(self.minute, 60),
            hour=_text(self.hour, 24),
            day=_text(self.day_of_month, 31),
            month=_text(self.month_of_year, 12),
            day_of_week="*" if len(self.day_of_week) == 7 else weekdays,
            timezone=timezone,
        )


def expand(field: Field, count: int, first: int = 0) -> frozenset[int]:
    """Return the numbers that a field of a crontab names. `count` numbers from `first` on are allowed.

    Raises ValueError.
    """
    if isinstance(field, bool) or not isinstance(field, int | str | Iterable):
        raise ValueError(f"a field of a crontab is a number, text or several numbers, not {field!r}")
    if isinstance(field, str):
        found = {number for part in field.split(",") for number in _expand_part(part, count, first)}
    else:
        found = {field} if isinstance(field, int) else set(field)
    wrong = [number for number in found if not (isinstance(number, int) and first <= number < first + count)]
    if wrong or not found:
        raise ValueError(f"{field!r}: use {first} to {first + count - 1} in this field of a crontab")
    return frozenset(found)


def _expand_part(part: str, count: int, first: int) -> Iterable[int]:
    span, slash, step = part.strip().partition("/")
    low, dash, high = span.partition("-")
    every = list(range(first, first + count))
    if span == "*":
        numbers = every
    elif dash:
        begin, end = _number(low, every), _number(high, every)
        # As in Celery, "22-5" goes on at the beginning.
        numbers = [*range(begin, end + 1)] if begin <= end else [*range(begin, every[-1] + 1), *range(first, end + 1)]
    else:
        numbers = [_number(low, every)]
    if not slash:
        return numbers
    if not step.isdecimal() or int(step) < 1 or not (dash or span == "*"):
        raise ValueError(f"{part!r} is no part of a crontab: write a step as */5 or 8-17/2")
    return numbers[:: int(step)]


def _number(text: str, every: list[int]) -> int:
    name = text[:3].lower()
    if text.isdecimal():
        number = int(text)
    elif name in _WEEKDAYS and len(every) == 7:
        number = _WEEKDAYS.index(name)
    elif name in _MONTHS and len(every) == 12:
        number = _MONTHS.index(name) + 1
    else:
        raise ValueError(f"{text!r} is no number, month or weekday of a crontab")
    if number not in every:
        raise ValueError(f"{text}: use {every[0]} to {every[-1]} in this field of a crontab")
    return number


def _text(numbers: frozenset[int], count: int) -> str:
    return "*" if len(numbers) == count else ",".join(map(str, sorted(numbers)))


def trigger(when: object, timezone: str) -> timedelta | Cron:
    """Return what mtask takes for the times of an entry; raise NotMapped."""
    if isinstance(when, crontab):
        return when.cron(timezone)
    if isinstance(when, schedule):
        return when.run_every
    if isinstance(when, timedelta):
        return when
    if isinstance(when, int | float) and not isinstance(when, bool):
        return timedelta(seconds=when)
    raise NotMapped(f"the schedule {when!r}", "write seconds, a timedelta or crontab(...)")


def __getattr__(name: str) -> Any:
    if name in NAMES:
        raise NotMapped(name, NAMES[name])
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
