"""The server's clock as a worker knows it: each reading is two bounds."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta

import pytest

from mtask.kernel.worker.process.time import ServerClock

NOON = datetime(2030, 1, 1, 12, tzinfo=UTC)


def at(seconds: float) -> datetime:
    return NOON + timedelta(seconds=seconds)


def test_slow_answer_leaves_the_estimate_late_and_never_early() -> None:
    clock = ServerClock(at(0), sent=100.0, received=100.5)
    assert clock.monotonic_of(at(10)) == pytest.approx(110.5)


def test_quick_answer_mends_what_a_slow_one_told() -> None:
    clock = ServerClock(at(0), sent=100.0, received=100.5)
    clock.observe(at(1), sent=101.0, received=101.002)
    assert clock.monotonic_of(at(10)) == pytest.approx(110.002)


def test_slow_answer_spoils_nothing_that_a_quick_one_has_told() -> None:
    clock = ServerClock(at(0), sent=100.0, received=100.002)
    clock.observe(at(1), sent=100.9, received=101.6)
    assert clock.monotonic_of(at(10)) == pytest.approx(110.002)


@pytest.mark.parametrize("step", [-300.0, -0.2, 0.2, 300.0])
def test_step_of_the_servers_clock_is_followed_to_within_the_reading(step: float) -> None:
    clock = ServerClock(at(0), sent=100.0, received=100.002)
    clock.observe(at(1 + step), sent=100.999, received=101.002)
    assert clock.monotonic_of(at(10 + step)) == pytest.approx(110.0, abs=0.003)


def test_latest_time_is_never_before_that_of_the_server_and_follows_it_closely() -> None:
    clock = ServerClock(at(0), sent=100.0, received=100.5)  # the server may have read its clock at 100.0
    assert clock.latest(110.0) == pytest.approx(at(10.001).timestamp())
    clock.observe(at(1), sent=100.999, received=101.4)  # it was at 100.999 or later
    assert clock.latest(110.0) == pytest.approx(at(10.001).timestamp())
    clock.observe(at(2), sent=102.3, received=102.4)  # the first reading was 0.3 s later than it might have been
    assert clock.latest(110.0) == pytest.approx(at(9.701).timestamp())


def test_latest_time_follows_a_clock_that_was_set_forward() -> None:
    clock = ServerClock(at(0), sent=100.0, received=100.002)
    for later in (1, 12, 23):
        clock.observe(at(later + 0.2), sent=100.0 + later, received=100.1 + later)
        assert clock.latest(100.0 + later) >= at(later + 0.1).timestamp()
    assert clock.latest(130.0) == pytest.approx(at(30.201).timestamp())


def test_time_without_a_time_zone_is_in_utc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "Pacific/Auckland")
    time.tzset()
    try:
        clock = ServerClock(at(0).replace(tzinfo=None), sent=100.0, received=100.5)
        assert clock.monotonic_of(at(10).replace(tzinfo=None)) == clock.monotonic_of(at(10)) == pytest.approx(110.5)
    finally:
        monkeypatch.undo()
        time.tzset()
