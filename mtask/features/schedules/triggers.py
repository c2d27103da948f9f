"""Triggers: a trigger decides when a schedule fires.

This module defines and checks the stored form of a trigger. APScheduler computes the times, but it is asked for no
time zone: it adds differences of the wall clock to instants, and so loses firings after the clocks go forward. All
computed times are in UTC and in whole milliseconds. The times of a cron are in whole seconds.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from itertools import islice, takewhile
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self
from zoneinfo import ZoneInfo

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from mtask.kernel.document.task import Instant, Text

# --- clocks ----------------------------------------------------------------------------------------------

# Wall clocks: a time zone's offset from UTC, and the instants at which it changes.

SECOND = timedelta(seconds=1)
#: An offset is less than a day. So a shift of the clocks skips and repeats only times that are nearer to it than this.
#: No zone has ever shifted its clocks twice within this time: the least on record is four days.
REACH = timedelta(days=2)


@lru_cache(maxsize=256)
def zone(name: str) -> ZoneInfo:
    """Return the time zone of this name; raise ValueError."""
    try:
        return ZoneInfo(name)
    except (LookupError, ValueError, OSError):
        raise ValueError(f"{name!r} is no time zone: use a name such as 'Europe/Berlin', or 'UTC'") from None


def offset_of(where: ZoneInfo, at: datetime) -> timedelta:
    """Return by how much the wall clock is ahead of UTC at an instant."""
    found = at.astimezone(where).utcoffset()
    assert found is not None
    return found


def first_shift(where: ZoneInfo, begin: datetime, end: datetime) -> datetime | None:
    """Return the instant after `begin`, and not after `end`, at which the offset changes; None: there is none.

    `begin` is a whole second, as all changes are. `end` is at most REACH later.
    """
    before = offset_of(where, begin)
    if offset_of(where, end) == before:
        return None
    seconds = range((end - begin) // SECOND + 1)
    return begin + SECOND * bisect_left(seconds, True, key=lambda n: offset_of(where, begin + n * SECOND) != before)


# --- triggers --------------------------------------------------------------------------------------------

if TYPE_CHECKING:  # most processes compute no firing, so each trigger imports APScheduler when it does
    from apscheduler.triggers.base import BaseTrigger

MIN_INTERVAL_MS = 1_000
_MILLISECOND = timedelta(milliseconds=1)
#: The most years that the search for a cron's next firing covers. Every combination of leap year, weekday and week
#: occurs within 40 years. Without this bound, the search for a cron that never fires would go through 8,000 years.
_YEARS_AHEAD = 100
_LAST_YEAR = 9999
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
#: No cron fires earlier, because no year before 1970 can be named.
_BEFORE_ALL = _EPOCH - REACH
#: `last_firings` shortens a span of time that holds more firings than twice the wanted number plus this number.
_SPARE = 8
_CRONTAB = ("minute", "hour", "day", "month", "day_of_week")
_trigger = ConfigDict(defer_build=True, frozen=True, extra="forbid")


def _whole(moment: datetime) -> datetime:
    """Return the moment in UTC, rounded to whole milliseconds, because BSON stores no finer times."""
    rounded = moment.astimezone(UTC) + timedelta(microseconds=500)
    return rounded.replace(microsecond=rounded.microsecond // 1000 * 1000)


class Cron(BaseModel):
    """Fires at each time that matches all fields. The fields describe the wall clock in one time zone.

    A field holds numbers or names of months and weekdays, with ranges and steps: `5`, `1,15`, `mon-fri`, `*/2`,
    `jan-jun/2`. `day` also takes `last`, and weekdays such as `2nd fri` and `last mon`.

    A field that is left out matches any value. There is one exception, as in APScheduler: a field that is left out
    matches only its first value if all given fields have longer units. So `Cron(hour="3")` means 03:00:00. The
    exception does not apply to `week` and `day_of_week`. A weekday is a name, or a number where 0 is Monday.

    With daylight saving, the trigger does not fire at a time that the clocks skip. It fires twice at a time that occurs
    twice.
    """

    model_config = _trigger

    kind: Literal["cron"] = "cron"
    year: Text | None = None
    month: Text | None = None
    day: Text | None = None
    week: Text | None = None
    day_of_week: Text | None = None
    hour: Text | None = None
    minute: Text | None = None
    second: Text | None = None
    timezone: Text = "UTC"

    @model_validator(mode="after")
    def _can_be_computed(self) -> Self:
        if not self.fields():
            raise ValueError("name at least one field, such as minute='*/5'")
        zone(self.timezone)
        numbered(self.fields())
        return self

    @classmethod
    def parse(cls, expression: str, timezone: str = "UTC") -> Self:
        """Return the trigger for the five fields of a crontab; raise ValueError.

        As in a crontab, the weekdays 0 and 7 are Sunday.
        """
        parts = expression.split()
        if len(parts) != len(_CRONTAB):
            raise ValueError(
                f"{expression!r} has {len(parts)} fields: a crontab's five are minute, hour, day, month and weekday"
            )
        fields = dict(zip(_CRONTAB, parts, strict=True))
        if fields["day"] != "*" and fields["day_of_week"] != "*":
            raise ValueError(
                f"{expression!r} names days and weekdays: in a crontab that means either, here it would be both. "
                "Use two schedules, or Cron(day=..., day_of_week=...) for both"
            )
        fields["day_of_week"] = named_weekdays(fields["day_of_week"])
        return cls(**fields, timezone=timezone)

    def fields(self) -> dict[str, str]:
        """Return the fields that are set, the longest unit first."""
        return self.model_dump(exclude={"kind", "timezone"}, exclude_none=True)

    def __str__(self) -> str:
        fields = self.fields()
        # Weekday 0 is Sunday in a crontab, but Monday in these fields. So fields with weekday numbers are not shown as
        # a crontab.
        if fields.keys() == set(_CRONTAB) and not any(c.isdigit() for c in fields["day_of_week"]):
            return f"{' '.join(fields[name] for name in _CRONTAB)} {self.timezone}"
        return f"{' '.join(f'{name}={value}' for name, value in fields.items())} {self.timezone}"


class Every(BaseModel):
    """Fires again and again, always after the same interval.

    The first firing is at start_time. Without a start_time, the first firing is one interval after the creation of the
    schedule.
    """

    model_config = _trigger

    kind: Literal["interval"] = "interval"
    interval_ms: Annotated[int, Field(ge=MIN_INTERVAL_MS, le=10 * 366 * 86_400_000)]

    def __str__(self) -> str:
        left, parts = self.interval_ms, []
        for unit, length in (("d", 86_400_000), ("h", 3_600_000), ("m", 60_000)):
            count, left = divmod(left, length)
            parts += [f"{count}{unit}"] if count else []
        return " ".join(["every", *parts, *([f"{left / 1000:g}s"] if left else [])])


class Once(BaseModel):
    """Fires once."""

    model_config = _trigger

    kind: Literal["once"] = "once"
    time: Annotated[Instant, AfterValidator(_whole)]

    def __str__(self) -> str:
        return f"once at {self.time.replace(tzinfo=None).isoformat(' ')} UTC"


Trigger = Annotated[Cron | Every | Once, Field(discriminator="kind")]


@lru_cache(maxsize=512)
def _wall_times(trigger: Cron, last_year: int = _LAST_YEAR) -> BaseTrigger:
    """Return a trigger of APScheduler that finds times of the wall clock until `last_year` ends. It calls them UTC."""
    from apscheduler.triggers.cron import CronTrigger

    return CronTrigger(
        **numbered(trigger.fields()),
        timezone=UTC,
        end_date=None if last_year >= _LAST_YEAR else datetime(last_year, 12, 31, tzinfo=UTC),
    )


@lru_cache(maxsize=512)
def _intervals(trigger: Every, anchor: datetime, jitter_ms: int = 0) -> BaseTrigger:
    """Return a trigger of APScheduler that counts intervals from `anchor`."""
    from apscheduler.triggers.interval import IntervalTrigger

    length = timedelta(milliseconds=trigger.interval_ms)
    return IntervalTrigger(seconds=length / SECOND, start_date=anchor, timezone=UTC, jitter=jitter_ms / 1000 or None)


def _last_year(trigger: Cron, after: datetime) -> int:
    """Return the last year of the search for a cron's next firing.

    If the cron names years, the search is counted from the first named year that is not over.
    """
    begin = after.year
    if trigger.year is not None:
        first: Any = _wall_times(Cron(year=trigger.year))
        found = first.get_next_fire_time(None, datetime(max(1, begin - 1), 1, 1, tzinfo=UTC))
        begin = begin if found is None else max(begin, found.year)
    # The result is the same for all years of a decade, so that one cached trigger serves the whole decade.
    return min(begin // 10 * 10 + 10 + _YEARS_AHEAD, _LAST_YEAR)


def next_firing(trigger: Cron | Every | Once, after: datetime, anchor: datetime) -> datetime | None:
    """Return the first firing later than `after`; None: there is none. Intervals count from `anchor`."""
    if isinstance(trigger, Once):
        return trigger.time if trigger.time > after else None
    try:
        return _next_of_cron(trigger, after) if isinstance(trigger, Cron) else _next_of_every(trigger, after, anchor)
    except OverflowError:  # the firing would lie beyond the year 9999
        return None


def _next_of_cron(trigger: Cron, after: datetime) -> datetime | None:
    """Return the first firing later than `after`.

    Between two shifts of the clocks, the wall clock runs as evenly as UTC. So a time of the wall clock that is found
    with the offset of `begin` is right unless the clocks shift before it. If they do, the search goes on at the shift,
    with the offset from then on. So it meets no time that the clocks skip, and it meets again the times that they
    repeat.
    """
    where = zone(trigger.timezone)
    times: Any = _wall_times(trigger, _last_year(trigger, after))
    begin = max(after.astimezone(UTC), _BEFORE_ALL).replace(microsecond=0) + SECOND
    searched: datetime | None = None
    wall: datetime | None = None
    while True:
        offset = offset_of(where, begin)
        local = begin + offset
        # What a search has found holds for all searches that would begin before the found time.
        if searched is None or local < searched or (wall is not None and local > wall):
            searched, wall = local, times.get_next_fire_time(None, local)
        near = begin + REACH
        end = near if wall is None else min(near, wall - offset)
        shift = first_shift(where, begin, end)
        if shift is not None:
            begin = shift
        elif wall is None:
            return None
        elif end < near:
            return end
        else:
            begin = max(near, wall - REACH)  # the shifts between these two repeat and skip nothing that fires


def _next_of_every(trigger: Every, after: datetime, anchor: datetime) -> datetime | None:
    times: Any = _intervals(trigger, anchor)
    firing = _whole(times.get_next_fire_time(None, after.astimezone(UTC) + _MILLISECOND))
    # APScheduler counts in inexact fractions of seconds. If the search begins exactly at a firing, APScheduler may skip
    # that firing.
    before = firing - timedelta(milliseconds=trigger.interval_ms)
    return before if before > after and before >= anchor else firing


def firings(trigger: Cron | Every | Once, after: datetime, anchor: datetime) -> Iterator[datetime]:
    """Yield the firings later than `after`, the earliest first."""
    while (found := next_firing(trigger, after, anchor)) is not None:
        yield found
        after = found


def last_firings(
    trigger: Cron | Every | Once, start: datetime, end: datetime, anchor: datetime, count: int
) -> list[datetime]:
    """Return the newest `count` firings at or after `start` and before `end`, the earliest first.

    A trigger can compute firings only forwards, and its firings may be a second or years apart. So this function
    searches one span of time after the other, from `end` backwards. A span with many more firings than wanted is
    shortened and searched again. If a span holds few firings, the next span is longer.
    """
    found: list[datetime] = []
    begin, span = end, timedelta(seconds=2 * count)
    while begin > start and len(found) < count:
        wanted = count - len(found)
        earlier = max(start, begin - span) if begin - start > span else start
        # Two firings are at least a second apart. So if a span is shortened again and again, it holds few firings at
        # last.
        most = 2 * wanted + _SPARE
        ahead = firings(trigger, earlier - _MILLISECOND, anchor)
        several = list(islice(takewhile(begin.__gt__, ahead), most + 1))
        if len(several) > most:
            span /= 4
        else:
            found[:0] = several
            begin, span = earlier, span * 4 if begin - start > span else span
    return found[-count:]


def jittered(trigger: Cron | Every | Once, firing: datetime, jitter_ms: int) -> datetime:
    """Return the time of the firing plus a random delay of up to `jitter_ms`."""
    if isinstance(trigger, Once) or not jitter_ms:
        return firing
    # APScheduler draws the delay. It is drawn for a firing at the epoch, so that one cached trigger serves all firings.
    times: Any = _intervals(Every(interval_ms=MIN_INTERVAL_MS), _EPOCH, jitter_ms)
    return firing + (_whole(times.get_next_fire_time(None, _EPOCH)) - _EPOCH)


# --- expressions -----------------------------------------------------------------------------------------

# Expressions: what may stand in a field of a cron.
#
# APScheduler ignores what follows the name of a month or weekday, and what follows the word "last". So the fields are
# checked here, and APScheduler is given numbers.

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
