"""How many tasks a worker claims for slots that are still taken."""

from __future__ import annotations

import pytest

from mtask.worker.pace import MAX_AHEAD, Pace

SLOTS = 100


class _Clock:
    now = 50.0

    def __call__(self) -> float:
        return self.now


def _after(runs: int, run_seconds: float, claim_seconds: float, clock: _Clock) -> Pace:
    """Return the pace after so many runs, one after the other in one slot."""
    pace = Pace(clock)
    pace.claimed(claim_seconds)
    _pass(pace, runs, run_seconds, clock)
    return pace


def _pass(pace: Pace, runs: int, run_seconds: float, clock: _Clock) -> None:
    for _ in range(runs):
        pace.begin()
        clock.now += run_seconds
        pace.end()


@pytest.mark.parametrize(
    ("run_seconds", "claim_seconds", "ahead"),
    [
        (0.0, 0.02, MAX_AHEAD),
        (0.001, 0.02, MAX_AHEAD),
        (0.01, 0.02, 200),
        (0.1, 0.02, 20),
        (1.0, 0.02, 2),
        (10.0, 0.02, 0),
        (0.01, 0.0, 0),
    ],
)
def test_as_many_as_will_end_while_a_claim_is_under_way(run_seconds: float, claim_seconds: float, ahead: int) -> None:
    assert _after(50, run_seconds, claim_seconds, _Clock()).ahead(SLOTS) == pytest.approx(ahead, abs=1)


def test_none_before_enough_is_known() -> None:
    clock = _Clock()
    assert Pace(clock).ahead(SLOTS) == 0
    assert _after(19, 0.001, 0.02, clock).ahead(SLOTS) == 0
    assert _after(20, 0.001, 0.02, clock).ahead(SLOTS) > 0
    assert _after(20, 0.001, 0.02, clock).ahead(0) == 0


def test_runs_that_have_not_ended_count_too() -> None:
    clock = _Clock()
    pace = _after(50, 0.001, 0.02, clock)
    for _ in range(SLOTS):
        pace.begin()
    clock.now += 10.0
    assert pace.ahead(SLOTS) == 0


def test_what_was_long_ago_counts_less() -> None:
    clock = _Clock()
    pace = _after(1_000, 10.0, 0.02, clock)
    _pass(pace, 20_000, 0.001, clock)
    assert pace.ahead(SLOTS) == MAX_AHEAD
    _pass(pace, 20_000, 10.0, clock)
    assert pace.ahead(SLOTS) == 0


def test_after_it_was_wrong_it_begins_anew() -> None:
    clock = _Clock()
    pace = _after(500, 0.001, 0.02, clock)
    pace.forget()
    assert pace.ahead(SLOTS) == 0
    _pass(pace, 20, 0.01, clock)
    assert pace.ahead(SLOTS) == pytest.approx(200, abs=1)
