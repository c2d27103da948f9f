"""As many different workers as `concurrent_worker_cnt` says succeed, each once, no more and no fewer."""

from __future__ import annotations

from itertools import pairwise

from tests.acceptance.conftest import Report
from tests.mongo import Document
from tests.workers import Stage, end_of, runs_of


def succeeded(document: Document) -> list[str]:
    return [run["worker_id"] for run in runs_of(document) if run["status"] == "SUCCESS"]


def most_at_once(document: Document) -> int:
    """Return how many runs of the task were under way at once, by the server's clock."""
    changes = sorted(change for run in runs_of(document) for change in ((run["claim_time"], 1), (end_of(run), -1)))
    level = most = 0
    for _, change in changes:
        level += change
        most = max(most, level)
    return most


def test_two_different_workers_of_three_succeed_and_the_third_never_runs_it(stage: Stage) -> None:
    stage.start_all("ABC")
    published = stage.client.publish("hold", {"gate": stage.gate()}, key="twice", concurrent_worker_cnt=2)
    stage.events.wait("start", 2, task_id=published.task_id)
    for worker_id in "ABC":
        stage.wait_heard(worker_id)  # the third has seen it too
    assert stage.document(published.task_id)["task_state"]["status"] == "RUNNING"

    stage.open_gate()
    document = stage.wait_status(published.task_id, "SUCCESS")
    sentinel = [
        stage.client.publish("noop", key=f"after/{worker_id}", specific_worker_ids=[worker_id]).task_id
        for worker_id in "ABC"
    ]
    for task_id in sentinel:
        stage.wait_status(task_id, "SUCCESS")

    document = stage.document(published.task_id)
    assert [run["status"] for run in runs_of(document)] == ["SUCCESS", "SUCCESS"]
    assert len(set(succeeded(document))) == 2
    assert most_at_once(document) == 2
    assert len(stage.events.starts(published.task_id)) == 2
    assert "next_preempt_time" not in document["task_state"]


def test_many_tasks_for_two_workers_each_are_done_by_exactly_two_of_three(stage: Stage) -> None:
    stage.start_all("ABC")
    task_ids = [
        stage.client.publish("sleep", {"seconds": 0.01}, key=f"{number}", concurrent_worker_cnt=2).task_id
        for number in range(100)
    ]

    documents = [stage.wait_status(task_id, "SUCCESS") for task_id in task_ids]
    for document in documents:
        workers = succeeded(document)
        assert len(workers) == len(runs_of(document)) == 2
        assert workers[0] != workers[1]
        assert most_at_once(document) <= 2
    assert len(stage.events.starts()) == 2 * len(task_ids)


def test_one_worker_succeeds_once_and_the_task_waits_for_another(stage: Stage, report: Report) -> None:
    stage.start("A")
    published = stage.client.publish("noop", key="twice", concurrent_worker_cnt=2)
    stage.wait_document(published.task_id, succeeded, "a success")

    for number in range(3):  # A goes on with other tasks, and leaves this one alone
        stage.wait_status(stage.client.publish("noop", key=f"other/{number}").task_id, "SUCCESS")
    document = stage.document(published.task_id)
    assert document["task_state"]["status"] == "INIT"
    assert succeeded(document) == ["A"]
    assert len(runs_of(document)) == 1
    assert "next_preempt_time" in document["task_state"]

    stage.start("B")
    document = stage.wait_status(published.task_id, "SUCCESS")
    assert [(run["worker_id"], run["status"]) for run in runs_of(document)] == [("A", "SUCCESS"), ("B", "SUCCESS")]
    assert [event.worker_id for event in stage.events.starts(published.task_id)] == ["A", "B"]


def test_three_successes_do_not_use_up_a_retry_limit_of_three_and_two_more_still_run(stage: Stage) -> None:
    stage.start_all("ABC")
    published = stage.client.publish("noop", key="five", concurrent_worker_cnt=5, max_retries=3)
    document = stage.wait_document(published.task_id, lambda found: len(succeeded(found)) == 3, "three successes")
    assert sorted(succeeded(document)) == ["A", "B", "C"]
    assert document["task_state"]["status"] in ("INIT", "RUNNING")

    stage.start_all("DE")
    document = stage.wait_status(published.task_id, "SUCCESS")
    assert sorted(succeeded(document)) == ["A", "B", "C", "D", "E"]
    assert len(runs_of(document)) == 5
    assert document["task_state"]["failed_cnt"] == 0
    assert len(stage.events.starts(published.task_id)) == 5


def test_successes_and_failures_are_counted_apart(stage: Stage) -> None:
    # A fails as often as the limit allows; the others' successes are none of these failures.
    stage.start("A")
    published = stage.client.publish(
        "fail_on",
        {"worker_ids": ["A"]},
        key="mixed",
        concurrent_worker_cnt=3,
        max_retries=3,
        retry_delay=2.5,
    )
    failing = stage.wait_document(published.task_id, lambda found: found["task_state"]["failed_cnt"] >= 1, "a failure")
    assert failing["task_state"]["status"] in ("INIT", "RUNNING")
    stage.client.set_worker("A", concurrency=0)  # which has three delays' time to reach A, before its limit is used up
    stage.start_all("BCD")

    document = stage.wait_status(published.task_id, "SUCCESS")
    failures = [run for run in runs_of(document) if run["status"] == "FAIL"]
    assert sorted(succeeded(document)) == ["B", "C", "D"]
    assert 1 <= len(failures) == document["task_state"]["failed_cnt"] <= 3
    assert {run["worker_id"] for run in failures} == {"A"}
    starts = [event.monotonic for event in stage.events.starts(published.task_id)]
    assert all(earlier <= later for earlier, later in pairwise(starts))
