"""Must show of signals: a process that a handler forks can be terminated, and a closed terminal stops a worker."""

from __future__ import annotations

import pytest

from mtask.model.options import TaskOptions
from tests.workers import Stage, runs_of

FORKING = "tests.acceptance.forking_app:app"
ONCE: TaskOptions = {"max_unexpected_retries": 0}


@pytest.mark.parametrize("where", ["on_the_loop", "in_a_thread", "in_an_executor"])
def test_process_that_a_handler_forks_has_default_signals_from_its_first_instant(stage: Stage, where: str) -> None:
    worker = stage.launch("A", "--executors", "1", app=FORKING)
    stage.wait_running(worker)
    told = stage.client.publish(where, {"is_hasty": False}, key="told", **ONCE).task_id
    (run,) = runs_of(stage.wait_status(told, "SUCCESS"))
    assert run["returns"] == [True, -1, -15], "SIGTERM has its default, no descriptor wakes the parent, SIGTERM ends it"

    hasty = stage.client.publish(where, {"is_hasty": True}, key="hasty", **ONCE).task_id
    (run,) = runs_of(stage.wait_status(hasty, "SUCCESS"))
    assert run["returns"] == [-15], "a signal that came before the child had its own handlers is not lost"
    worker.terminate()
    assert worker.wait() == 0, "the worker itself still handles its signals"
