"""Threads that handlers use or leave hold up neither the worker's end nor its other tasks."""

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


def test_blocking_calls_of_handlers_hold_up_neither_transactions_nor_new_connections(stage: Stage) -> None:
    worker = stage.launch("A", "--concurrency", "40", "--shutdown-timeout", "0.2", app=THREADS)
    stage.wait_running(worker)
    # asyncio would have at most 32 threads.
    waiting = [stage.client.publish("waits_in_threads", {"cnt": 1}, key=f"{n}").task_id for n in range(32)]
    for task_id in waiting:
        stage.wait_status(task_id, "RUNNING")
    stage.wait_status(stage.client.publish("transacts", key="beside").task_id, "SUCCESS")

    flood = stage.client.publish("waits_in_threads", {"cnt": 200}, key="flood").task_id
    stage.wait_status(flood, "RUNNING")
    stage.wait_status(stage.client.publish("transacts", key="afterwards").task_id, "SUCCESS")
    worker.terminate()
    assert worker.wait() == 0
