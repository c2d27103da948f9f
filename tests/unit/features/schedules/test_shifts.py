"""When a crontab fires where clocks shift: a judge that knows no trigger looks at every single minute.

The judge asks two things of each minute in UTC: what the wall clock shows then, and whether the crontab names that. So
a time that the clocks skip never fires, a time that they show twice fires twice, and every other time fires once.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from itertools import takewhile
from random import Random
from zoneinfo import ZoneInfo, available_timezones

import pytest

from mtask.features.schedules.triggers import Cron, firings, last_firings, next_firing

MINUTE, DAY = timedelta(minutes=1), timedelta(days=1)
MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
WEEKDAYS = ("sun", "mon", "tue", "wed", "thu", "fri", "sat")
#: Before 1973, the offsets of some zones are no whole minutes.
FIRST, LAST = datetime(1973, 1, 1, tzinfo=UTC), datetime(2038, 1, 1, tzinfo=UTC)
#: The first firing after a shift may be many days later. So these are judged in longer windows.
RARE = ("0 0 1 * *", "0 0 * * mon", "0 0 last * *", "59 23 28-31 3,4,9-12 *", "0 0 1 jan-dec/3 *", "30 2 * mar,oct sun")
DENSE = (
    "0 0 * * *",
    "0 1 * * *",
    "30 2 * * *",
    "5 0,12 * * mon-fri/2",
    "0 */6 * * *",
    "15 * * * *",
    "*/30 * * * *",
    "*/7 1-3 * * *",
    "10-50/20 0,23 * * sat,sun",
)
#: Half an hour, a whole day, no time of year, several hours, a shift at midnight, and zones that many people live in.
SAMPLE = (
    ("Europe/Berlin", 2026),
    ("America/New_York", 2026),
    ("Europe/London", 2027),
    ("Australia/Lord_Howe", 2026),
    ("Asia/Pyongyang", 2015),
    ("Asia/Pyongyang", 2018),
    ("America/Caracas", 2007),
    ("America/Caracas", 2016),
    ("Antarctica/Casey", 2020),
    ("America/Nuuk", 2023),
    ("America/Santiago", 2025),
    ("Asia/Beirut", 2024),
    ("Pacific/Apia", 2011),
    ("Pacific/Kwajalein", 1993),
    ("Africa/Casablanca", 2026),
)


def allowed(field: str, low: int, high: int, names: tuple[str, ...]) -> set[int]:
    """Return the numbers that a field of a crontab names."""
    found: set[int] = set()
    for part in field.split(","):
        span, _, step = part.partition("/")
        ends = [low + names.index(end) if end in names else int(end) for end in span.split("-") if end != "*"] or [low]
        found.update(range(ends[0], (high if span == "*" else ends[-1]) + 1, int(step or 1)))
    return found


class Judge:
    """The minutes of a window in UTC, each with what the wall clock of a zone shows."""

    def __init__(self, zone: ZoneInfo, start: datetime, end: datetime) -> None:
        self.start, self.end = start, end
        self._walls = [(at, at.astimezone(zone)) for at in minutes(start, end)]

    def fires(self, crontab: str) -> list[datetime]:
        """Return the minutes in which a crontab fires."""
        minute, hour, day, month, weekday = crontab.split()
        in_minute, in_hour = allowed(minute, 0, 59, ()), allowed(hour, 0, 23, ())
        in_month, in_weekday = allowed(month, 1, 12, MONTHS), allowed(weekday, 0, 6, WEEKDAYS)
        in_day = set() if day == "last" else allowed(day, 1, 31, ())
        return [
            at
            for at, wall in self._walls
            if wall.minute in in_minute
            and wall.hour in in_hour
            and wall.month in in_month
            and wall.isoweekday() % 7 in in_weekday
            and (wall.day in in_day if in_day else (wall.replace(tzinfo=None) + DAY).day == 1)
        ]


def minutes(start: datetime, end: datetime) -> Iterator[datetime]:
    while start < end:
        yield start
        start += MINUTE


def shifts_of(zone: ZoneInfo, start: datetime, end: datetime) -> list[datetime]:
    """Return the minutes in which a zone's wall clock jumps."""

    def jumps(after: datetime, step: timedelta) -> bool:
        return (after + step).astimezone(zone).utcoffset() != after.astimezone(zone).utcoffset()

    half = DAY / 2
    halves = [start + half * number for number in range((end - start) // half)]
    return [
        at + MINUTE for each in halves if jumps(each, half) for at in minutes(each, each + half) if jumps(at, MINUTE)
    ]


def judged(zone: str, crontabs: tuple[str, ...], shift: datetime, reach: timedelta, random: Random) -> int:
    """Hold each crontab against the judge in a window around a shift; return how many were held."""
    judge = Judge(ZoneInfo(zone), shift - reach, shift + reach)
    for crontab in crontabs:
        trigger, expected, where = Cron.parse(crontab, zone), judge.fires(crontab), f"{crontab} {zone} {shift}"
        before = judge.start - timedelta(milliseconds=1)
        assert list(takewhile(judge.end.__gt__, firings(trigger, before, before))) == expected, where
        for count in (3, 10**6):
            assert last_firings(trigger, judge.start, judge.end, before, count) == expected[-count:], where
        for _ in range(3):  # a search may begin anywhere: in a gap, or in either pass of a time that comes twice
            after = shift + timedelta(seconds=random.randrange(-7_200, 7_200))
            later = expected[bisect_right(expected, after) :]
            found = next_firing(trigger, after, after)
            assert found == later[0] if later else found is None or found >= judge.end, f"{where} after {after}"
    return len(crontabs)


@pytest.mark.parametrize(("zone", "year"), SAMPLE)
def test_crontabs_fire_at_each_time_that_the_wall_clock_shows(zone: str, year: int) -> None:
    random = Random(year)
    shifts = shifts_of(ZoneInfo(zone), datetime(year, 1, 1, tzinfo=UTC), datetime(year + 1, 1, 1, tzinfo=UTC))
    for shift in shifts[:2]:
        judged(zone, DENSE, shift, 1.5 * DAY, random)
    judged(zone, RARE, random.choice(shifts), 5 * DAY, random)


@pytest.mark.long
@pytest.mark.timeout(7_200)
def test_crontabs_fire_at_each_time_that_the_wall_clock_shows_in_all_zones(capsys: pytest.CaptureFixture[str]) -> None:
    random, held, zones = Random(20), 0, 0
    for zone in sorted(available_timezones()):
        shifts = shifts_of(ZoneInfo(zone), FIRST, LAST)
        zones += bool(shifts)
        older = random.sample(shifts, min(2, len(shifts)))
        for shift in sorted({*shifts[-2:], *older}):
            held += judged(zone, DENSE, shift, 2 * DAY, random)
        for shift in sorted({*shifts[-1:], *older[:1]}):
            held += judged(zone, RARE, shift, 33 * DAY, random)
    with capsys.disabled():
        print(f"\n{held} crontabs in windows of {zones} zones")
    assert zones > 300
