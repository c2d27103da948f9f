"""Logging of the app that raises disturbs no run, and a worker whose pinger has ended does not go on."""

from __future__ import annotations

from typing import Any

import pytest

from mtask.kernel.document.options import TaskOptions
from tests.acceptance.broken_logs_app import BROKEN_VARIABLE
from tests.mongo import PATIENCE, eventually, fail_command
from tests.workers import Stage, runs_of

APP = "tests.acceptance.broken_logs_app:app"
ONCE: TaskOptions = {"max_retries": 0}
#: A lease that outlasts the test, with pings that do not wait.
PINGED: TaskOptions = {"worker_timeout": 3600, "ping_interval": 0.2}


@pytest.mark.parametrize("what", ["the handler", "a filter of the handler", "a filter of the logger"])
def test_logging_of_the_app_that_raises_disturbs_no_run_no_executor_and_no_ping(stage: Stage, what: str) -> None:
    worker = stage.launch("A", "--executors", "1", app=APP, environment={BROKEN_VARIABLE: what})
    stage.wait_running(worker)
    held = stage.client.publish("hold", {"gate": stage.gate()}, key="held", **PINGED).task_id
    stage.wait_run(held)
    for key in "12":
        for where in ("on_the_loop", "in_a_thread", "in_an_executor"):
            task_id = stage.client.publish(f"raises_{where}", key=key, **ONCE).task_id
            assert "no luck" in runs_of(stage.wait_status(task_id, "FAIL"))[0]["fail_reason"]
    stage.wait_status(stage.client.publish("leaves_a_callback_that_raises").task_id, "SUCCESS")

    pings: dict[str, Any] = {"app_name": "mtask-worker:A", "namespace": f"{stage.database}.tasks"}
    with fail_command(stage.mongo, "findAndModify", error_code=8, **pings):
        eventually(lambda: "ping failed" in worker.log, PATIENCE, "a ping has failed")
    lease = runs_of(stage.document(held))[0]["ping_expire_time"]
    eventually(lambda: runs_of(stage.document(held))[0]["ping_expire_time"] > lease, PATIENCE, "pings go on")

    stage.open_gate()
    assert [run["status"] for run in runs_of(stage.wait_status(held, "SUCCESS"))] == ["SUCCESS"]
    worker.terminate()
    assert worker.wait() == 0


def test_worker_whose_pinger_has_ended_hands_its_runs_back_and_ends(stage: Stage) -> None:
    worker = stage.launch("A", app=APP)
    stage.wait_running(worker)
    held = stage.client.publish("hold", {"gate": stage.gate()}, key="held", **PINGED).task_id
    stage.wait_run(held)
    stage.client.publish("ends_the_pinger")
    assert worker.wait() == 1
    assert "the thread that keeps the leases has ended" in worker.log
    state = stage.document(held)["task_state"]
    assert (state["status"], state["failed_cnt"]) == ("INIT", 0)
    assert [run["status"] for run in state["worker_states"]] == ["CANCELED"]
