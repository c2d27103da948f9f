"""How Agenda writes intervals and times of the day, and why jobs stay."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from mtask.contrib.agenda import rules
from mtask.contrib.agenda.rules import Left
from mtask.features.schedules.triggers import Cron, Every

NOW = datetime(2026, 5, 1, 12, tzinfo=UTC)
JOB = {"_id": "7", "name": "send", "data": {"to": "a"}, "priority": 10, "nextRunAt": NOW}


@pytest.mark.parametrize(
    ("interval", "seconds"),
    [
        (90_000, 90),
        (1500.5, 1.5),
        ("90000", 90),
        ("3 minutes", 180),
        ("one minute", 60),
        ("minute", 60),
        ("1.5 hours", 5400),
        ("1 hour and 30 minutes", 5400),
        ("2 days, 3 hours", 2 * 86_400 + 3 * 3600),
        ("two weeks", 14 * 86_400),
        ("1 month", 30 * 86_400),
        ("1 year", 365 * 86_400),
    ],
)
def test_interval_is_that_of_agenda(interval: Any, seconds: float) -> None:
    assert rules.trigger_of(interval, "UTC") == Every(interval_ms=round(seconds * 1000))


@pytest.mark.parametrize(
    ("interval", "fields"),
    [
        ("*/5 * * * *", {"minute": "*/5", "hour": "*", "day": "*", "month": "*", "day_of_week": "*"}),
        ("30 0 9 * * 0", {"second": "30", "minute": "0", "hour": "9", "day": "*", "month": "*", "day_of_week": "sun"}),
        ("0 9 ? * 1-5", {"minute": "0", "hour": "9", "day": "*", "month": "*", "day_of_week": "mon,tue,wed,thu,fri"}),
        ("0 9 L * *", {"minute": "0", "hour": "9", "day": "last", "month": "*", "day_of_week": "*"}),
        ("@daily", {"minute": "0", "hour": "0", "day": "*", "month": "*", "day_of_week": "*"}),
    ],
)
def test_cron_of_agenda_counts_sunday_as_0_and_may_begin_with_seconds(interval: str, fields: dict[str, str]) -> None:
    assert rules.trigger_of(interval, "Europe/Berlin") == Cron(**fields, timezone="Europe/Berlin")


@pytest.mark.parametrize(
    ("at", "hour", "minute"),
    [("3:40pm", 15, 40), ("3:40 PM", 15, 40), ("at 9am", 9, 0), ("15:40", 15, 40), ("12:05 am", 0, 5), ("noon", 12, 0)],
)
def test_time_of_the_day_becomes_a_daily_schedule(at: str, hour: int, minute: int) -> None:
    made = rules.daily(at, "UTC")
    assert made == Cron(hour=str(hour), minute=str(minute))
    assert str(made) == f"hour={hour} minute={minute} UTC"


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"name": None}, "no job of Agenda"),
        ({"name": "send email"}, r"give --name 'send email=send_email'"),
        ({"disabled": True}, rules.DISABLED),
        ({"disabled": True, rules.MOVED: "task a"}, rules.BEFORE),
        ({"disabled": None, rules.MOVED: "task a"}, "disabled again"),
        ({"lockedAt": NOW}, rules.LOCKED),
        ({"nextRunAt": "soon"}, "no date: 'soon'"),
        ({"nextRunAt": None}, "no nextRunAt"),
        ({"nextRunAt": None, "lastRunAt": NOW, "lastFinishedAt": NOW}, "^finished"),
        ({"nextRunAt": None, "lastRunAt": NOW, "lastFinishedAt": NOW, "failedAt": NOW}, "^failed"),
        ({"priority": 1.5}, "whole number: 1.5"),
        ({"priority": float("nan")}, "whole number"),
        ({"repeatInterval": "1 day", "skipDays": [0, 6]}, "skipDays"),
        ({"repeatInterval": "twenty minutes"}, "neither an interval in words nor a cron"),
        ({"repeatInterval": "every 3 minutes"}, "neither an interval"),
        ({"repeatInterval": 500}, "every second at most"),
        ({"repeatInterval": {"n": 1}}, "use milliseconds"),
        ({"repeatInterval": "0 9 1 * mon"}, "Use two schedules"),
        ({"repeatInterval": "61 * * * *"}, "minute.*use 0 to 59"),
        ({"repeatInterval": "0 9 * * *", "repeatTimezone": "Mars/Olympus"}, "Mars/Olympus"),
        ({"repeatAt": "tomorrow"}, "use a time of the day"),
        ({"repeatAt": "13 pm"}, "13 pm is no hour"),
        ({"repeatAt": "25:00"}, "hour"),
    ],
)
def test_job_stays_for_a_reason_that_says_what_to_do(changed: dict[str, Any], reason: str) -> None:
    with pytest.raises(Left, match=reason):
        rules.move_of(JOB | changed, {}, "UTC")


def test_job_that_waits_keeps_its_data_priority_and_time() -> None:
    move = rules.move_of(JOB | {"name": "send email"}, {"send email": "send_email"}, "UTC")
    assert (move.name, move.key, move.params) == ("send_email", "agenda/7", {"to": "a"})
    assert (move.priority, move.next_run, move.repeat) == (10, NOW, None)


def test_repeat_has_the_time_zone_of_its_job_or_that_of_the_migration() -> None:
    own = JOB | {"repeatInterval": "0 9 * * *", "repeatTimezone": "Asia/Tokyo", "endDate": NOW}
    for job, zone, is_open in ((own, "Asia/Tokyo", False), (own | {"repeatTimezone": None}, "Europe/Berlin", True)):
        repeat = rules.move_of(job, {}, "Europe/Berlin").repeat
        assert repeat is not None
        assert isinstance(repeat.trigger, Cron)
        assert (repeat.trigger.timezone, rules.names_no_zone(job, repeat)) == (zone, is_open)
        assert (repeat.start_time, repeat.end_time) == (NOW, NOW)
