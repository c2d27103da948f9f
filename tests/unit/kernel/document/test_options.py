from __future__ import annotations

import math
from datetime import timedelta
from typing import Any, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mtask.arguments.publish import TaskSpec
from mtask.errors import InvalidOption, UnknownOption
from mtask.kernel.document.options import (
    CODE_NAMES,
    DEFAULT_OPTION,
    MAX_DURATION_MS,
    MAX_WORKERS_PER_TASK,
    MIN_PING_INTERVAL_MS,
    OPTION_NAMES,
    STORED_OPTIONS,
    TaskOption,
    TaskOptions,
    build_option,
    ping_seconds,
)

_LEAST, _MOST = 0, MAX_DURATION_MS
#: Name, least and greatest value.
RANGES: list[tuple[str, int, int]] = [
    ("priority", -1_000_000_000, 1_000_000_000),
    ("concurrent_worker_cnt", 1, MAX_WORKERS_PER_TASK),
    ("ping_interval_ms", MIN_PING_INTERVAL_MS, _MOST - 1),
    ("worker_timeout_ms", 2, _MOST),
    ("max_unexpected_retries", -1, 1_000_000),
    ("unexpected_retry_delay_ms", _LEAST, _MOST),
    ("retry_backoff", 1, 1000),
    ("retry_max_delay_ms", _LEAST, _MOST),
    ("run_timeout_ms", 1, _MOST),
    ("retain_success_ms", _LEAST, _MOST),
    ("retain_fail_ms", _LEAST, _MOST),
]
DURATIONS = [name for name in OPTION_NAMES if name.endswith("_ms")]
_COMPANIONS = {"ping_interval_ms": {"worker_timeout_ms": _MOST}, "worker_timeout_ms": {"ping_interval_ms": 1}}


def built(name: str, value: Any) -> Any:
    return getattr(build_option(_COMPANIONS.get(name, {}), {name: value}), name)


def test_the_defaults_are_the_documented_ones() -> None:
    assert DEFAULT_OPTION.model_dump() == {
        "priority": 0,
        "concurrent_worker_cnt": 1,
        "ping_interval_ms": 30_000,
        "worker_timeout_ms": 60_000,
        "specific_worker_ids": [],
        "max_unexpected_retries": 3,
        "unexpected_retry_delay_ms": 10_000,
        "retry_backoff": 1.0,
        "retry_max_delay_ms": None,
        "retry_scope": "task",
        "run_timeout_ms": None,
        "retain_success_ms": None,
        "retain_fail_ms": None,
        "limit_key": None,
    }


def test_default_options_are_sent_as_the_others_are_stored() -> None:
    sent = dict(TaskSpec("task").prepare().task_option)
    assert sent == TaskSpec("task", priority=0).prepare().task_option == DEFAULT_OPTION.stored()
    assert list(sent) == list(STORED_OPTIONS)
    assert TaskSpec("task", limit_key="a").prepare().task_option == {**sent, "limit_key": "a"}


def test_keyword_arguments_and_document_have_the_same_options() -> None:
    assert list(TaskOption.model_fields) == list(OPTION_NAMES)
    assert list(get_type_hints(TaskOptions)) == [CODE_NAMES[name] for name in OPTION_NAMES]


def test_every_numeric_option_has_its_edges_tested() -> None:
    assert {name for name, _, _ in RANGES} | {"specific_worker_ids", "retry_scope", "limit_key"} == set(OPTION_NAMES)


@pytest.mark.parametrize(("name", "least", "most"), RANGES)
def test_both_edges_of_a_range_belong_to_it(name: str, least: int, most: int) -> None:
    assert built(name, least) == least
    assert built(name, most) == most


@pytest.mark.parametrize(("name", "least", "most"), RANGES)
def test_beyond_an_edge_is_an_error_that_names_the_option(name: str, least: int, most: int) -> None:
    for value in (least - 1, most + 1):
        with pytest.raises(InvalidOption) as caught:
            built(name, value)
        # A lease that its ping outlasts is told of under the lease's name.
        assert caught.value.option in (name, "worker_timeout_ms")
        assert str(value) in str(caught.value)


@pytest.mark.parametrize(("name", "least", "most"), RANGES)
@pytest.mark.parametrize("value", ["5", b"5", True, math.nan, math.inf, -math.inf, [5], {}])
def test_what_is_no_number_is_an_error_that_names_the_option(name: str, least: int, most: int, value: Any) -> None:
    with pytest.raises(InvalidOption) as caught:
        built(name, value)
    assert caught.value.option == name


@pytest.mark.parametrize("name", [name for name, _, _ in RANGES if name != "retry_backoff"])
def test_a_whole_double_is_a_whole_number_and_a_broken_one_is_refused(name: str) -> None:
    value = built(name, 107.0)
    assert value == 107
    assert type(value) is int
    with pytest.raises(InvalidOption):
        built(name, 107.5)


@pytest.mark.parametrize("name", DURATIONS)
def test_a_timedelta_is_stored_as_whole_milliseconds(name: str) -> None:
    assert built(name, timedelta(seconds=1.5)) == 1500
    assert built(name, timedelta(milliseconds=106.6)) == 107


@pytest.mark.parametrize("name", DURATIONS)
def test_a_negative_timedelta_is_refused(name: str) -> None:
    with pytest.raises(InvalidOption):
        built(name, timedelta(seconds=-1))


