from __future__ import annotations

import pytest

from mtask.kernel.document.options import MAX_DURATION_MS, TaskOption
from tests.oracles.rules import retry_delay_ms


def option(delay: int, backoff: float = 1.0, most: int | None = None) -> TaskOption:
    return TaskOption(unexpected_retry_delay_ms=delay, retry_backoff=backoff, retry_max_delay_ms=most)


@pytest.mark.parametrize("failures", [0, 1, 2, 50])
def test_without_backoff_the_delay_is_constant_and_has_no_jitter(failures: int) -> None:
    assert retry_delay_ms(option(10_000), failures, 1.0) == 10_000


def test_without_backoff_the_greatest_delay_still_binds() -> None:
    assert retry_delay_ms(option(10_000, most=500), 1, 0.0) == 500


@pytest.mark.parametrize(
    ("failures", "expected"), [(0, 1000), (1, 1000), (2, 2000), (3, 4000), (6, 32_000), (7, 40_000)]
)
def test_the_delay_grows_with_each_failure_up_to_its_greatest(failures: int, expected: int) -> None:
    assert retry_delay_ms(option(1000, 2.0, 40_000), failures, 0.0) == expected


def test_jitter_takes_away_up_to_a_quarter() -> None:
    assert retry_delay_ms(option(1000, 2.0), 1, 1.0) == 750
    assert retry_delay_ms(option(1000, 2.0), 1, 0.5) == 875


@pytest.mark.parametrize("failures", [65, 10_000, 10**12])
def test_any_number_of_failures_stays_within_ten_years(failures: int) -> None:
    assert retry_delay_ms(option(MAX_DURATION_MS, 1000), failures, 0.0) == MAX_DURATION_MS


def test_no_delay_stays_no_delay() -> None:
    assert retry_delay_ms(option(0, 1000), 64, 0.0) == 0
    assert retry_delay_ms(option(1000, 3.0, 0), 5, 0.0) == 0
