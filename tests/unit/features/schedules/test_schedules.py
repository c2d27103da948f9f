"""Which firings a schedule makes: those that are due, what catch_up makes of those that were missed, none twice."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any
from zoneinfo import ZoneInfo

import pytest

from mtask.features.schedules.rules import GRACE, Plan, Schedule, plan
from mtask.features.schedules.triggers import Cron, Every, Once
from mtask.kernel.document.identity import is_firing_of
from mtask.kernel.document.options import DEFAULT_OPTION

NOW = datetime(2026, 3, 2, 12, 0, tzinfo=UTC)
MINUTE = timedelta(minutes=1)


def schedule(trigger: Any = None, first: datetime | None = NOW, **given: Any) -> Schedule:
    return Schedule.model_validate(
        {
            "_id": "s",
            "name": "report",
            "queue": "default",
            "task_option": DEFAULT_OPTION,
            "trigger": trigger or Cron.parse("*/10 * * * *"),
            "create_time": NOW - timedelta(days=1),
            "update_time": NOW - timedelta(days=1),
            "schedule_state": {"next_fire_time": first},
            "revision": 1,
            "schema_version": 1,
            **given,
        }
    )


def minutes(made: Plan | None) -> list[float]:
    assert made is not None
    return [(firing - NOW) / MINUTE for firing in made.firings]


def test_not_yet_due_paused_or_over_is_nothing() -> None:
    assert plan(schedule(), NOW - timedelta(milliseconds=1)) is None
    assert plan(schedule(paused=True), NOW) is None
    assert plan(schedule(first=None), NOW) is None


def test_one_that_is_due() -> None:
    assert plan(schedule(), NOW) == Plan((NOW,), NOW + 10 * MINUTE, has_missed=False)
    assert plan(schedule(), NOW + GRACE) == Plan((NOW,), NOW + 10 * MINUTE, has_missed=False)


@pytest.mark.parametrize(
    ("policy", "made", "has_missed"),
    [
        ({"catch_up": "none"}, [60], True),
        ({"catch_up": "last"}, [60], True),
        ({"catch_up": "all"}, [0, 10, 20, 30, 40, 50, 60], False),
        ({"catch_up": "all", "catch_up_limit": 2}, [40, 50, 60], True),
    ],
)
def test_down_for_an_hour_and_back_on_time(policy: dict[str, Any], made: list[int], has_missed: bool) -> None:
    found = plan(schedule(**policy), NOW + 60 * MINUTE)
    assert minutes(found) == made
    assert found is not None
    assert (found.next_fire_time, found.has_missed) == (NOW + 70 * MINUTE, has_missed)


@pytest.mark.parametrize(
    ("policy", "made"),
    [
        ({"catch_up": "none"}, []),
        ({"catch_up": "last"}, [60]),
        ({"catch_up": "all"}, [0, 10, 20, 30, 40, 50, 60]),
        ({"catch_up": "all", "catch_up_limit": 2}, [50, 60]),
    ],
)
def test_down_for_an_hour_and_back_between_two(policy: dict[str, Any], made: list[int]) -> None:
    assert minutes(plan(schedule(**policy), NOW + 65 * MINUTE)) == made


def test_every_second_none_is_left_out_within_the_grace() -> None:
    found = plan(schedule(Every(interval_ms=1_000)), NOW + GRACE)
    assert found is not None
    assert found.firings == tuple(NOW + timedelta(seconds=second) for second in range(11))
    assert not found.has_missed


@pytest.mark.parametrize("late", [timedelta(seconds=2), GRACE, 60 * MINUTE])
def test_grace_of_none_is_one_interval_at_most(late: timedelta) -> None:
    every_second = schedule(Every(interval_ms=1_000), catch_up="none")
    assert plan(every_second, NOW + late) == Plan((NOW + late,), NOW + late + timedelta(seconds=1), has_missed=True)
    at_once = plan(every_second, NOW + timedelta(milliseconds=900))
    assert at_once == Plan((NOW,), NOW + timedelta(seconds=1), has_missed=False)


def test_missed_for_years_is_found_quickly() -> None:
    second = schedule(Every(interval_ms=1_000), first=NOW - timedelta(days=3_000), catch_up="all", catch_up_limit=1_000)
    found = plan(second, NOW)
    assert found is not None
    assert found.firings == tuple(NOW - timedelta(seconds=second) for second in range(1_010, -1, -1))


def test_start_and_end_bound_it() -> None:
    bounded = schedule(start_time=NOW + 25 * MINUTE, end_time=NOW + 50 * MINUTE, first=None)
    assert [(firing - NOW) / MINUTE for firing in bounded.next_firings(NOW, 10)] == [30, 40, 50]
    over = schedule(end_time=NOW + 5 * MINUTE)
    assert plan(over, NOW + timedelta(seconds=1)) == Plan((NOW,), None, has_missed=False)
    long_over = schedule(end_time=NOW + 25 * MINUTE, catch_up="all")
    assert minutes(plan(long_over, NOW + 600 * MINUTE)) == [0, 10, 20]


def test_interval_begins_at_its_start_or_one_interval_after_it_was_made() -> None:
    hourly = Every(interval_ms=3_600_000)
    assert schedule(hourly).next_firing(NOW - timedelta(days=1)) == NOW - timedelta(hours=23)
    later = schedule(hourly, start_time=NOW + 7 * MINUTE)
    assert later.next_firings(NOW, 2) == [NOW + 7 * MINUTE, NOW + 67 * MINUTE]


def test_once_that_was_missed_is_made_as_catch_up_says() -> None:
    for catch_up, made in (("none", []), ("last", [0.0]), ("all", [0.0])):
        found = plan(schedule(Once(time=NOW), catch_up=catch_up), NOW + 60 * MINUTE)
        assert minutes(found) == made
        assert found is not None
        assert found.next_fire_time is None
    assert schedule(Once(time=NOW)).first_firing(NOW + MINUTE) == NOW
    assert schedule(Once(time=NOW), schedule_state={"last_fire_time": NOW}).first_firing(NOW + MINUTE) is None


@pytest.mark.parametrize(("zone", "shift"), [("Europe/Berlin", "2026-03-29"), ("America/New_York", "2026-03-08")])
def test_catching_up_makes_each_midnight_around_a_shift_of_the_clocks(zone: str, shift: str) -> None:
    day = datetime.fromisoformat(shift).replace(tzinfo=ZoneInfo(zone))
    midnights = [(day + timedelta(days=number)).astimezone(UTC) for number in range(-3, 4)]  # by the wall clock
    made = plan(schedule(Cron.parse("0 0 * * *", zone), midnights[0], catch_up="all"), midnights[-1])
    assert made is not None
    assert list(made.firings) == midnights


@pytest.mark.parametrize("trigger", [Every(interval_ms=600_000), Cron.parse("*/10 * * * *", "Pacific/Pago_Pago")])
def test_times_at_the_ends_of_the_calendar_bound_nothing(trigger: Any) -> None:
    last = datetime(9999, 12, 31, 23, 59, 59, 999_000, tzinfo=UTC)
    unbounded = schedule(trigger, start_time=datetime(1, 1, 1, tzinfo=UTC), end_time=last)
    assert plan(unbounded, NOW + MINUTE) == Plan((NOW,), NOW + 10 * MINUTE, has_missed=True)
    assert schedule(trigger, start_time=last, end_time=last).next_firings(last, 2) == []


def test_keys_are_told_apart_by_the_instant_alone() -> None:
    assert schedule().key_of(NOW) == "s/2026-03-02T12:00:00Z"
    berlin = NOW.astimezone(ZoneInfo("Europe/Berlin"))
    assert schedule().key_of(berlin) == schedule().key_of(NOW)
    assert schedule().key_of(NOW + timedelta(milliseconds=5)) == "s/2026-03-02T12:00:00.005Z"


@pytest.mark.parametrize("tenant", [None, "acme"])
def test_the_key_of_a_firing_is_of_its_schedule_and_no_other_key_is(tenant: str | None) -> None:
    base = "s" if tenant is None else f"{tenant}:s"
    for firing in (NOW, NOW + timedelta(milliseconds=5)):
        key = schedule(tenant=tenant).key_of(firing)
        assert is_firing_of(base, key)
        assert not is_firing_of(f"{base}/s", key)
        assert not is_firing_of(base, f"{base}/{key}")
        assert not is_firing_of(base, f"{key}/1")
    assert not any(is_firing_of(base, key) for key in (base, f"{base}/", f"{base}/1", "2026-03-02T12:00:00Z"))


def test_both_firings_of_a_time_that_comes_twice_have_their_own_keys() -> None:
    nightly = schedule(Cron.parse("30 2 * * *", "Europe/Berlin"))
    twice = nightly.next_firings(datetime(2026, 10, 24, 12, tzinfo=UTC), 2)
    assert [nightly.key_of(firing) for firing in twice] == ["s/2026-10-25T00:30:00Z", "s/2026-10-25T01:30:00Z"]
