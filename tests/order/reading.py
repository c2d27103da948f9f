"""Reads histories for the model from the documents of tasks, and from what handlers recorded."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime
from math import inf

from mtask.kernel.document.rules import due_time
from mtask.kernel.document.status import RunStatus
from mtask.kernel.document.task import Run as StoredRun
from mtask.kernel.document.task import Task as StoredTask
from tests.order.history import End, Run, Task

_ENDS: Mapping[RunStatus, End] = {
    RunStatus.SUCCESS: "success",
    RunStatus.FAIL: "failure",
    RunStatus.TIMEOUT: "lapse",
}


def read_task(task: StoredTask, starts: Mapping[str, float], runs: Iterable[Run] | None = None) -> Task:
    """Return a task as the model sees it. `starts`: when the handler of each run_id started (wall seconds).

    `runs`: its runs, if the document does not hold all of them any more.
    """
    state, option = task.task_state, task.task_option
    return Task(
        task.id,
        due_time(task).timestamp(),
        task.queue,
        task.name,
        task.tenant,
        option.limit_key,
        option.priority,
        frozenset(option.specific_worker_ids),
        tuple(read_run(run, starts) for run in task.runs) if runs is None else tuple(runs),
        _seconds(state.finish_time),
        option.concurrent_worker_cnt == 1,
    )


def read_run(run: StoredRun, starts: Mapping[str, float]) -> Run:
    """Return a run as the model sees it."""
    end = _ENDS.get(run.status)
    if run.status is RunStatus.CANCELED:
        end = "hand-back" if run.retry_time is None else "retry"
    has_lapsed = run.status in (RunStatus.TIMEOUT, RunStatus.RUNNING)
    return Run(
        run.worker_id,
        run.claim_time.timestamp(),
        _seconds(run.ping_expire_time if has_lapsed else run.end_time),
        end,
        starts.get(run.run_id),
        None if run.retry_time is None else run.retry_time.timestamp(),
    )


def _seconds(instant: datetime | None) -> float:
    return inf if instant is None else instant.timestamp()
