"""What the benchmarks read from counters: differences of the server's and of processes, for each task."""

from __future__ import annotations

import math
import os
import time
from typing import Any

import pytest

from benchmarks.measuring.counters import NOTHING, Cost, Counters, cost_figures, cpu_of, cpu_parts, ticks_in, total
from benchmarks.report.figures import Target

STATUS: dict[str, Any] = {
    "network": {"numRequests": 1000, "bytesIn": 5_000, "bytesOut": 7_000},
    "metrics": {"queryExecutor": {"scanned": 300, "scannedObjects": 200}},
    "extra_info": {"user_time_us": 1_500_000, "system_time_us": 500_000},
}


def cost(tasks: int = 100, seconds: float = 2.0, cpu: float = 0.01, client: float = 0.002) -> Cost:
    server = Counters(requests=50, bytes_in=1000, bytes_out=3000, keys_examined=200, docs_examined=300, cpu=cpu)
    return Cost(tasks, seconds, server, client)


def test_counters_are_read_from_server_status() -> None:
    assert Counters.of(STATUS) == Counters(1000, 5000, 7000, 300, 200, 2.0)


def test_counter_that_the_server_does_not_tell_is_unknown_and_stays_so() -> None:
    found = Counters.of({"network": {"numRequests": 3}})
    assert found.requests == 3
    assert math.isnan(found.cpu)
    assert math.isnan((found - Counters.of({})).bytes_in)


def test_differences_sums_and_multiples_go_counter_by_counter() -> None:
    before = Counters(10, 100, 1000, 1, 2, 0.5)
    after = Counters(15, 160, 1700, 9, 12, 2.0)
    assert after - before == Counters(5, 60, 700, 8, 10, 1.5)
    assert after - before + before == after
    assert before * 2 == Counters(20, 200, 2000, 2, 4, 1.0)


def test_cost_is_told_for_each_task() -> None:
    found = cost()
    assert found.rate == 50.0
    assert found.round_trips == 0.5
    assert found.bytes == 40.0
    assert found.docs_examined == 3.0
    assert found.server_us == pytest.approx(100.0)
    assert found.client_us == pytest.approx(20.0)


def test_costs_of_parts_add_up_before_they_are_divided() -> None:
    whole = total([cost(100, 1.0, 0.01), cost(300, 3.0, 0.01)])
    assert (whole.tasks, whole.seconds) == (400, 4.0)
    assert whole.rate == 100.0
    assert whole.server_us == pytest.approx(50.0)
    assert total([]) == NOTHING


def test_cost_that_took_no_time_has_no_rate() -> None:
    assert math.isnan(cost(seconds=0.0).rate)


def test_cost_figures_compare_each_run_with_the_raw_one_and_only_throughput_has_the_target() -> None:
    ours, raw = [cost(seconds=4.0), cost(seconds=5.0)], [cost(seconds=2.0), cost(seconds=4.0)]
    rate, *others = cost_figures("drain", ours, raw, Target.at_least(0.6))
    assert rate.name == "drain"
    assert rate.ratio is not None
    assert rate.ratio.values == pytest.approx((0.5, 0.8))
    assert rate.target == Target.at_least(0.6)
    assert [figure.name for figure in others] == [
        "drain: round trips a task",
        "drain: bytes a task",
        "drain: documents examined a task",
        "drain: server CPU a task",
        "drain: client CPU a task",
    ]
    assert all(figure.target is None for figure in others)
    assert len(cost_figures("latency", ours, raw, None, has_rate=False)) == len(others)


def test_cpu_parts_are_means_over_all_tasks_of_all_runs() -> None:
    parts = cpu_parts([cost(100, cpu=0.01, client=0.002), cost(300, cpu=0.01, client=0.002)])
    assert parts == pytest.approx({"server": 50.0, "client": 10.0})
    assert cpu_parts([]) == {}


def test_ticks_are_found_behind_a_process_name_with_blanks_and_brackets() -> None:
    head = "4711 (a (strange) name) S 1 4711 4711 0 -1 4194560 100 200 0 0 "
    assert ticks_in(head + "37 5 900 900 20 0 3 0 123456") == 42


def test_cpu_of_this_process_grows_and_a_process_that_is_gone_counts_nothing() -> None:
    before = cpu_of([os.getpid()])
    end = time.process_time() + 0.05
    while time.process_time() < end:
        pass
    assert cpu_of([os.getpid()]) > before
    assert cpu_of([2**30]) == 0.0
