"""Results of tasks and groups: `mtask.contrib.celery.result` stands for `celery.result`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime, timedelta
from time import monotonic
from typing import Any, TypeAlias

from mtask import RunStatus, Task, TaskCanceled, TaskFailed, TaskNotFound, TaskStatus
from mtask.contrib.celery import words
from mtask.contrib.celery.exceptions import NotMapped
from mtask.contrib.celery.running import AnyApp, current
from mtask.errors import PreconditionFailed

_STATES = {
    TaskStatus.SUCCESS: "SUCCESS",
    TaskStatus.FAIL: "FAILURE",
    TaskStatus.CANCELED: "REVOKED",
    TaskStatus.RUNNING: "STARTED",
}
_ENDED = frozenset({"SUCCESS", "FAILURE", "REVOKED"})
AnyResult: TypeAlias = "AsyncResult | GroupResult"


def _refuse(result: object, name: str) -> Any:
    if name in words.OF_RESULT:
        raise NotMapped(f"{type(result).__name__}.{name}", words.OF_RESULT[name])
    raise AttributeError(f"{type(result).__name__!r} has no attribute {name!r}")


class AsyncResult:
    """The result of a task, by its id NAME:KEY."""

    def __init__(self, id: str, app: AnyApp | None = None, *, parent: AnyResult | None = None) -> None:  # noqa: A002
        self.name, colon, self._key = str(id).partition(":")
        if not colon or not self._key:
            raise NotMapped(f"the id {str(id)!r}, which names no task", words.NAMELESS)
        self.id = str(id)
        #: The result of the task before, in a chain.
        self.parent = parent
        self._app = app

    def __repr__(self) -> str:
        return f"<AsyncResult: {self.id}>"

    def __str__(self) -> str:
        return self.id

    def __eq__(self, other: object) -> bool:
        return isinstance(other, AsyncResult) and self.id == other.id

    def __hash__(self) -> int:
        return hash(self.id)

    def __getattr__(self, name: str) -> Any:
        return _refuse(self, name)

    @property
    def app(self) -> AnyApp:
        """The app whose client reads the result."""
        return self._app if self._app is not None else current()

    @property
    def task_id(self) -> str:
        """The id of the task."""
        return self.id

    def _task(self) -> Task | None:
        try:
            return self.app.client.get(self.name, self._key)
        except TaskNotFound:
            return None

    @property
    def state(self) -> str:
        """PENDING (also if there is no such task), STARTED, RETRY, SUCCESS, FAILURE or REVOKED."""
        return state_of(self._task())

    @property
    def status(self) -> str:
        """The same as `state`."""
        return self.state

    def ready(self) -> bool:
        """Whether the task has ended."""
        return self.state in _ENDED

    def successful(self) -> bool:
        """Whether the task has succeeded."""
        return self.state == "SUCCESS"

    def failed(self) -> bool:
        """Whether the task has failed."""
        return self.state == "FAILURE"

    @property
    def result(self) -> Any:
        """What the task returned; an exception if it failed or was revoked; of a run its progress, or None."""
        task = self._task()
        if task is None:
            return None
        if task.status is TaskStatus.SUCCESS:
            return task.returns
        if task.status is TaskStatus.CANCELED:
            return TaskCanceled(task.id, _reason_of(task))
        if task.status is TaskStatus.FAIL:
            return TaskFailed(task.id, _reason_of(task))
        progress = task.runs[-1].progress if task.runs else None
        return None if progress is None else {"fraction": progress.fraction, "message": progress.message}

    @property
    def info(self) -> Any:
        """The same as `result`."""
        return self.result

    @property
    def traceback(self) -> str | None:
        """The reason of the last failure, with the line that raised it."""
        task = self._task()
        return None if task is None else task.fail_reason

    @property
    def date_done(self) -> datetime | None:
        """When the task ended."""
        task = self._task()
        return None if task is None else task.task_state.finish_time

    def get(
        self, timeout: timedelta | float | None = None, propagate: bool = True, interval: float = 0.5, **idle: Any
    ) -> Any:
        """Wait until the task has ended; return what it returned. `timeout`: seconds.

        Raises TaskFailed with the reason, TaskRevokedError (a TaskFailed), TimeoutError, or mtask's TaskNotFound. With
        propagate=False, the exception is returned. `interval` has no effect: the end is told, not asked for.
        """
        for name in idle.keys() - {"no_ack", "disable_sync_subtasks", "on_interval", "follow_parents"}:
            raise NotMapped(f"get({name}=...)", words.OF_RESULT["then"])
        try:
            return self.app.client.result(self.name, self._key, timeout=timeout)
        except TaskFailed as error:
            if propagate:
                raise
            return error

    wait = get

    def revoke(self, *, terminate: bool = False, **idle: Any) -> None:
        """Cancel the task if no run has begun. With `terminate`, end its run, too."""
        revoke(self.app, self.id, terminate=terminate)


class EagerResult(AsyncResult):
    """The result of a task that has run in this process."""

    def __init__(self, id: str, value: Any, state: str) -> None:  # noqa: A002
        super().__init__(id)
        self._value, self._state = value, state

    def __repr__(self) -> str:
        return f"<EagerResult: {self.id}>"

    @property
    def state(self) -> str:
        """SUCCESS or FAILURE."""
        return self._state

    @property
    def result(self) -> Any:
        """What the task returned, or its exception."""
        return self._value

    @property
    def traceback(self) -> str | None:
        """What the task raised."""
        return None if self._state == "SUCCESS" else f"{type(self._value).__name__}: {self._value}"

    @property
    def date_done(self) -> datetime | None:
        """None: nothing is stored."""
        return None

    def get(
        self, timeout: timedelta | float | None = None, propagate: bool = True, interval: float = 0.5, **idle: Any
    ) -> Any:
        """Return what the task returned, or raise its exception."""
        if self._state != "SUCCESS" and propagate:
            raise self._value
        return self._value

    wait = get

    def revoke(self, *, terminate: bool = False, **idle: Any) -> None:
        """Do nothing: the task has ended."""


class GroupResult:
    """The results of a group, in the order of its tasks. `id` is the key of the flow."""

    def __init__(
        self,
        id: str,  # noqa: A002
        results: Sequence[AsyncResult | GroupResult],
        *,
        parent: AnyResult | None = None,
    ) -> None:
        self.id = id
        self.results = list(results)
        self.parent = parent

    def __repr__(self) -> str:
        return f"<GroupResult: {self.id} [{', '.join(str(result) for result in self.results)}]>"

    def __len__(self) -> int:
        return len(self.results)

    def __iter__(self) -> Iterator[AsyncResult | GroupResult]:
        return iter(self.results)

    def __getitem__(self, index: int) -> AsyncResult | GroupResult:
        return self.results[index]

    def __getattr__(self, name: str) -> Any:
        return _refuse(self, name)

    def ready(self) -> bool:
        """Whether all tasks have ended."""
        return all(result.ready() for result in self.results)

    def successful(self) -> bool:
        """Whether all tasks have succeeded."""
        return all(result.successful() for result in self.results)

    def failed(self) -> bool:
        """Whether a task has failed."""
        return any(result.failed() for result in self.results)

    def waiting(self) -> bool:
        """Whether a task has not ended."""
        return not self.ready()

    def completed_count(self) -> int:
        """Return how many tasks have succeeded."""
        return sum(result.successful() for result in self.results)

    def get(
        self, timeout: timedelta | float | None = None, propagate: bool = True, interval: float = 0.5, **idle: Any
    ) -> list[Any]:
        """Wait until all tasks have ended; return what they returned, in order. See `AsyncResult.get`."""
        left = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
        begun, values = monotonic(), []
        for result in self.results:
            rest = None if left is None else max(0.0, left - (monotonic() - begun))
            values.append(result.get(timeout=rest, propagate=propagate, **idle))
        return values

    join = get

    def revoke(self, *, terminate: bool = False, **idle: Any) -> None:
        """Revoke all tasks."""
        for result in self.results:
            result.revoke(terminate=terminate)


def state_of(task: Task | None) -> str:
    """Return the state that Celery has for the status of a task. None: there is no task."""
    if task is None:
        return "PENDING"
    waits = "RETRY" if task.runs and task.runs[-1].status is RunStatus.FAIL else "PENDING"
    return _STATES.get(task.status, waits)


def revoke(app: AnyApp, task_id: str, *, terminate: bool) -> None:
    """Cancel a task. Without `terminate`, leave it alone while a run holds it."""
    name, key = AsyncResult(task_id, app).name, task_id.partition(":")[2]
    while True:
        task = app.client.get(name, key)
        if task.status is TaskStatus.RUNNING and not terminate:
            return
        try:
            app.client.cancel(name, key, if_match=None if terminate else app.client.etag(task))
        except PreconditionFailed:
            continue  # a worker has begun it meanwhile, or its run has ended: look again
        return


def _reason_of(task: Task) -> str | None:
    return task.fail_reason or task.task_state.reason


def __getattr__(name: str) -> Any:
    if name in words.NAMES:
        raise NotMapped(name, words.NAMES[name])
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
