"""Tasks published before, during and after the start of workers: all complete, none missed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from time import monotonic
from typing import Any

from mtask import Published, TaskSpec
from tests.acceptance.conftest import Report
from tests.mongo import PATIENCE, eventually
from tests.workers import Stage, runs_of

DURING = 2_000
_PART = 100
WORKERS = ("A", "B", "C")


def publish(stage: Stage, part: str, numbers: Iterable[int]) -> list[str]:
    specs = [TaskSpec("noop", {"value": number}, key=f"{part}/{number}") for number in numbers]
    published = stage.client.publish_many(specs)
    assert all(isinstance(each, Published) and each.created for each in published)
    return [f"noop:{spec.key}" for spec in specs]


def wait_all_done(stage: Stage, task_ids: list[str]) -> None:
    tasks = stage.client.tasks
    left: dict[str, Any] = {"_id": {"$in": task_ids}, "task_state.status": {"$ne": "SUCCESS"}}
    eventually(lambda: tasks.count_documents(left) == 0, 2 * PATIENCE, f"{len(task_ids)} tasks done", interval=0.1)


def assert_each_ran_once(stage: Stage, task_ids: list[str]) -> None:
    assert Counter(event.task_id for event in stage.events.starts()) == Counter(task_ids)
    assert Counter(event.task_id for event in stage.events.all("end")) == Counter(task_ids)
    for document in stage.client.tasks.find({"_id": {"$in": task_ids}}):
        assert [run["status"] for run in runs_of(document)] == ["SUCCESS"]
        assert runs_of(document)[0]["returns"] == document["params"]["value"]
        assert document["task_state"]["failed_cnt"] == 0
        assert "next_preempt_time" not in document["task_state"]


def test_tasks_published_before_during_and_after_the_start_of_workers_all_complete_once(
    stage: Stage, report: Report
) -> None:
    task_ids = publish(stage, "before", range(200))

    began = monotonic()
    workers = [stage.launch(worker_id) for worker_id in WORKERS]
    for first in range(0, DURING, _PART):
        task_ids += publish(stage, "during", range(first, first + _PART))
        if first == DURING // 2:
            for worker in workers:  # so that one half falls before they work, and the other after
                stage.wait_running(worker)
    report(f"{DURING:,} published, in parts, while 3 workers start, s", round(monotonic() - began, 2))

    task_ids += publish(stage, "after", range(200))
    wait_all_done(stage, task_ids)
    report(f"{len(task_ids):,} tasks done since the workers' launch, s", round(monotonic() - began, 2))

    assert stage.client.count() == len(task_ids) == DURING + 400
    assert_each_ran_once(stage, task_ids)
    assert {event.worker_id for event in stage.events.starts()} == set(WORKERS)


def test_tasks_published_while_workers_start_one_after_the_other_all_complete_once(stage: Stage) -> None:
    task_ids: list[str] = []
    starting = [stage.launch(worker_id) for worker_id in WORKERS]
    number = 0
    while any((stage.worker_document(w.worker_id or "") or {}).get("status") != "running" for w in starting):
        # One at a time: they fall on every moment of the start, between the stream's opening and the first scan too.
        stage.client.publish("noop", {"value": number}, key=f"during/{number}")
        task_ids.append(f"noop:during/{number}")
        number += 1

    wait_all_done(stage, task_ids)
    assert_each_ran_once(stage, task_ids)


def test_task_published_after_the_start_is_done_by_the_stream_and_not_only_by_a_scan(
    stage: Stage, report: Report
) -> None:
    stage.start("A")
    delays = []
    for number in range(20):
        published = stage.client.publish("noop", {"value": number}, key=f"after/{number}")
        document = stage.wait_status(published.task_id, "SUCCESS")
        waited = runs_of(document)[0]["claim_time"] - document["task_state"]["create_time"]
        delays.append(waited.total_seconds() * 1000)
    delays.sort()
    report("publish to claim on an idle worker, median of 20, ms", delays[10])
    report("publish to claim on an idle worker, slowest of 20, ms", delays[-1])
    # Scans come every five seconds: twenty tasks that waited for them would need a minute and more.
    assert sum(delays) < 30_000
