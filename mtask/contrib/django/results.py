"""Results: what Django shows of a task that mtask stores."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from mtask.contrib.django.api import InvalidTask, Task, TaskError, TaskResult, TaskResultStatus, normalize_json
from mtask.errors import TaskCanceled, TaskFailed
from mtask.kernel.document.status import TaskStatus
from mtask.kernel.document.task import Task as StoredTask

_STATUSES = {
    TaskStatus.WAITING: TaskResultStatus.READY,
    TaskStatus.INIT: TaskResultStatus.READY,
    TaskStatus.RUNNING: TaskResultStatus.RUNNING,
    TaskStatus.SUCCESS: TaskResultStatus.SUCCESSFUL,
    TaskStatus.FAIL: TaskResultStatus.FAILED,
    TaskStatus.CANCELED: TaskResultStatus.FAILED,
}


def call_in(params: Any) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments that params hold: those of Django's, or plain named ones of another publisher."""
    if isinstance(params, Mapping):
        if params.keys() == {"args", "kwargs"} and isinstance(params["args"], list):
            return params["args"], dict(params["kwargs"])
        return [], dict(params)
    return ([] if params is None else [params]), {}


def result_of(stored: StoredTask, task: Task[..., Any], backend: str) -> TaskResult[..., Any]:
    """Return the result of a stored task. `task` is what its path names."""
    runs = [run for run in stored.runs if not run.past]
    args, kwargs = call_in(as_json(stored.params))
    state = stored.task_state
    status = _STATUSES[stored.status]
    if status is TaskResultStatus.SUCCESSFUL and not stored.is_complete:
        status = TaskResultStatus.RUNNING  # its value is still to come
    result: TaskResult[..., Any] = TaskResult(
        task=_as_enqueued(task, stored),
        id=stored.id,
        status=status,
        enqueued_at=state.create_time,
        started_at=runs[0].claim_time if runs else None,
        last_attempted_at=runs[-1].claim_time if runs else None,
        finished_at=state.finish_time,
        args=args,
        kwargs=kwargs,
        backend=backend,
        errors=_errors_of(stored),
        worker_ids=[run.worker_id for run in runs],
    )
    if status is TaskResultStatus.SUCCESSFUL:
        object.__setattr__(result, "_return_value", as_json(stored.returns))  # a result is frozen
    return result


def _as_enqueued(task: Task[..., Any], stored: StoredTask) -> Task[..., Any]:
    """Return the task with the queue, priority and start of the stored one."""
    try:
        return task.using(
            priority=stored.task_option.priority,
            queue_name=stored.queue,
            run_after=stored.task_state.start_time,
        )
    except InvalidTask:  # another program gave it a priority or a queue that Django refuses
        return task


def _errors_of(stored: StoredTask) -> list[TaskError]:
    """Return what the newest failed run raised. A task that failed otherwise has the reason as its traceback."""
    found = stored.error
    if found is not None:
        return [TaskError(exception_class_path=found.type, traceback=found.traceback)]
    if _STATUSES[stored.status] is not TaskResultStatus.FAILED:
        return []
    kind = TaskCanceled if stored.status is TaskStatus.CANCELED else TaskFailed
    reason = stored.fail_reason or "no reason is known"
    return [TaskError(exception_class_path=f"{kind.__module__}.{kind.__qualname__}", traceback=reason)]


def as_json(value: Any) -> Any:
    """Return a stored value in the types of JSON. Other programs store what JSON lacks, such as dates: as texts."""
    try:
        return normalize_json(value)
    except (TypeError, ValueError):
        return json.loads(json.dumps(value, default=str))
