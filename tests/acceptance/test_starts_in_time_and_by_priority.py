"""Never earlier than start_time and at once after it; the highest priority first."""

from __future__ import annotations

from datetime import timedelta

import pytest

from tests.acceptance.conftest import Report
from tests.workers import Stage, milliseconds, runs_of

AHEAD = timedelta(seconds=3)
#: Far more than a quiet machine shows, and less than the time between two scans.
GENEROUS = timedelta(seconds=3)


def test_task_with_a_start_time_ahead_starts_never_earlier_and_soon_after(stage: Stage, report: Report) -> None:
    stage.start("A")
    started = stage.server_now() + AHEAD
    ahead = [
        stage.client.publish("noop", key="by-start-time", start_time=started),
        stage.client.publish("noop", key="by-delay", delay=AHEAD),
        stage.client.publish("noop", key="moved", start_time=started + timedelta(hours=1)),
    ]
    stage.client.publish("noop", key="moved", start_time=started, if_exists="update")

    for published in ahead:
        document = stage.wait_status(published.task_id, "SUCCESS")
        begin = document["task_state"]["start_time"]
        late = runs_of(document)[0]["claim_time"] - begin
        assert timedelta(0) <= late < GENEROUS
        event = stage.events.starts(published.task_id)[0]
        assert event.time >= begin, "the handler itself did not start earlier, by this machine's clock"
        report(f"claim after start_time, {published.task_id}, ms", milliseconds(late))
    assert len(stage.events.starts()) == len(ahead)


def test_start_time_far_ahead_is_met_by_a_worker_that_found_it_at_its_own_start(stage: Stage, report: Report) -> None:
    published = stage.client.publish("noop", key="waiting", delay=AHEAD)
    worker = stage.wait_running(stage.launch("A"))

    document = stage.wait_status(published.task_id, "SUCCESS")
    (run,), due = runs_of(document), document["task_state"]["start_time"]
    assert run["claim_time"] >= due
    late = run["claim_time"] - max(due, worker["started_time"])  # it may have taken its time to start
    assert late < GENEROUS
    report("claim after start_time, found by the first scan, ms", milliseconds(late))


@pytest.mark.parametrize("published_first", [1, 9], ids=["lowest-published-first", "highest-published-first"])
def test_one_slot_takes_the_highest_priority_first(stage: Stage, published_first: int) -> None:
    stage.start("A", "--concurrency", "1")
    occupying = stage.client.publish("hold", {"gate": stage.gate()}, key="occupies-the-slot")
    stage.wait_run(occupying.task_id, "A")
    for priority in sorted([1, 5, 9], reverse=published_first == 9):
        stage.client.publish("noop", key=f"priority-{priority}", priority=priority)
    stage.wait_heard("A")

    stage.open_gate()
    tasks = [stage.wait_status(f"noop:priority-{priority}", "SUCCESS") for priority in (9, 5, 1)]

    claims = [runs_of(document)[0]["claim_time"] for document in tasks]
    assert claims == sorted(claims)
    started = [event.task_id for event in stage.events.starts()]
    assert started == [occupying.task_id, "noop:priority-9", "noop:priority-5", "noop:priority-1"]


def test_one_slot_takes_what_waited_for_the_worker_highest_priority_first(stage: Stage) -> None:
    for priority in (1, 5, 9):
        stage.client.publish("noop", key=f"priority-{priority}", priority=priority)

    stage.start("A", "--concurrency", "1")
    for priority in (1, 5, 9):
        stage.wait_status(f"noop:priority-{priority}", "SUCCESS")

    started = [event.task_id for event in stage.events.starts()]
    assert started == ["noop:priority-9", "noop:priority-5", "noop:priority-1"]
