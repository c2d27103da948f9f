"""When triggers fire: strictly later each time, and the same wherever one begins to ask."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from itertools import islice, pairwise
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from pydantic import ValidationError

from mtask.errors import InvalidInput
from mtask.features.schedules.client import trigger_of
from mtask.features.schedules.triggers import Cron, Every, Once, firings, jittered, last_firings, next_firing

NOW = datetime(2026, 3, 2, 12, 0, tzinfo=UTC)  # a Monday
Trigger = Cron | Every | Once


def times(trigger: Trigger, count: int, after: datetime = NOW, anchor: datetime = NOW) -> list[str]:
    return [f"{at:%a %d.%m. %H:%M:%S}" for at in islice(firings(trigger, after, anchor), count)]


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("*/20 * * * *", ["Mon 02.03. 12:20:00", "Mon 02.03. 12:40:00", "Mon 02.03. 13:00:00"]),
        ("30 9 * * 1-5", ["Tue 03.03. 09:30:00", "Wed 04.03. 09:30:00", "Thu 05.03. 09:30:00"]),
        ("0 0 * * 0", ["Sun 08.03. 00:00:00", "Sun 15.03. 00:00:00", "Sun 22.03. 00:00:00"]),
        ("0 0 * * 7", ["Sun 08.03. 00:00:00", "Sun 15.03. 00:00:00", "Sun 22.03. 00:00:00"]),
        ("0 0 * * 5-7", ["Fri 06.03. 00:00:00", "Sat 07.03. 00:00:00", "Sun 08.03. 00:00:00"]),
        ("0 0 * * 0-1", ["Sun 08.03. 00:00:00", "Mon 09.03. 00:00:00", "Sun 15.03. 00:00:00"]),
        ("0 0 * * */3", ["Wed 04.03. 00:00:00", "Sat 07.03. 00:00:00", "Sun 08.03. 00:00:00"]),
        ("0 0 * * MON,thu", ["Thu 05.03. 00:00:00", "Mon 09.03. 00:00:00", "Thu 12.03. 00:00:00"]),
        ("0 6 last * *", ["Tue 31.03. 06:00:00", "Thu 30.04. 06:00:00", "Sun 31.05. 06:00:00"]),
        ("0 0 29 2 *", ["Tue 29.02. 00:00:00", "Sun 29.02. 00:00:00", "Fri 29.02. 00:00:00"]),
        ("0 0 * * mon-fri/2", ["Wed 04.03. 00:00:00", "Fri 06.03. 00:00:00", "Mon 09.03. 00:00:00"]),
        ("0 0 * * Mon/3,sun", ["Thu 05.03. 00:00:00", "Sun 08.03. 00:00:00", "Mon 09.03. 00:00:00"]),
        ("0 0 * * mon-2", ["Tue 03.03. 00:00:00", "Mon 09.03. 00:00:00", "Tue 10.03. 00:00:00"]),
        ("0 0 * * sun-mon", ["Sun 08.03. 00:00:00", "Mon 09.03. 00:00:00", "Sun 15.03. 00:00:00"]),
        ("0 0 * * sat-sun", ["Sat 07.03. 00:00:00", "Sun 08.03. 00:00:00", "Sat 14.03. 00:00:00"]),
        ("0 0 * * sun-sat/3", ["Wed 04.03. 00:00:00", "Sat 07.03. 00:00:00", "Sun 08.03. 00:00:00"]),
        ("0 0 1 jan-mar/2 *", ["Fri 01.01. 00:00:00", "Mon 01.03. 00:00:00", "Sat 01.01. 00:00:00"]),
        ("0 0 1 SEP/3 *", ["Tue 01.09. 00:00:00", "Tue 01.12. 00:00:00", "Wed 01.09. 00:00:00"]),
        ("50-59/9 0-4/5 2-3/7 * *", ["Thu 02.04. 00:50:00", "Thu 02.04. 00:59:00", "Sat 02.05. 00:50:00"]),
    ],
)
def test_crontab(expression: str, expected: list[str]) -> None:
    assert times(Cron.parse(expression), 3) == expected


def test_cron_with_seconds_and_an_own_zone() -> None:
    assert times(Cron(second="*/30"), 3) == ["Mon 02.03. 12:00:30", "Mon 02.03. 12:01:00", "Mon 02.03. 12:01:30"]
    assert times(Cron(hour="3", timezone="Asia/Kolkata"), 1) == ["Mon 02.03. 21:30:00"]


def test_daylight_saving_both_ways() -> None:
    nightly = Cron.parse("30 2 * * *", "Europe/Berlin")
    spring, autumn = datetime(2026, 3, 27, 12, tzinfo=UTC), datetime(2026, 10, 23, 12, tzinfo=UTC)
    # The night to the 29th has no 02:30.
    assert times(nightly, 3, spring) == ["Sat 28.03. 01:30:00", "Mon 30.03. 00:30:00", "Tue 31.03. 00:30:00"]
    # The night to the 25th has two of them.
    assert times(nightly, 4, autumn) == [
        "Sat 24.10. 00:30:00",
        "Sun 25.10. 00:30:00",
        "Sun 25.10. 01:30:00",
        "Mon 26.10. 01:30:00",
    ]


@pytest.mark.parametrize(
    ("expression", "zone", "after", "expected"),
    [
        ("0 0 1 * *", "Europe/Berlin", "2026-03-02", ["Wed 01.04. 00:00", "Fri 01.05. 00:00"]),
        ("0 0 * * *", "Europe/Berlin", "2026-03-28", ["Sun 29.03. 00:00", "Mon 30.03. 00:00", "Tue 31.03. 00:00"]),
        ("0 0 * * *", "America/New_York", "2026-03-07", ["Sun 08.03. 00:00", "Mon 09.03. 00:00", "Tue 10.03. 00:00"]),
        ("0 0 15 * *", "America/New_York", "2026-03-01", ["Sun 15.03. 00:00", "Wed 15.04. 00:00"]),
        ("0 0 * * mon", "Europe/Berlin", "2026-03-23", ["Mon 30.03. 00:00", "Mon 06.04. 00:00"]),
        ("0 1 * * *", "Europe/London", "2027-03-27", ["Sat 27.03. 01:00", "Mon 29.03. 01:00"]),
        ("0 1 * * *", "Europe/London", "2027-03-28", ["Mon 29.03. 01:00", "Tue 30.03. 01:00"]),
        ("0 0,2 * * *", "Europe/London", "2027-03-27", ["Sat 27.03. 02:00", "Sun 28.03. 00:00", "Sun 28.03. 02:00"]),
        ("0 0 * * *", "America/Santiago", "2026-09-04", ["Sat 05.09. 00:00", "Mon 07.09. 00:00"]),
        ("15 2 * * *", "Australia/Lord_Howe", "2026-10-03", ["Sat 03.10. 02:15", "Mon 05.10. 02:15"]),
        ("0 0 * * *", "Pacific/Apia", "2011-12-28", ["Thu 29.12. 00:00", "Sat 31.12. 00:00", "Sun 01.01. 00:00"]),
    ],
)
def test_only_times_that_the_clocks_skip_are_left_out(
    expression: str, zone: str, after: str, expected: list[str]
) -> None:
    where = ZoneInfo(zone)
    midnight = datetime.fromisoformat(after).replace(tzinfo=where)
    found = islice(firings(Cron.parse(expression, zone), midnight, midnight), len(expected))
    assert [f"{at.astimezone(where):%a %d.%m. %H:%M}" for at in found] == expected


def test_last_firing_of_all_is_in_the_second_pass_of_an_hour_that_comes_twice() -> None:
    last = Cron(year="2026", month="10", day="25", hour="2", minute="30", timezone="Europe/Berlin")
    assert times(last, 3) == ["Sun 25.10. 00:30:00", "Sun 25.10. 01:30:00"]


def test_cron_of_an_hour_that_the_clocks_always_skip_never_fires() -> None:
    skipped = Cron(month="3", day="last sun", hour="2", minute="30", timezone="Europe/Berlin")
    assert next_firing(skipped, datetime(2026, 3, 1, tzinfo=UTC), NOW) is None


def test_interval_counts_from_its_anchor() -> None:
    anchor = NOW - timedelta(days=400, milliseconds=123)
    every = Every(interval_ms=90_000)
    found = list(islice(firings(every, NOW, anchor), 500))
    assert [(at - anchor) % timedelta(seconds=90) for at in found] == [timedelta(0)] * 500
    assert found[0] - NOW <= timedelta(seconds=90)
    assert {b - a for a, b in pairwise(found)} == {timedelta(seconds=90)}
    assert next_firing(every, anchor - timedelta(days=3), anchor) == anchor
    assert next_firing(every, anchor, anchor) == anchor + timedelta(seconds=90)


@pytest.mark.parametrize("interval_ms", [1_000, 1_001, 1_100, 333_333])
def test_asking_again_from_any_firing_gives_the_same_ones(interval_ms: int) -> None:
    anchor = NOW - timedelta(days=1)
    found = list(islice(firings(Every(interval_ms=interval_ms), NOW, anchor), 1_000))
    assert len(set(found)) == 1_000
    for at in found[:-1:97]:
        assert next_firing(Every(interval_ms=interval_ms), at, anchor) == found[found.index(at) + 1]


def test_once_fires_once() -> None:
    once = Once(time=NOW + timedelta(hours=1))
    assert list(firings(once, NOW, NOW)) == [once.time]
    assert next_firing(once, once.time, NOW) is None


@pytest.mark.parametrize(
    ("trigger", "count"),
    [(Every(interval_ms=1_000), 5), (Cron.parse("0 3 * * *"), 5), (Cron.parse("0 0 1 1 *"), 3), (Cron(second="*"), 1)],
)
def test_last_firings_are_the_newest_of_all(trigger: Trigger, count: int) -> None:
    anchor = NOW - timedelta(days=1)
    start, end = NOW - timedelta(days=3 * 366), NOW
    if not isinstance(trigger, Cron) or trigger.second is not None:
        start = NOW - timedelta(hours=2)
    every = [at for at in islice(firings(trigger, start - timedelta(milliseconds=1), anchor), 20_000) if at < end]
    assert last_firings(trigger, start, end, anchor, count) == every[-count:]
    assert last_firings(trigger, start, end, anchor, 10**6) == every


def test_jitter_delays_and_never_hastens() -> None:
    for trigger in (Every(interval_ms=60_000), Cron.parse("* * * * *")):
        firing = next_firing(trigger, NOW, NOW)
        assert firing is not None
        happens = [jittered(trigger, firing, 5_000) - firing for _ in range(50)]
        assert all(timedelta(0) <= wait <= timedelta(seconds=5) for wait in happens)
        assert len(set(happens)) > 1
        assert jittered(trigger, firing, 0) == firing


def test_jitter_is_no_longer_and_no_shorter_where_the_clocks_go_back() -> None:
    nightly = Cron.parse("30 2 * * *", "Europe/Berlin")
    for firing in islice(firings(nightly, datetime(2026, 10, 25, tzinfo=UTC), NOW), 2):
        waits = [jittered(nightly, firing, 3_600_000) - firing for _ in range(50)]
        assert all(timedelta(0) <= wait <= timedelta(hours=1) for wait in waits)
        assert len(set(waits)) > 1


def test_jitter_of_a_firing_that_a_former_trigger_left_counts_from_that_firing() -> None:
    left = NOW + timedelta(minutes=1)
    assert jittered(Cron.parse("0 0 1 1 *"), left, 5_000) - left <= timedelta(seconds=5)


@pytest.mark.parametrize(
    ("expression", "told"),
    [
        ("0 0 * * mon#2", "in the field weekday, '#2' cannot follow 'mon'"),
        ("0 0 * * mon!", "in the field weekday, '!' cannot follow 'mon'"),
        ("0 0 * * tue,mon-fri-sat", "in the field weekday, '-sat' cannot follow 'mon-fri'"),
        ("0 0 * * mon-", "in the field weekday, '-' cannot follow 'mon'"),
        ("0 0 * * mon/x", "in the field weekday, '/x' cannot follow 'mon'"),
        ("0 0 * * monday", "in the field weekday, 'monday' is no value: use 0 to 7 (0 and 7 are Sunday) or sun to sat"),
        ("0 0 * * sat-mon", "in the field weekday, 'sat-mon' runs backwards"),
        ("0 0 * jan! *", "in the field month, '!' cannot follow 'jan'"),
        ("0 0 * jan-mar#2 *", "in the field month, '#2' cannot follow 'jan-mar'"),
        ("0 0 * january *", "in the field month, 'january' is no value: use 1 to 12 or jan to dec"),
        (
            "0 0 lastday * *",
            "in the field day, 'lastday' is no value: use 1 to 31, last, or a weekday such as '2nd ",
        ),
        ("0 0 last-3 * *", "in the field day, '-3' cannot follow 'last'"),
        ("0 0 L * *", "in the field day, 'L' is no value"),
        ("0 0 15W * *", "in the field day, 'W' cannot follow '15'"),
        ("0 0,, * * *", "in the field hour, a value is missing: use 0 to 23"),
        ("0 ?3 * * *", "in the field hour, '?3' is no value: use 0 to 23"),
        ("*/60 * * * *", "in the field minute, the step of '*/60' is not 1 to 59"),
        ("mon * * * *", "in the field minute, 'mon' is no value"),
    ],
)
def test_text_without_a_meaning_is_refused_and_its_place_is_named(expression: str, told: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        trigger_of(expression)
    assert str(caught.value).startswith(f"when {expression!r}: {told}")


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"day": "1st mon,last fri!"}, "in the field day, '!' cannot follow 'last fri'"),
        ({"day": "2nd mon-fri"}, "in the field day, '-fri' cannot follow '2nd mon'"),
        ({"day_of_week": "mon fri"}, "in the field day_of_week, ' fri' cannot follow 'mon'"),
        ({"day_of_week": "7"}, "in the field day_of_week, '7' is no value: use 0 to 6 (0 is Monday) or mon to sun"),
        ({"year": "1969"}, "in the field year, '1969' is no value"),
        ({"week": "54"}, "in the field week, '54' is no value"),
        ({"second": "5\n6"}, "in the field second, '\\n6' cannot follow '5'"),
    ],
)
def test_fields_of_a_cron_are_checked_in_the_same_way(fields: dict[str, str], told: str) -> None:
    with pytest.raises(ValidationError) as caught:
        Cron(**fields)
    assert f"Value error, {told}" in str(caught.value)


def test_fields_of_a_cron_take_names_and_steps() -> None:
    assert times(Cron(day_of_week="Mon-fri/2", hour="9"), 2) == ["Wed 04.03. 09:00:00", "Fri 06.03. 09:00:00"]
    assert times(Cron(day="2nd FRI , last", hour="0"), 2) == ["Fri 13.03. 00:00:00", "Tue 31.03. 00:00:00"]
    assert times(Cron(month="may-9/4"), 3) == ["Fri 01.05. 00:00:00", "Tue 01.09. 00:00:00", "Sat 01.05. 00:00:00"]


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: Cron.parse("* * * *"), "has 4 fields"),
        (lambda: Cron.parse("61 * * * *"), "61"),
        (lambda: Cron.parse("* * * * 8"), "0 to 7"),
        (lambda: Cron.parse("* * * * 3-1"), "0 to 7"),
        (lambda: Cron.parse("* * * * */0"), "0 to 7"),
        (lambda: Cron.parse("x * * * *"), "x"),
        (lambda: Cron.parse("* * * * *", "Europe"), "no time zone"),
        (lambda: Cron.parse("* * * * *", "../etc/passwd"), "no time zone"),
        (lambda: Cron.parse("* * * * *", ""), "no time zone"),
        (lambda: Cron(), "at least one field"),
        (lambda: Cron(minutes="5"), "Extra inputs"),
        (lambda: Every(interval_ms=999), "greater than or equal to 1000"),
        (lambda: Once(time=datetime(2026, 1, 1)), "timezone"),  # noqa: DTZ001
    ],
)
def test_what_cannot_be_computed_is_refused(make: Any, told: str) -> None:
    with pytest.raises(ValueError, match=told) as caught:
        make()
    assert isinstance(caught.value, ValidationError | ValueError)


def test_a_trigger_is_shown_as_it_was_given() -> None:
    assert str(Cron.parse("30 2 * * 1-5", "Europe/Berlin")) == "30 2 * * mon,tue,wed,thu,fri Europe/Berlin"
    assert str(Cron.parse("0 8 * jan-mar/2 mon-fri")) == "0 8 * jan-mar/2 mon-fri UTC"
    assert str(Cron.parse("0 8 * * Mon-Fri/2")) == "0 8 * * mon,wed,fri UTC"
    assert str(Cron(hour="3")) == "hour=3 UTC"
    numbered = Cron(minute="1", hour="3", day="*", month="*", day_of_week="0")  # Monday here, Sunday in a crontab
    assert "day_of_week=0" in str(numbered)
    assert str(Every(interval_ms=6 * 3_600_000)) == "every 6h"
    assert str(Every(interval_ms=93_784_500)) == "every 1d 2h 3m 4.5s"
    assert str(Once(time=datetime(2026, 1, 2, 3, 4, tzinfo=UTC))) == "once at 2026-01-02 03:04:00 UTC"
