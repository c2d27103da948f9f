"""Expressions: what may stand in a field of a cron.

APScheduler ignores what follows the name of a month or weekday, and what follows the word "last". So the fields are
checked here, and APScheduler is given numbers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

_MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
_WEEKDAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
_SPAN = re.compile(r"(?:\*|([0-9]{1,9}|[a-z]+)(?:-([0-9]{1,9}|[a-z]+))?)(?:/([0-9]{1,9}))?", re.IGNORECASE)
#: The days of a month that have names, such as "2nd fri".
_NAMED_DAY = re.compile(rf"(?:1st|2nd|3rd|4th|5th|last) +(?:{'|'.join(_WEEKDAYS)})\b|last\b", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class _Field:
    """A field: its numbers from `low` to `high`, and the names of the first ones."""

    label: str
    low: int
    high: int
    names: tuple[str, ...] = ()
    remark: str = ""

    def value(self, text: str) -> int:
        """Return the number that a number or a name means; raise ValueError."""
        name = text.lower()
        found = self.low + self.names.index(name) if name in self.names else int(text) if text.isdecimal() else -1
        if not self.low <= found <= self.high:
            raise self.error(f"{text!r} is no value")
        return found

    def error(self, what: str) -> ValueError:
        """Return the error that says what is wrong in this field."""
        named = f" or {self.names[0]} to {self.names[-1]}" if self.names else ""
        return ValueError(f"in the field {self.label}, {what}: use {self.low} to {self.high}{self.remark}{named}")


_DAY = _Field("day", 1, 31, remark=", last, or a weekday such as '2nd fri'")
_FIELDS = {
    "year": _Field("year", 1970, 9999),
    "month": _Field("month", 1, 12, _MONTHS),
    "day": _DAY,
    "week": _Field("week", 1, 53),
    "day_of_week": _Field("day_of_week", 0, 6, _WEEKDAYS, " (0 is Monday)"),
    "hour": _Field("hour", 0, 23),
    "minute": _Field("minute", 0, 59),
    "second": _Field("second", 0, 59),
}
#: A crontab counts its weekdays from Sunday to Sunday.
_WEEKDAY = _Field("weekday", 0, 7, (_WEEKDAYS[-1], *_WEEKDAYS[:-1]), " (0 and 7 are Sunday)")


def numbered(fields: Mapping[str, str]) -> dict[str, str]:
    """Return the fields of a cron as APScheduler understands them; raise ValueError."""
    return {
        name: ",".join(part if numbers is None else _span(numbers) for part, numbers in _parts(_FIELDS[name], text))
        for name, text in fields.items()
    }


def named_weekdays(text: str) -> str:
    """Return a crontab's weekday field for a `Cron`, whose numbers mean other weekdays; raise ValueError."""
    named: list[str] = []
    for part, numbers in _parts(_WEEKDAY, text.lower()):
        means_the_same = not re.search(r"[0-9]|sun-", part)
        named += [part] if means_the_same or numbers is None else [_WEEKDAY.names[number % 7] for number in numbers]
    return ",".join(dict.fromkeys(named))


def _span(numbers: range) -> str:
    # APScheduler refuses a step that is longer than its range.
    return f"{numbers[0]}-{numbers[-1]}/{numbers.step}" if len(numbers) > 1 else str(numbers[0])


def _parts(field: _Field, text: str) -> Iterator[tuple[str, range | None]]:
    """Yield each part of a field with the numbers that it means; a day of the month that has a name has none."""
    for part in re.split(" *, *", text.strip()):
        named = _NAMED_DAY.match(part) if field is _DAY else None
        found = named or _SPAN.match(part)
        if found is None:
            raise field.error(f"{part!r} is no value" if part else "a value is missing")
        numbers = None if named else _numbers(field, found)
        if rest := part[found.end() :]:
            raise field.error(f"{rest!r} cannot follow {found[0]!r}")
        yield part, numbers


def _numbers(field: _Field, found: re.Match[str]) -> range:
    begin, end, stride = found.groups()
    first, last = field.low, field.high
    if begin is not None:
        first = field.value(begin)
        last = field.value(end) if end is not None else last if stride is not None else first
    if field is _WEEKDAY and end is None:
        last = max(first, min(last, 6))  # Sunday is in the week once
    elif field is _WEEKDAY and end == "sun" and first > 0:
        last = 7
    if first > last:
        raise field.error(f"{found[0]!r} runs backwards")
    step = int(stride or 1)
    if not 1 <= step <= field.high - field.low:
        raise field.error(f"the step of {found[0]!r} is not 1 to {field.high - field.low}")
    return range(first, last + 1, step)