@given(st.timedeltas(timedelta(0), timedelta(milliseconds=MAX_DURATION_MS)))
def test_a_timedelta_is_rounded_by_less_than_a_millisecond(duration: timedelta) -> None:
    stored = built("unexpected_retry_delay_ms", duration)
    assert abs(timedelta(milliseconds=stored) - duration) < timedelta(milliseconds=1)


@pytest.mark.parametrize("name", ["retry_max_delay_ms", "run_timeout_ms", "retain_success_ms", "retain_fail_ms"])
def test_none_stands_where_the_contract_allows_it(name: str) -> None:
    assert built(name, None) is None


@pytest.mark.parametrize("name", ["priority", "worker_timeout_ms", "retry_scope", "specific_worker_ids"])
def test_none_is_refused_elsewhere(name: str) -> None:
    with pytest.raises(InvalidOption):
        built(name, None)


@pytest.mark.parametrize(("lease", "ping"), [(1000, 1000), (999, 1000)])
def test_a_lease_that_does_not_outlast_its_ping_is_refused(lease: int, ping: int) -> None:
    with pytest.raises(InvalidOption, match=r"worker_timeout_ms \(\d+\) must exceed ping_interval_ms \(1000\)"):
        build_option({"worker_timeout_ms": lease, "ping_interval_ms": ping})


def test_pings_in_a_storm_are_refused_and_read_where_they_are_stored() -> None:
    stored = TaskOption(ping_interval_ms=1, worker_timeout_ms=60_000).stored()
    with pytest.raises(InvalidOption, match=r"use at least 100 \(got 1\): each ping is a write"):
        build_option(stored)
    changed = build_option(stored, {"priority": 5})
    assert (changed.ping_interval_ms, changed.priority) == (1, 5)


@pytest.mark.parametrize(
    ("interval_ms", "lease_ms", "expected"),
    [(1, 60_000, 0.1), (100, 60_000, 0.1), (30_000, 60_000, 30.0), (1, 150, 0.05), (140, 150, 0.14)],
)
def test_pings_are_sent_in_time_and_not_in_a_storm(interval_ms: int, lease_ms: int, expected: float) -> None:
    assert ping_seconds(interval_ms, lease_ms) == pytest.approx(expected)


def test_a_lease_longer_than_its_ping_by_a_millisecond_is_taken() -> None:
    assert build_option({"worker_timeout_ms": 1001, "ping_interval_ms": 1000}).worker_timeout_ms == 1001


def test_retry_scope_is_one_of_two_words() -> None:
    assert built("retry_scope", "worker") == "worker"
    with pytest.raises(InvalidOption, match="'task' or 'worker'"):
        built("retry_scope", "everyone")


@pytest.mark.parametrize(
    "worker_ids", ["w1", ["w1", "w1"], [""], ["a,b"], [1], ["x" * 257], [f"w{n}" for n in range(1001)]]
)
def test_worker_ids_that_are_no_list_of_different_ids_are_refused(worker_ids: Any) -> None:
    with pytest.raises(InvalidOption) as caught:
        built("specific_worker_ids", worker_ids)
    assert caught.value.option == "specific_worker_ids"


def test_a_thousand_workers_may_be_named() -> None:
    assert len(built("specific_worker_ids", [f"w{n}" for n in range(MAX_WORKERS_PER_TASK)])) == MAX_WORKERS_PER_TASK


def test_more_successes_than_named_workers_are_refused() -> None:
    with pytest.raises(InvalidOption, match="3 workers must succeed, but specific_worker_ids allows only 2"):
        build_option({"concurrent_worker_cnt": 3, "specific_worker_ids": ["a", "b"]})
    assert build_option({"concurrent_worker_cnt": 2, "specific_worker_ids": ["a", "b"]}).concurrent_worker_cnt == 2


@pytest.mark.parametrize(
    ("given_name", "nearest"),
    [
        ("prioritty", "priority"),
        ("max_retries", "max_unexpected_retries"),
        ("worker_timeout", "worker_timeout_ms"),
        ("retry_delay_ms", "unexpected_retry_delay_ms"),
        ("specific_workers", "specific_worker_ids"),
    ],
)
def test_an_unknown_option_names_the_nearest_one(given_name: str, nearest: str) -> None:
    with pytest.raises(UnknownOption, match=f"did you mean '{nearest}'") as caught:
        build_option({given_name: 1})
    assert caught.value.nearest == nearest


def test_an_option_like_no_other_gets_the_whole_list() -> None:
    with pytest.raises(UnknownOption, match="the options are priority, ") as caught:
        build_option({"zzz": 1})
    assert caught.value.nearest is None
    assert caught.value.known == OPTION_NAMES


def test_the_last_layer_wins() -> None:
    option = build_option({"priority": 1, "retry_backoff": 2}, {}, {"priority": 5})
    assert (option.priority, option.retry_backoff) == (5, 2.0)


def test_layers_are_checked_together_not_one_by_one() -> None:
    assert build_option({"ping_interval_ms": 60_000, "worker_timeout_ms": 90_000}, {"ping_interval_ms": 80_000})


def test_options_cannot_be_changed_in_place() -> None:
    with pytest.raises(ValueError, match="frozen"):
        DEFAULT_OPTION.priority = 1  # type: ignore[misc]
