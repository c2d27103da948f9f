"""Retention: the newest of a queue are kept and nothing else; a purge goes beside workers at work."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from benchmarks.measuring import raw
from mtask import TaskSpec
from tests.mongo import PATIENCE, eventually
from tests.workers import Stage


def test_the_newest_two_of_four_failures_are_kept_and_zero_keeps_none(stage: Stage) -> None:
    stage.start("w1")
    for number in range(4):
        stage.client.publish("fail", key=str(number), max_retries=0)
        stage.wait_status(f"fail:{number}", "FAIL")
    stage.client.publish_many(TaskSpec("noop", key=str(number)) for number in range(5))
    eventually(lambda: stage.client.count(status="SUCCESS") == 5, PATIENCE, "all done")
    stage.client.keep("default", fail=2)
    eventually(lambda: stage.client.count(status="FAIL") == 2, PATIENCE, "two are kept")
    assert sorted(task.key for task in stage.client.find(status="FAIL")) == ["2", "3"]
    assert stage.client.count(status="SUCCESS") == 5
    stage.client.keep("default", success=1, fail=0)
    eventually(lambda: stage.client.count() == 1, PATIENCE, "one success is kept")
    assert [task.status for task in stage.client.find()] == ["SUCCESS"]


def test_a_purge_takes_what_it_names_beside_a_worker_at_work(stage: Stage) -> None:
    stage.start("w1")
    # They ended a day ago; so a purge of those that are older than a week takes none.
    now = datetime.now(UTC)
    raw.insert(stage.client.tasks, (raw.finished_document("noop", f"{number}", now) for number in range(2_000)))
    stage.client.publish("fail", key="1", max_retries=0)
    stage.client.publish("noop", key="later", delay=timedelta(hours=1))
    stage.client.publish("hold", {"gate": stage.gate()}, key="held")
    stage.wait_run("hold:held")
    stage.wait_status("fail:1", "FAIL")
    assert stage.client.purge(older_than=timedelta(days=7)) == 0
    assert stage.client.purge(name="noop", dry_run=True) == 2_000
    assert stage.client.purge(name="noop", limit=600) == 600
    assert stage.client.purge(status="SUCCESS") == 1_400
    assert sorted(task.id for task in stage.client.find()) == ["fail:1", "hold:held", "noop:later"]
    assert stage.client.purge(status=["INIT", "FAIL"]) == 2
    stage.open_gate()
    stage.wait_status("hold:held", "SUCCESS")
