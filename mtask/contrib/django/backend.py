"""The backend: enqueues Django's tasks as tasks of mtask, and reads their results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

from django.core.checks import CheckMessage
from django.utils import timezone
from django.utils.module_loading import import_string

from mtask.contrib.django.api import (
    BaseTaskBackend,
    InvalidTask,
    Task,
    TaskResult,
    TaskResultDoesNotExist,
    TaskResultStatus,
    signals,
)
from mtask.contrib.django.checks import check
from mtask.contrib.django.connections import client_of, session_of
from mtask.contrib.django.declaring import declared_for, is_retried_by
from mtask.contrib.django.results import result_of
from mtask.contrib.django.running import params_of
from mtask.contrib.django.targets import Targeted
from mtask.errors import HandlerError, InvalidInput, TaskNotFound
from mtask.kernel.document.options import option_of
from mtask.kernel.document.task import Task as StoredTask
from mtask.kernel.operations.publish import IfExists


@dataclass(frozen=True, slots=True, kw_only=True)
class MtaskTask(Task):  # type: ignore[type-arg]  # at run time, Django's class has no parameters
    """A task of Django that also says how mtask publishes it."""

    key: str | None = None
    if_exists: IfExists = "keep"
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def using(
        self,
        *,
        key: str | None = None,
        if_exists: IfExists | None = None,
        priority: int | None = None,
        queue_name: str | None = None,
        run_after: datetime | None = None,
        backend: str | None = None,
        **options: Any,
    ) -> MtaskTask:
        """Return a task with other defaults: those of Django, a key, and options of mtask.

        A task is enqueued once for each key. If the key exists, `if_exists` decides, as in `Client.publish`: "keep"
        gives the result of the existing task, "update" replaces it, and "reject" raises TaskExists.

        Raises InvalidTask, UnknownOption or InvalidOption.
        """
        given: dict[str, Any] = {
            "key": key,
            "if_exists": if_exists,
            "priority": priority,
            "queue_name": queue_name,
            "run_after": run_after,
            "backend": backend,
        }
        changes = {name: value for name, value in given.items() if value is not None}
        if options:
            changes["options"] = {**self.options, **options}
        return replace(self, **changes)


class MtaskBackend(Targeted, BaseTaskBackend):
    """Stores tasks in MongoDB, and the workers of `manage.py mtask_worker` run them. See docs/django.md."""

    task_class = MtaskTask
    supports_defer = True
    supports_async_task = True
    supports_get_result = True
    supports_priority = True

    def validate_task(self, task: Task[..., Any]) -> None:
        """Check a task, and declare it: workers know it by its path from now on. Raises InvalidTask."""
        super().validate_task(task)
        options = getattr(task, "options", {})
        try:
            handler = declared_for(self.alias).handler(task)
            if options:
                option_of(handler.options, options)
        except (InvalidInput, HandlerError) as error:
            raise InvalidTask(f"{task.module_path}: {error}") from error
        if is_retried_by(options) and handler.on_exception != "retry":
            raise InvalidTask(
                f"{task.module_path}: its exceptions are final. Declare its retries by @options below @task."
            )

    def enqueue(self, task: Task[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Publish a task: in the open transaction of this thread, if the backend has a DATABASE, else at once.

        Raises InvalidTask, TypeError or ValueError for arguments that are no JSON, and errors of `Client.publish`.
        """
        self.validate_task(task)
        params = params_of(args, kwargs)
        session = session_of(self.target)
        client = client_of(self.target)
        key = getattr(task, "key", None)
        published = client.publish(
            declared_for(self.alias).handler(task),
            params,
            key=key,
            if_exists=getattr(task, "if_exists", "keep"),
            queue=task.queue_name,
            start_time=_aware(task.run_after),
            session=session,
            **{**getattr(task, "options", {}), "priority": task.priority},
        )
        if key is not None:
            result = result_of(client.get(published.name, published.key, session=session), task, self.alias)
        else:
            result = TaskResult(
                task=task,
                id=published.task_id,
                status=TaskResultStatus.READY,
                enqueued_at=published.create_time,
                started_at=None,
                last_attempted_at=None,
                finished_at=None,
                args=params["args"],
                kwargs=params["kwargs"],
                backend=self.alias,
                errors=[],
                worker_ids=[],
            )
        if published.created:
            signals.task_enqueued.send(type(self), task_result=result)
        return result

    def get_result(self, result_id: str) -> TaskResult[..., Any]:
        """Return the result of a task, read in the open transaction of this thread. Raises TaskResultDoesNotExist."""
        stored = self._stored(result_id)
        try:
            task = import_string(stored.name)
        except ImportError:
            task = None
        if not isinstance(task, Task):
            raise TaskResultDoesNotExist(f"{result_id}: {stored.name} names no task of this project")
        return result_of(stored, task if task.backend == self.alias else replace(task, backend=self.alias), self.alias)

    def _stored(self, result_id: str) -> StoredTask:
        if not isinstance(result_id, str):
            raise TaskResultDoesNotExist(repr(result_id))
        name, _, key = result_id.partition(":")
        try:
            return client_of(self.target).get(name, key, session=session_of(self.target))
        except (InvalidInput, TaskNotFound) as error:
            raise TaskResultDoesNotExist(result_id) from error

    def check(self, **kwargs: Any) -> list[CheckMessage]:
        """Return what is wrong with the settings of this backend."""
        return [*super().check(**kwargs), *check(self)]


def _aware(run_after: datetime | None) -> datetime | None:
    """Return the instant with a time zone. Without USE_TZ, Django's instants have none."""
    return timezone.make_aware(run_after) if run_after is not None and timezone.is_naive(run_after) else run_after
