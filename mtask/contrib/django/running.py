"""Runs the functions of Django's tasks as handlers of mtask: with results, signals and database connections."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from inspect import iscoroutinefunction
from typing import Any

from asgiref.sync import ThreadSensitiveContext, sync_to_async
from django.db import close_old_connections, connections
from django.utils import timezone

from mtask.app.context import Context
from mtask.contrib.django.api import Task, TaskContext, TaskError, TaskResultStatus, normalize_json, signals
from mtask.contrib.django.results import call_in, result_of
from mtask.errors import Fail, Retry
from mtask.kernel.worker.running.outcomes import describe


@dataclass(frozen=True, slots=True, kw_only=True)
class MtaskContext(TaskContext):  # type: ignore[type-arg,misc]  # at run time, Django's is frozen
    """The context of a task that takes one: Django's, and that of mtask."""

    mtask: Context  #: the run's context of mtask: progress, cancellation, transactions


def params_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return these arguments as the params of a task; raise TypeError or ValueError if they are no JSON."""
    return {"args": normalize_json(list(args)), "kwargs": normalize_json(dict(kwargs))}


def handler_of(task: Task[..., Any], *, is_retried: bool) -> Callable[..., Any]:
    """Return the function that a worker calls to run a task. `is_retried`: whether an exception is tried again."""

    # The parameter has a name that no task has: all others are params.
    def run(_mtask_context: Context, **params: Any) -> Any:
        close_old_connections()
        try:
            call = _Call(task, _mtask_context, params, is_retried=is_retried)
            call.tell_start()
            try:
                returned = call.checked(task.func(*call.args, **call.kwargs))
            except BaseException as error:
                call.tell_failure(error)
                raise
            call.tell_success(returned)
            return returned
        finally:
            close_old_connections()

    async def run_async(_mtask_context: Context, **params: Any) -> Any:
        # Without this context, the calls of the ORM in all async tasks would share one thread.
        async with ThreadSensitiveContext():
            try:
                call = _Call(task, _mtask_context, params, is_retried=is_retried)
                await sync_to_async(call.tell_start)()
                try:
                    returned = call.checked(await task.func(*call.args, **call.kwargs))
                except BaseException as error:
                    await sync_to_async(call.tell_failure)(error)
                    raise
                await sync_to_async(call.tell_success)(returned)
                return returned
            finally:
                await sync_to_async(connections.close_all)()  # the thread ends with the context

    made = run_async if iscoroutinefunction(task.func) else run
    made.__name__, made.__qualname__, made.__module__ = task.name, task.func.__qualname__, task.func.__module__
    return made


class _Call:
    """One run of a task."""

    def __init__(self, task: Task[..., Any], context: Context, params: Mapping[str, Any], *, is_retried: bool) -> None:
        self._context = context
        self._is_retried = is_retried
        self._backend = task.get_backend()
        self._result = result_of(context.task, task, task.backend)
        args, self.kwargs = call_in(params)
        self.args = [MtaskContext(task_result=self._result, mtask=context), *args] if task.takes_context else args

    def checked(self, returned: Any) -> Any:
        """Return the value as JSON. Raises Fail if it is none: another run would return the same."""
        try:
            return normalize_json(returned)
        except (TypeError, ValueError) as error:
            raise Fail(f"the return value is no JSON: {describe(error)}") from error

    def tell_start(self) -> None:
        """Send the signal that the task has started."""
        signals.task_started.send_robust(type(self._backend), task_result=self._result)

    def tell_success(self, returned: Any) -> None:
        """Send the signal that the task has finished."""
        self._end(TaskResultStatus.SUCCESSFUL, _return_value=returned)

    def tell_failure(self, error: BaseException) -> None:
        """Send the signal that the task has finished, unless it is to be tried again."""
        if self._context.is_cancelled or isinstance(error, Retry | asyncio.CancelledError):
            return
        raised = error.__cause__ if isinstance(error, Fail) and error.__cause__ is not None else error
        path = f"{type(raised).__module__}.{type(raised).__qualname__}"
        self._result.errors[:] = [TaskError(exception_class_path=path, traceback=describe(raised))]
        if isinstance(error, Fail) or self._is_last():
            self._end(TaskResultStatus.FAILED)

    def _is_last(self) -> bool:
        if not self._is_retried:
            return True
        task = self._context.task
        limit = task.task_option.max_unexpected_retries
        return 0 <= limit <= task.task_state.failed_cnt

    def _end(self, status: TaskResultStatus, **fields: Any) -> None:
        for name, value in {"status": status, "finished_at": timezone.now(), **fields}.items():
            object.__setattr__(self._result, name, value)
        signals.task_finished.send_robust(type(self._backend), task_result=self._result)
