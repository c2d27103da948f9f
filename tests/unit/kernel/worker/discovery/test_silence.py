"""Which silent workers count as dead."""

from __future__ import annotations

from mtask.kernel.worker.discovery.reaper import SILENCE, Silence

_LOOK = SILENCE / 2


def test_worker_that_is_silent_for_long_counts_as_dead_and_one_that_beats_meanwhile_does_not() -> None:
    silence = Silence()
    assert silence.dead_among({"dead", "late"}, 0.0) == set()
    assert silence.dead_among({"dead"}, _LOOK) == set()
    assert silence.dead_among({"dead", "late"}, 2 * _LOOK) == {"dead"}


def test_time_in_which_nobody_could_look_does_not_count() -> None:
    silence = Silence()
    assert silence.dead_among({"one"}, 0.0) == set()
    after_outage = 10 * SILENCE
    assert silence.dead_among({"one"}, after_outage) == set(), "no worker could beat"
    assert silence.dead_among({"one"}, after_outage + _LOOK) == set()
    assert silence.dead_among({"one"}, after_outage + SILENCE) == {"one"}
