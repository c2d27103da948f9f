"""Tasks that expire never start late, and a breaker outlives the worker that has opened it."""

from __future__ import annotations

from datetime import timedelta

from mtask import TaskSpec
from mtask.kernel.document.status import FINAL
from tests import faketime
from tests.acceptance.conftest import Report
from tests.mongo import PATIENCE, eventually
from tests.workers import Stage, runs_of

TEN_MINUTES = timedelta(minutes=10)
TASKS = 1_000


def test_no_task_starts_after_its_expiry_whatever_clocks_and_freezes(stage: Stage, report: Report) -> None:
    offsets = {"fast": TEN_MINUTES, "slow": -TEN_MINUTES, "right": timedelta(0)}
    workers = [
        stage.start(name, "--concurrency", "2", environment=faketime.environment(offset) if offset else None)
        for name, offset in offsets.items()
    ]
    specs = [TaskSpec("sleep", {"seconds": 0.05}, key=str(n), expires=2) for n in range(TASKS)]
    stage.client.publish_many(specs)
    for worker in workers:  # it has found tasks that it has not claimed, and sleeps until they have expired
        stage.events.wait("start", worker_id=worker.worker_id)
        worker.pause()
    tasks = stage.mongo[stage.database]["tasks"]
    last = tasks.find_one(sort=[("task_state.not_after", -1)])
    assert last is not None
    stage.wait_server_time(last["task_state"]["not_after"])
    for worker in workers:
        worker.resume()
    is_open = {"task_state.status": {"$nin": [*FINAL]}}
    eventually(lambda: not tasks.count_documents(is_open), PATIENCE, "all have ended")

    found = list(tasks.find())
    started = [task for task in found if runs_of(task)]
    report("tasks that started", len(started))
    report("tasks that expired", TASKS - len(started))
    assert len(found) == TASKS
    assert 3 <= len(started) < TASKS
    for task in found:
        state = task["task_state"]
        assert all(run["claim_time"] < state["not_after"] for run in state["worker_states"])
        if not runs_of(task):
            assert (state["status"], state["reason"]) == ("CANCELED", "expired before it started")
    # A run that was claimed just before the freeze may have ended before its handler started.
    assert {event.task_id for event in stage.events.starts()} <= {task["_id"] for task in started}


def test_breaker_of_a_worker_that_was_killed_is_probed_and_closed_by_another_one(stage: Stage) -> None:
    controls = stage.mongo[stage.database]["controls"]
    stage.set_up()
    stage.client.set_breaker("default", 3, wait=1)
    opener = stage.start("opener")
    for number in range(3):
        stage.client.publish("fail", key=str(number), max_retries=0)

    def opened() -> bool:
        return bool(controls.count_documents({"_id": "queue:default", "opened.by": "opener"}))

    eventually(opened, PATIENCE, "the breaker is open")
    opener.kill()
    (before,) = controls.find({"_id": "queue:default"})
    stage.start("heir")
    waits = stage.client.publish("noop", key="waits")
    (run,) = runs_of(stage.wait_status(waits.task_id, "SUCCESS"))
    assert run["worker_id"] == "heir"
    assert run["claim_time"] >= before["opened"]["held_until"]
    eventually(lambda: not controls.count_documents({"opened": {"$ne": None}}), PATIENCE, "the breaker is closed")
