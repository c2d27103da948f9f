"""How many tasks a worker claims for slots that are still taken."""

from __future__ import annotations

import pytest

from mtask.kernel.worker.running.slots import Pace

SLOTS = 100


class _Clock:
    now = 50.0

    def __call__(self) -> float:
        return self.now


def _land(pace: Pace, clock: _Clock, ended: int, seconds: float, claim: float) -> int:
    """Let a claim land after so many seconds in which so many runs ended; return how many may be claimed ahead."""
    for _ in range(ended):
        pace.ended()
    clock.now += seconds
    pace.claimed(claim)
    return pace.ahead(SLOTS)


def _quick(pace: Pace, clock: _Clock) -> int:
    """Let many claims land beside quick handlers."""
    return [_land(pace, clock, 100, 0.02, 0.04) for _ in range(100)][-1]


@pytest.mark.parametrize(
    ("ended", "seconds", "claim", "ahead"),
    [
        (100, 0.035, 0.03, 685),  # a hundred at a time, that end at once
        (200, 0.04, 0.1, 1_000),  # four claims under way beside each other
        (200, 0.02, 0.1, 1_000),  # ten times the slots at most
        (1, 0.9, 0.01, 0),  # one slot, runs of a second
        (20, 0.5, 0.02, 6),
        (20, 0.5, 0.05, 10),  # eight claims take longer than a quarter of a second
        (0, 0.5, 0.05, 0),
        (100, 0.5, 9.0, 50),  # claims that take long: no more than ends within a quarter of a second
        (100, 0.0, 0.01, 0),
    ],
)
def test_as_many_as_end_during_eight_claims(ended: int, seconds: float, claim: float, ahead: int) -> None:
    clock = _Clock()
    pace = Pace(clock)
    assert pace.ahead(SLOTS) == 0
    for _ in range(100):
        _land(pace, clock, ended, seconds, claim)
    assert pace.ahead(SLOTS) == pytest.approx(ahead, abs=1)


def test_few_slots_hold_little() -> None:
    clock = _Clock()
    pace = Pace(clock)
    assert _quick(pace, clock) == 1_000
    assert (pace.ahead(1), pace.ahead(0)) == (10, 0)


def test_many_long_runs_that_end_together_are_not_quick_ones() -> None:
    clock = _Clock()
    pace = Pace(clock)
    _land(pace, clock, 0, 0.008, 0.008)
    for _ in range(5):
        assert _land(pace, clock, 30, 10.0, 0.008) <= 2
        assert _land(pace, clock, 40, 0.008, 0.008) <= 5
        assert _land(pace, clock, 30, 0.008, 0.008) <= 7


def test_it_follows_within_a_second() -> None:
    clock = _Clock()
    pace = Pace(clock)
    _quick(pace, clock)
    slower = [_land(pace, clock, 1, 0.2, 0.01) for _ in range(5)]
    assert slower == sorted(slower, reverse=True)
    assert slower[-1] <= 6


def test_after_a_pause_it_is_none_until_it_is_known_again() -> None:
    clock = _Clock()
    pace = Pace(clock)
    _quick(pace, clock)
    clock.now += 600.0
    assert pace.ahead(SLOTS) == 0
    assert _land(pace, clock, 0, 0.01, 0.04) <= 5
    again = [_land(pace, clock, 100, 0.02, 0.04) for _ in range(40)]
    assert again == sorted(again)
    assert again[-1] > 300


@pytest.mark.parametrize(("idle", "ahead"), [(0.0, 400), (0.4, 245), (0.9, 205)])
def test_time_without_runs_does_not_count_but_what_has_ended_is_forgotten(idle: float, ahead: int) -> None:
    clock = _Clock()
    pace = Pace(clock)
    for _ in range(100):
        for _ in range(50):
            pace.ended()
        clock.now += 0.01
        pace.rests()
        clock.now += idle
        _land(pace, clock, 0, 0.01, 0.01)
    assert pace.ahead(SLOTS) == pytest.approx(ahead, abs=1)


def test_first_claims_of_a_burst_tell_its_pace_whatever_came_before_the_rest() -> None:
    clock = _Clock()
    for earlier in (0, 1, 30):
        pace = Pace(clock)
        for _ in range(earlier):
            _land(pace, clock, 100, 0.02, 0.01)
        for _ in range(100):
            pace.ended()
        pace.rests()
        clock.now += 60.0
        assert _land(pace, clock, 0, 0.01, 0.01) == 0
        assert _land(pace, clock, 100, 0.01, 0.01) == 4 * 100


def test_few_quick_runs_prove_little() -> None:
    clock = _Clock()
    pace = Pace(clock)
    for _ in range(100):  # ten a second, each of a millisecond
        _land(pace, clock, 0, 0.004, 0.004)
        pace.ended()
        clock.now += 0.001
        pace.rests()
        clock.now += 0.095
    assert 0 < pace.ahead(SLOTS) <= 12


def test_runs_of_the_last_second_count_in_full_where_they_took_long() -> None:
    clock = _Clock()
    pace = Pace(clock)
    _land(pace, clock, 0, 0.01, 0.01)
    for _ in range(100):
        pace.ended()
    clock.now += 30.0
    pace.rests()
    assert _land(pace, clock, 0, 0.01, 0.01) <= 100 * 0.08


def test_after_it_was_wrong_it_begins_anew() -> None:
    clock = _Clock()
    pace = Pace(clock)
    _quick(pace, clock)
    pace.forget()
    assert pace.ahead(SLOTS) == 0
    assert _land(pace, clock, 10, 0.02, 0.04) == 4 * 10


def test_groups_are_small_where_documents_are_large_and_grow_again_afterwards() -> None:
    pace = Pace()
    assert pace.within_bytes(200) == 200  # nothing is known yet
    pace.read(20, 20_000_000)
    assert pace.within_bytes(200) == 8
    assert pace.within_bytes(0) == 0
    pace.read(1, 16_000_000)
    assert pace.within_bytes(200) == 1
    for _ in range(60):
        pace.read(200, 200_000)
    assert pace.within_bytes(200) == 200


def test_few_tasks_are_claimed_ahead_where_documents_are_large() -> None:
    now = 0.0
    pace = Pace(lambda: now)
    for _ in range(10):
        now += 0.1
        for _ in range(500):
            pace.ended()
        pace.claimed(0.1)
    assert pace.ahead(100) > 8
    pace.read(10, 10_000_000)
    assert pace.ahead(100) == 8
