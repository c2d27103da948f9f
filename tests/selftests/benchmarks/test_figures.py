"""What the benchmarks make of their measurements: medians, spreads, ratios run by run, and targets."""

from __future__ import annotations

import math

import pytest

from benchmarks.report.figures import Result, Spread, Target, compared, figure, quantile, ratio_by_run, turns

NAN = math.nan


def test_spread_tells_median_extremes_and_quartiles() -> None:
    spread = Spread.of([9.0, 1.0, 3.0, 5.0, 7.0])
    assert (spread.median, spread.low, spread.high) == (5.0, 1.0, 9.0)
    assert (spread.first_quartile, spread.third_quartile) == (3.0, 7.0)


def test_median_of_an_even_number_lies_between_the_two_in_the_middle() -> None:
    assert Spread.of([4.0, 1.0, 2.0, 100.0]).median == 3.0


def test_one_run_has_no_spread() -> None:
    spread = Spread.of([2.5])
    assert {spread.median, spread.low, spread.high, spread.first_quartile, spread.third_quartile} == {2.5}


def test_what_was_not_measured_is_left_out_of_the_spread() -> None:
    spread = Spread.of([NAN, 2.0, NAN, 4.0])
    assert spread.values == (2.0, 4.0)
    assert spread.median == 3.0


def test_spread_of_nothing_is_unknown_and_null_in_json() -> None:
    spread = Spread.of([NAN])
    assert not spread.is_known
    assert spread.document() == {
        "median": None,
        "min": None,
        "max": None,
        "first_quartile": None,
        "third_quartile": None,
        "values": [],
    }


@pytest.mark.parametrize(("share", "expected"), [(0.0, 10.0), (0.5, 25.0), (0.75, 32.5), (1.0, 40.0)])
def test_quantile_lies_between_two_values_by_interpolation(share: float, expected: float) -> None:
    assert quantile([40.0, 10.0, 30.0, 20.0], share) == pytest.approx(expected)


def test_p99_of_a_hundred_equal_values_and_one_late_one_is_not_the_late_one() -> None:
    assert quantile([1.0] * 100 + [900.0], 0.99) == 1.0
    assert math.isnan(quantile([], 0.5))


def test_ratio_is_taken_run_by_run_so_that_a_slow_run_of_both_does_not_show() -> None:
    found = compared("drain", "tasks/s", [60.0, 6.0, 600.0], [100.0, 10.0, 1000.0])
    assert found.ratio is not None
    assert (found.ratio.low, found.ratio.median, found.ratio.high) == pytest.approx((0.6, 0.6, 0.6))
    # The ratio of the medians would say the same here; in this one it would not.
    swapped = compared("drain", "tasks/s", [60.0, 60.0, 6.0], [100.0, 10.0, 10.0])
    assert swapped.ratio is not None
    assert swapped.ratio.values == pytest.approx((0.6, 6.0, 0.6))


def test_ratio_to_nothing_is_unknown() -> None:
    first, second, third = ratio_by_run([1.0, 1.0, 3.0], [0.0, NAN, 2.0])
    assert math.isnan(first)
    assert math.isnan(second)
    assert third == 1.5


def test_ratio_wants_both_sides_of_every_run() -> None:
    with pytest.raises(ValueError, match="shorter"):
        ratio_by_run([1.0, 2.0], [1.0])


def test_each_side_goes_first_equally_often() -> None:
    orders = [turns(["raw", "async", "plain"], run) for run in range(6)]
    assert [order[0] for order in orders] == ["raw", "async", "plain"] * 2
    assert all(sorted(order) == ["async", "plain", "raw"] for order in orders)
    assert orders[1] == ["async", "plain", "raw"]


def test_target_says_its_bound_and_what_it_is_a_bound_of() -> None:
    assert str(Target.at_least(0.6)) == "≥ 0.6 x"
    assert str(Target.at_most(5.0, "value", "%")) == "≤ 5 %"
    assert str(Target.at_most(3.0, "value")) == "≤ 3"


def test_figure_in_json_has_both_sides_ratio_and_target() -> None:
    found = compared("drain", "tasks/s", [6.0], [10.0], Target.at_least(0.6), against_name="empty").document()
    assert found["name"] == "drain"
    assert found["measured"]["median"] == 6.0
    assert found["against"]["name"] == "empty"
    assert found["against"]["median"] == 10.0
    assert found["ratio"]["values"] == [0.6]
    assert found["target"] == "≥ 0.6 x"


def test_figure_that_stands_for_itself_is_compared_with_nothing() -> None:
    found = figure("lost", "%", [1.0, 2.0]).document()
    assert found["against"] is None
    assert found["ratio"] is None
    assert found["target"] is None


def test_result_in_json_holds_what_was_measured_and_how() -> None:
    result = Result(
        "drain",
        "one worker",
        [figure("lost", "%", [1.0])],
        {"tasks": 500},
        samples={"raw": [1.23456, NAN]},
        cpu={"raw": {"server": 80.0, "client": NAN}},
        notes=["a note"],
    )
    assert result.document() == {
        "benchmark": "drain",
        "about": "one worker",
        "setting": {"tasks": 500},
        "figures": [result.figures[0].document()],
        "cpu_us_per_task": {"raw": {"server": 80.0, "client": None}},
        "samples_ms": {"raw": [1.235]},
        "notes": ["a note"],
    }
