"""The benchmarks of limits and of the health: what is held of a rate, how late its starts are, and the largest body."""

from __future__ import annotations

import json

import pytest

from benchmarks.__main__ import main
from benchmarks.cases.limits import PARTS, Paced, chosen
from benchmarks.measuring.counters import NOTHING
from benchmarks.measuring.flooding import TASKS, largest_body
from mtask.errors import InvalidInput
from mtask.web.bodies import check_values
from mtask.web.models.publishing import PublishBatch
from mtask.web.settings import WebSettings


def paced(moments: list[float], limit: int) -> Paced:
    return Paced(moments, limit, 1.0, NOTHING)


def test_a_rate_in_bursts_is_held_as_one_in_even_steps_is() -> None:
    in_bursts = paced([5.0] * 4 + [6.0] * 4 + [7.0] * 4, 4)
    in_steps = paced([5.0 + number / 4 for number in range(12)], 4)
    assert in_bursts.rate == in_steps.rate == 4.0
    assert in_bursts.most == in_steps.most == 4
    assert in_bursts.lateness == in_steps.lateness == [0.0] * 8


def test_late_starts_are_told_and_less_is_held() -> None:
    late = paced([5.0, 5.0, 6.25, 6.25, 7.25, 7.5], 2)
    assert late.lateness == [250.0, 250.0, 0.0, 250.0]
    assert late.rate == 4 / 2.5


def test_a_start_too_early_is_one_too_many_in_a_window_that_does_not_hold_its_end() -> None:
    assert paced([5.0, 5.5, 6.0, 6.5], 2).most == 2
    early = paced([5.0, 5.5, 5.75, 6.5], 2)
    assert early.most == 3
    assert early.lateness[0] == -250.0


def test_parts_are_chosen_by_name_and_measured_in_their_order() -> None:
    assert chosen(None) == PARTS
    assert chosen("rescue, rate") == ("rate", "rescue")
    with pytest.raises(InvalidInput, match="there is no part 'speed'"):
        chosen("rate,speed")


def test_a_part_that_is_none_is_bad_input(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["limits", "--only", "speed"]) == 2
    assert "--only" in capsys.readouterr().err


def test_largest_body_is_taken_and_little_larger_ones_are_not() -> None:
    settings = WebSettings()
    largest, body = settings.largest(is_batch=True), largest_body(settings)
    assert 0.98 * largest.size < len(body) <= largest.size
    assert 0.98 * largest.values < check_values(body, largest.values)
    assert len(PublishBatch.model_validate(json.loads(body)).tasks) == TASKS
