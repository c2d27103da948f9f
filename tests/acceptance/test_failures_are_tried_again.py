"""What fails is tried again as often as it may be, after its delay, and then no more."""

from __future__ import annotations

from datetime import timedelta
from itertools import pairwise
from typing import Any

import pytest

from tests.acceptance.conftest import Report
from tests.workers import Stage, end_of, milliseconds, runs_of

DELAY = timedelta(seconds=2)
SHORT: dict[str, Any] = {"ping_interval": 0.3, "worker_timeout": 2, "retry_delay": 0}


def test_always_failing_task_is_tried_four_times_two_seconds_apart_then_fails_and_runs_no_more(
    stage: Stage, report: Report
) -> None:
    stage.start_all("AB")
    published = stage.client.publish("fail", {"reason": "no luck"}, key="always", max_retries=3, retry_delay=DELAY)
    document = stage.wait_status(published.task_id, "FAIL")

    runs = runs_of(document)
    assert [run["status"] for run in runs] == ["FAIL"] * 4
    assert [run["attempt"] for run in runs] == [1, 2, 3, 4]
    assert all("RuntimeError: no luck" in run["fail_reason"] for run in runs)
    gaps = [later["claim_time"] - end_of(earlier) for earlier, later in pairwise(runs)]
    assert min(gaps) >= DELAY
    report("claim after the retry delay, slowest of 3, ms", milliseconds(max(gaps) - DELAY))
    assert document["task_state"]["failed_cnt"] == 4
    assert document["task_state"]["finish_time"] == end_of(runs[-1])
    assert "next_preempt_time" not in document["task_state"]

    stage.start("C")  # nor does one that comes new find it
    for worker_id in "ABC":
        sentinel = stage.client.publish("noop", key=worker_id, specific_worker_ids=[worker_id])
        stage.wait_status(sentinel.task_id, "SUCCESS")
    assert stage.document(published.task_id) == document
    assert len(stage.events.starts(published.task_id)) == 4


def test_task_that_kills_its_process_each_time_ends_as_fail_at_the_limit(stage: Stage, report: Report) -> None:
    supervisor = stage.launch("A", "--processes", "2", "--concurrency", "5")
    published = stage.client.publish("die", key="deadly", max_retries=2, **SHORT)
    harmless = [stage.client.publish("sleep", {"seconds": 0.05}, key=f"{n}", **SHORT).task_id for n in range(20)]

    document = stage.wait_status(published.task_id, "FAIL")
    runs = runs_of(document)
    assert [run["status"] for run in runs] == ["TIMEOUT"] * 3
    for earlier, later in pairwise(runs):
        assert later["claim_time"] >= earlier["ping_expire_time"], "never before the lease lapsed"
    assert document["task_state"]["failed_cnt"] == 3
    assert "next_preempt_time" not in document["task_state"]
    assert len({event.pid for event in stage.events.starts(published.task_id)}) == 3, "three processes died of it"
    settled = document["task_state"]["finish_time"] - runs[-1]["ping_expire_time"]
    assert settled >= timedelta(0)
    report("FAIL after the last lapse, ms", milliseconds(settled))

    for task_id in harmless:  # a crash of its process may have cost them a try, and no more
        assert runs_of(stage.wait_status(task_id, "SUCCESS"))[-1]["returns"].startswith("A-")
    assert len(stage.events.starts(published.task_id)) == 3
    supervisor.terminate()
    assert supervisor.wait() == 0


def test_task_that_kills_the_only_worker_that_may_run_it_ends_as_fail_by_the_hand_of_another(
    stage: Stage, report: Report
) -> None:
    stage.start("B")
    published = stage.client.publish(
        "die_on", {"worker_ids": ["A"]}, key="deadly", specific_worker_ids=["A"], max_retries=1, **SHORT
    )
    for attempt in (1, 2):
        victim = stage.launch("A")  # the id of a process that was killed is free at once
        assert victim.wait() == -9
        assert len(stage.events.starts(published.task_id)) == attempt

    document = stage.wait_status(published.task_id, "FAIL")  # although A never comes back
    runs = runs_of(document)
    assert [(run["worker_id"], run["status"]) for run in runs] == [("A", "TIMEOUT")] * 2
    assert document["task_state"]["failed_cnt"] == 2
    settled = document["task_state"]["finish_time"] - runs[-1]["ping_expire_time"]
    assert settled >= timedelta(0)
    report("FAIL after the last lapse, settled by a worker that may not run it, ms", milliseconds(settled))
    assert [event.worker_id for event in stage.events.starts()] == ["A", "A"]


@pytest.mark.parametrize("scope", ["task", "worker"])
def test_task_that_fails_on_one_worker_succeeds_on_another_and_both_states_are_recorded(
    stage: Stage, scope: Any
) -> None:
    stage.start("A")
    # By each worker's own limit A may not try again; by the task's, it is told to pause before it could.
    limit: dict[str, Any] = {"max_retries": 0, "specific_worker_ids": ["A", "B"]}
    if scope == "task":
        limit = {"max_retries": 3}
    published = stage.client.publish(
        "fail_on", {"worker_ids": ["A"]}, key="picky", retry_scope=scope, retry_delay=4, **limit
    )
    failed = stage.wait_document(published.task_id, lambda found: found["task_state"]["failed_cnt"] == 1, "a failure")
    assert failed["task_state"]["status"] == "INIT"
    if scope == "task":
        stage.client.set_worker("A", concurrency=0)
    stage.start("B")

    document = stage.wait_status(published.task_id, "SUCCESS")
    assert [(run["worker_id"], run["status"]) for run in runs_of(document)] == [("A", "FAIL"), ("B", "SUCCESS")]
    assert "not on A" in runs_of(document)[0]["fail_reason"]
    assert runs_of(document)[1]["returns"] == "B"
    assert document["task_state"]["failed_cnt"] == 1
    assert [event.worker_id for event in stage.events.starts(published.task_id)] == ["A", "B"]


def test_tasks_that_fail_on_one_worker_are_tried_on_an_idle_other_before_their_limit_is_used_up(
    stage: Stage, report: Report
) -> None:
    stage.start_all("AB")
    # Where A always came first it would use up any limit; how often B is late on a loaded machine is chance.
    option: dict[str, Any] = {"max_retries": 9, "retry_delay": 0.3}
    task_ids = [
        stage.client.publish("fail_on", {"worker_ids": ["A"]}, key=f"{number}", **option).task_id
        for number in range(40)
    ]

    documents = [
        stage.wait_document(task_id, lambda found: found["task_state"]["status"] in ("SUCCESS", "FAIL"), "an end")
        for task_id in task_ids
    ]
    assert [document["task_state"]["status"] for document in documents] == ["SUCCESS"] * len(task_ids)
    assert {runs_of(document)[-1]["worker_id"] for document in documents} == {"B"}
    report("tries per task that fails on one of two workers, at most", max(len(runs_of(d)) for d in documents))
