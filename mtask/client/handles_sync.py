# Generated from mtask/client/handles_aio.py: edit that one, then run `make generate`.
"""The handle of a task for sync code: what `publish` returns."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Generic, Protocol, TypeVar

from mtask.arguments.publish import Call
from mtask.kernel.document.identity import own_key
from mtask.kernel.document.task import Task
from mtask.kernel.operations.publish import Published

R_co = TypeVar("R_co", covariant=True)


class TasksClient(Protocol):
    """The part of a client that the handle of a task uses."""

    @property
    def tenant(self) -> str | None:
        """The tenant of the client."""

    def get(self, task: str, key: str) -> Task:
        """Return a task."""

    def wait(self, task: str, key: str, *, timeout: timedelta | float | None = None) -> Task:
        """Wait until a task has ended."""

    def result(self, task: str, key: str, *, timeout: timedelta | float | None = None) -> Any:
        """Wait until a task has ended; return what its handler returned."""

    def cancel(self, task: str, key: str, *, if_match: str | None = None) -> Task:
        """Cancel a task."""


class TaskHandle(Published, Generic[R_co]):
    """What `publish` returns: whether the task is new, and what a caller asks of it next.

    A handle of `call(handler)(...)` knows what the handler returns: `TaskHandle[str]`. Like other results of
    `publish`, a handle names its task in `get_many`, `wait_all` and `as_completed`. A copy of a handle, also one of
    `pickle`, is a plain `Published`, without the client.
    """

    __slots__ = ("_call", "_client")

    # Whoever makes a handle sets them. A constructor here would be one more file on the path of each publish.
    _client: TasksClient
    _call: Call[R_co] | None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Published) and _parts(self) == _parts(other)

    def __hash__(self) -> int:
        return hash(_parts(self))

    def __reduce__(self) -> tuple[Any, ...]:
        return Published, (*_parts(self), self.create_time)

    @property
    def name(self) -> str:
        """The name of the task."""
        return self.task_id.partition(":")[0]

    @property
    def key(self) -> str:
        """The key of the task, as the client takes it: for its own tenant, without the beginning of the stored key."""
        return own_key(self._client.tenant, self.task_id.partition(":")[2])

    def task(self) -> Task:
        """Return the task; raise TaskNotFound or MalformedTask."""
        return self._client.get(self.name, self.key)

    def wait(self, *, timeout: timedelta | float | None = None) -> Task:
        """Wait until the task is SUCCESS, FAIL or CANCELED; return it. `timeout`: a timedelta or seconds.

        Raises WaitTimeout after `timeout`, or TaskNotFound. See `wait` of the client.
        """
        return self._client.wait(self.name, self.key, timeout=timeout)

    def result(self, *, timeout: timedelta | float | None = None) -> R_co:
        """Wait until the task has ended; return what its handler returned. `timeout`: a timedelta or seconds.

        The task of a `Call` gives what the handler's type hint says: a model, a dataclass or a tuple is made of what
        is stored. A task that is published otherwise gives what is stored, as `result` of the client does.

        Raises TaskFailed with the reason, TaskCanceled, WaitTimeout, TaskNotFound or ResultLost. Raises ResultMismatch
        if what is stored does not fit the type hint.
        """
        found: R_co = self._client.result(self.name, self.key, timeout=timeout)
        return found if self._call is None else self._call.returned(self.task_id, found)

    def cancel(self) -> Task:
        """Cancel the task, or ask the worker that runs it to stop; return it. A finished task is not changed."""
        return self._client.cancel(self.name, self.key)


def _parts(published: Published) -> tuple[str, bool, bool]:
    return published.task_id, published.created, published.updated
