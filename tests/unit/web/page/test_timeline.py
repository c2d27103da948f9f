"""The timeline of a task: waits and runs as bars on one axis of time."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from mtask.kernel.document.task import Task
from mtask.web.page.task import MOST_RUNS, WIDTH, timeline
from tests import build

BEGIN = datetime(2030, 1, 1, tzinfo=UTC)


def at(seconds: float) -> datetime:
    return BEGIN + timedelta(seconds=seconds)


def run(attempt: int, status: str, claimed: float, lease: float, **more: Any) -> dict[str, Any]:
    return build.run(status, at(claimed), at(lease), attempt, worker_id=f"w{attempt}", **more)


def task(*runs: dict[str, Any], **state: Any) -> Task:
    return Task.model_validate(build.task("t:k", *runs, time=BEGIN, state=state))


def test_preempted_run_ends_where_its_lease_lapsed_and_the_next_one_began() -> None:
    lapsed = run(1, "TIMEOUT", 10, 30)
    done = run(2, "SUCCESS", 40, 90, success_time=at(100))
    made = timeline(task(lapsed, done, status="SUCCESS", finish_time=at(100)), at(500))
    assert made.span == timedelta(seconds=100)
    whole, first, second = made.lanes
    assert [(bar.kind, bar.x, bar.width) for bar in whole.bars] == [
        ("waits", 0, 100), ("held", 100, 200), ("waits", 300, 100), ("held", 400, 600),
    ]  # fmt: skip
    assert [(bar.kind, bar.x, bar.width) for bar in first.bars] == [("TIMEOUT", 100, 200)]
    assert [(mark.kind, mark.x) for mark in first.marks] == [("lapsed", 300)]
    assert [(bar.kind, bar.x, bar.width) for bar in second.bars] == [("SUCCESS", 400, 600)]
    assert (made.ticks[0], made.ticks[-1]) == (BEGIN, at(100))


def test_running_task_shows_the_rest_of_its_lease() -> None:
    made = timeline(task(run(1, "RUNNING", 0, 100), status="RUNNING", next_preempt_time=at(100)), at(50))
    assert [(bar.kind, bar.x, bar.width) for bar in made.lanes[1].bars] == [("RUNNING", 0, 500), ("lease", 500, 500)]


def test_delay_of_a_retry_is_no_wait_for_a_worker() -> None:
    failed = run(1, "FAIL", 0, 60, fail_time=at(10), fail_reason="x", retry_time=at(50))
    made = timeline(task(failed, failed_cnt=1, next_preempt_time=at(50)), at(60))
    assert [bar.kind for bar in made.lanes[0].bars] == ["held", "early", "waits"]


def test_start_far_ahead_does_not_squeeze_what_has_happened() -> None:
    made = timeline(task(start_time=at(1e6), next_preempt_time=at(1e6)), at(100))
    assert made.span == timedelta(seconds=200)
    assert [(bar.kind, bar.width) for bar in made.lanes[0].bars] == [("early", 500)]


def test_only_the_newest_runs_are_drawn_and_all_bars_lie_within_the_axis() -> None:
    runs = [run(n, "FAIL", n, n + 60, fail_time=at(n + 0.001)) for n in range(1, 31)]
    made = timeline(task(*runs, status="FAIL", finish_time=at(31)), at(99))
    assert (len(made.lanes), made.left_out) == (MOST_RUNS + 1, 30 - MOST_RUNS)
    for lane in made.lanes:
        for bar in lane.bars:
            assert 0 <= bar.x <= bar.x + bar.width <= WIDTH
            assert bar.width > 0
