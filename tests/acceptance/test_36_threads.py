"""Must show of threads: those that handlers use or leave hold up neither the worker's end nor its other tasks."""

from __future__ import annotations

from tests.workers import Stage

THREADS = "tests.acceptance.threads_app:app"


def test_threads_that_handlers_leave_do_not_hold_up_the_end_of_the_worker(stage: Stage) -> None:
    worker = stage.launch("A", "--shutdown-timeout", "0.2", app=THREADS)
    stage.wait_running(worker)
    stage.wait_status(stage.client.publish("leaves_a_thread", key="left").task_id, "SUCCESS")
    waiting = stage.client.publish("waits_in_threads", {"cnt": 1}, key="waiting").task_id
    stage.wait_status(waiting, "RUNNING")
    worker.terminate()
    assert worker.wait() == 0
    state = stage.document(waiting)["task_state"]
    assert (state["status"], state["failed_cnt"]) == ("INIT", 0), "handed back"
