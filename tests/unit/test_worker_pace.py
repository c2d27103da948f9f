"""How many tasks a worker claims for slots that are still taken."""

from __future__ import annotations

import pytest

from mtask.worker.pace import Pace


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
    return pace.ahead


@pytest.mark.parametrize(
    ("ended", "seconds", "claim", "ahead"),
    [
        (100, 0.035, 0.03, 171),  # a hundred at a time, that end at once
        (200, 0.04, 0.1, 1_000),  # four claims under way beside each other
        (1, 1.0, 0.01, 0),  # one slot, runs of a second
        (100, 10.0, 0.02, 0),  # a hundred slots, runs of ten seconds
        (20, 0.5, 0.05, 4),
        (0, 0.5, 0.05, 0),
        (100, 0.5, 9.0, 100),  # no longer than what is claimed ahead waits
        (100, 0.0, 0.01, 0),
    ],
)
def test_twice_as_many_as_end_while_a_claim_is_under_way(ended: int, seconds: float, claim: float, ahead: int) -> None:
    clock = _Clock()
    pace = Pace(clock)
    assert pace.ahead == 0
    for _ in range(30):
        _land(pace, clock, ended, seconds, claim)
    assert pace.ahead == pytest.approx(ahead, abs=1)


def test_it_follows_within_a_few_claims() -> None:
    clock = _Clock()
    pace = Pace(clock)
    for _ in range(30):
        _land(pace, clock, 100, 0.02, 0.04)
    assert pace.ahead == pytest.approx(400, abs=1)
    slower = [_land(pace, clock, 1, 0.2, 0.01) for _ in range(12)]
    assert slower == sorted(slower, reverse=True)
    assert slower[-1] == 0


def test_a_pause_makes_it_begin_anew() -> None:
    clock = _Clock()
    pace = Pace(clock)
    for _ in range(30):
        _land(pace, clock, 100, 0.02, 0.04)
    assert _land(pace, clock, 3, 600.0, 0.01) == 0
    assert _land(pace, clock, 100, 0.02, 0.04) == pytest.approx(400, abs=1)


def test_after_it_was_wrong_it_begins_anew() -> None:
    clock = _Clock()
    pace = Pace(clock)
    for _ in range(30):
        _land(pace, clock, 100, 0.02, 0.04)
    pace.forget()
    assert pace.ahead == 0
    assert _land(pace, clock, 10, 0.02, 0.04) == pytest.approx(40, abs=1)
