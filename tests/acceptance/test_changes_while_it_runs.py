"""What happens to a task while it runs, and what its options do: in the words of the contract."""

from __future__ import annotations

from datetime import timedelta
from itertools import pairwise
from typing import Any

import pytest

from tests.mongo import PATIENCE, eventually
from tests.workers import Stage, end_of, runs_of

BOTH = pytest.mark.parametrize("handler", ["hold", "hold_plain"])


def running(stage: Stage, handler: str, **options: Any) -> str:
    """Start a worker, and a task that runs there until its gate opens."""
    stage.start("A")
    task_id = stage.client.publish(handler, {"gate": stage.gate()}, key="held", **options).task_id
    stage.wait_run(task_id)
    stage.events.wait("start", 1)
    return task_id


@BOTH
def test_canceled_task_ends_at_once_and_nothing_counts(stage: Stage, handler: str) -> None:
    task_id = running(stage, handler)
    asked = stage.client.cancel(handler, "held")
    assert (asked.status, asked.task_state.cancel_requested) == ("RUNNING", True)

    document = stage.wait_status(task_id, "CANCELED")
    assert [run["status"] for run in runs_of(document)] == ["CANCELED"]
    assert document["task_state"]["failed_cnt"] == 0
    assert document["task_state"]["cancel_requested"] is False
    assert "next_preempt_time" not in document["task_state"]
    assert [event.event for event in stage.events.all(task_id=task_id)] == ["start", "cancelled"]
    assert stage.client.retry(handler, "held").status == "INIT"
    stage.open_gate()
    assert [run["status"] for run in runs_of(stage.wait_status(task_id, "SUCCESS"))] == ["CANCELED", "SUCCESS"]


@BOTH
def test_task_removed_by_a_client_ends_at_once_and_writes_nothing(stage: Stage, handler: str) -> None:
    task_id = running(stage, handler)
    assert stage.client.remove(handler, "held")
    eventually(
        lambda: [event.event for event in stage.events.all(task_id=task_id)] == ["start", "cancelled"],
        PATIENCE,
        "the handler's end",
    )
    assert stage.client.count() == 0


def test_task_removed_by_hand_ends_by_itself(stage: Stage) -> None:
    task_id = running(stage, "hold")
    stage.client.tasks.delete_one({"_id": task_id})
    eventually(
        lambda: [event.event for event in stage.events.all(task_id=task_id)] == ["start", "cancelled"],
        PATIENCE,
        "the handler's end",
    )


def test_ping_interval_counts_from_the_next_ping(stage: Stage) -> None:
    task_id = running(stage, "hold", ping_interval=2, worker_timeout=60)
    stage.client.update_option("hold", "held", ping_interval=0.1)

    def lease() -> Any:
        return runs_of(stage.document(task_id))[0]["ping_expire_time"]

    leases = {lease()}
    eventually(lambda: leases.add(lease()) or len(leases) > 12, PATIENCE, "a dozen pings")  # type: ignore[func-returns-value]
    steps = sorted(leases)[4:]
    gaps = sorted(later - earlier for earlier, later in pairwise(steps))
    assert gaps[len(gaps) // 2] < timedelta(milliseconds=1500), "the former interval"
    stage.open_gate()
    stage.wait_status(task_id, "SUCCESS")


@BOTH
def test_run_longer_than_its_limit_is_ended_and_counts_as_failed(stage: Stage, handler: str) -> None:
    stage.start("A")
    options: dict[str, Any] = {"run_timeout": 0.4, "max_retries": 1, "retry_delay": 0}
    task_id = stage.client.publish(handler, {"gate": stage.gate()}, key="held", **options).task_id
    document = stage.wait_status(task_id, "FAIL")
    assert [run["status"] for run in runs_of(document)] == ["FAIL", "FAIL"]
    assert document["task_state"]["failed_cnt"] == 2
    for run in runs_of(document):
        assert "run_timeout_ms (400 ms)" in run["fail_reason"]
        assert end_of(run) - run["claim_time"] >= timedelta(milliseconds=400)


def test_retry_goes_back_uncounted_after_its_delay(stage: Stage) -> None:
    stage.start("A")
    options: dict[str, Any] = {"max_retries": 0}
    task_id = stage.client.publish("retry_until", {"attempt": 3, "delay": 0.3}, key="1", **options).task_id
    document = stage.wait_status(task_id, "SUCCESS")
    runs = runs_of(document)
    assert [(run["status"], run["attempt"]) for run in runs] == [("CANCELED", 1), ("CANCELED", 2), ("SUCCESS", 3)]
    assert document["task_state"]["failed_cnt"] == 0
    for earlier, later in pairwise(runs):
        assert later["claim_time"] - end_of(earlier) >= timedelta(milliseconds=300)


def test_fail_is_final_and_tried_no_more(stage: Stage) -> None:
    stage.start("A")
    task_id = stage.client.publish("fail_for_good", {"reason": "no such account"}, key="1").task_id
    document = stage.wait_status(task_id, "FAIL")
    assert [(run["status"], run["fail_reason"], run["final"]) for run in runs_of(document)] == [
        ("FAIL", "no such account", True)
    ]


def test_on_exception_fail_makes_every_exception_final(stage: Stage) -> None:
    stage.start("A")
    task_id = stage.client.publish("fragile", {}, key="1").task_id
    document = stage.wait_status(task_id, "FAIL")
    assert [(run["status"], run["final"]) for run in runs_of(document)] == [("FAIL", True)]
    assert "ValueError: broken" in runs_of(document)[0]["fail_reason"]


def test_delay_grows_by_the_backoff_factor_up_to_its_limit(stage: Stage) -> None:
    stage.start("A")
    options: dict[str, Any] = {
        "max_retries": 3,
        "retry_delay": 0.2,
        "retry_backoff": 2.0,
        "retry_max_delay": 0.5,
    }
    task_id = stage.client.publish("fail", {"reason": "again"}, key="1", **options).task_id
    runs = runs_of(stage.wait_status(task_id, "FAIL"))
    waits = [(run["retry_time"] - run["fail_time"]) / timedelta(milliseconds=1) for run in runs[:3]]
    for wait, full in zip(waits, (200, 400, 500), strict=True):
        assert full * 0.75 <= wait <= full
    for earlier, later in pairwise(runs):
        assert later["claim_time"] >= earlier["retry_time"]


def test_finished_task_expires_as_long_after_its_end_as_it_says(stage: Stage) -> None:
    stage.start("A")
    kept = stage.client.publish("noop", {"value": 1}, key="kept").task_id
    success = stage.client.publish("noop", {"value": 1}, key="good", retain_success=60).task_id
    failed = stage.client.publish("fail_for_good", {"reason": "bad"}, key="bad", retain_fail=30).task_id
    assert "expire_time" not in stage.wait_status(kept, "SUCCESS")
    for task_id, status, seconds in ((success, "SUCCESS", 60), (failed, "FAIL", 30)):
        document = stage.wait_status(task_id, status)
        assert document["expire_time"] - document["task_state"]["finish_time"] == timedelta(seconds=seconds)
