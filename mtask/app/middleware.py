"""Middleware: functions of yours that run around a publish, a run or a finish.

A middleware is a generator function. Its code before the `yield` runs before the step. Its code after the `yield` runs
after the step:

    @app.middleware
    def warn_of_slow(run: RunCall):
        began = time.monotonic()
        try:
            yield
        finally:
            if time.monotonic() - began > 5:
                log.warning("%s took long", run.task.id)

The `yield` returns the result of the step. For "run" and "publish", this is the value that the handler or `publish`
returned. For "finish", it is True if the outcome was written, and False if the lease was lost. If the handler or
`publish` raised an exception, the `yield` raises the same exception. A middleware can observe the result but not change
it. If a middleware raises an exception of its own after the `yield`, the exception is logged.

If a middleware raises an exception before the `yield`, the exception counts as an exception of the step. For "run", the
handler is not called, and `Retry` and `Fail` work as in a handler. For "publish", nothing is published. But for
"finish", the exception is only logged, and the outcome is still written. A middleware may return without a `yield`.
Then it does nothing after the step.

The middleware that was registered first is the outermost. Without middleware, the steps cost nothing extra.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

from mtask.arguments.publish import TaskSpec
from mtask.errors import HandlerError
from mtask.kernel.document.handlers import Around, AsyncAround, Begun, name_of, watch
from mtask.kernel.document.status import RunStatus
from mtask.kernel.document.task import StoredTask, Task
from mtask.kernel.document.values import Trace

if TYPE_CHECKING:
    from mtask.app.context import ActiveRun, Context
    from mtask.kernel.statements.finish import Outcome

#: The steps around which middleware can run. Clients take the step "publish", workers take "run" and "finish".
Kind = Literal["publish", "run", "finish"]
KINDS: tuple[Kind, ...] = ("publish", "run", "finish")


@dataclass(frozen=True, slots=True)
class RunCall:
    """The coming call of a handler. `task.params` holds the stored values. Type hints are applied to them later."""

    context: Context

    @property
    def task(self) -> Task:
        """The task as it was at the claim of this run. Its fields include name, key, queue, params and task_option."""
        return self.context.task

    @property
    def run_id(self) -> str:
        """The run's id."""
        return self.context.run_id

    @property
    def attempt(self) -> int:
        """The number of this try at the task. The first try has number 1."""
        return self.context.attempt

    @property
    def stored_task(self) -> Task:
        """The same as `task`, but it is not to be changed: to read it costs nothing."""
        return self.context._run.task

    @property
    def trace(self) -> Trace | None:
        """The span of the run, if it has one: what `follow` was told here, or in the worker of this executor."""
        return self.context._run.trace

    @property
    def ended_because(self) -> str | None:
        """The reason for which the worker ended the run. None: its own handler ended it, or has not ended yet."""
        return self.context._run.ended_because

    @property
    def ended_as(self) -> str | None:
        """What becomes of a run that the worker ended: FAIL, CANCELED, or LOST if nothing is written."""
        return self.context._run.ended_as

    def follow(self, trace: Trace, *, is_stored: bool) -> None:
        """Say by which span the run is traced: the lines of its log name it, and the finish and an executor get it.

        With `is_stored`, it is also stored with what comes of the run: its children, its next task, its next try.
        """
        self.context._run.follow(trace, is_stored=is_stored)


@dataclass(frozen=True, slots=True)
class FinishCall:
    """An outcome that is about to be written.

    The `yield` returns True if the outcome was written, and False if the lease was lost.
    """

    #: The same as `task`, but it is not to be changed: to read it costs nothing.
    stored_task: StoredTask
    run_id: str
    attempt: int
    worker_id: str
    #: SUCCESS, FAIL or CANCELED. A run is CANCELED by a Retry, a cancelation or a hand-back.
    status: RunStatus
    reason: str | None
    returns: Any
    #: The span of the run, if it has one.
    trace: Trace | None = None
    _task: Task | None = field(default=None, init=False, repr=False, compare=False)

    @property
    def task(self) -> Task:
        """The task as it was at the claim of the run. Its options are a copy, which is made when it is first read."""
        if self._task is None:
            object.__setattr__(self, "_task", self.stored_task.with_own_options())
        assert self._task is not None
        return self._task


Function = TypeVar("Function", bound=Callable[..., Any])


class Middleware:
    """The middleware functions of an app, by step. In each list, the outermost function comes first."""

    def __init__(self) -> None:
        self._by_kind: dict[Kind, list[Any]] = {kind: [] for kind in KINDS}

    @property
    def publish(self) -> Sequence[Around[TaskSpec]]:
        """The middleware around each publish. A client calls it only if this list is passed to the client."""
        return self._by_kind["publish"]

    @property
    def run(self) -> Sequence[Around[RunCall] | AsyncAround[RunCall]]:
        """The middleware around each call of a handler."""
        return self._by_kind["run"]

    @property
    def finish(self) -> Sequence[Around[FinishCall]]:
        """The middleware around the writing of each outcome."""
        return self._by_kind["finish"]

    def add(self, function: Callable[..., Any], kind: Kind) -> None:
        """Add a middleware.

        Raises HandlerError if the function is no generator function. Around "publish" and "finish", it must be a sync
        generator function.
        """
        if kind not in KINDS:
            raise HandlerError(
                name_of(function), f"give a middleware's step as one of {', '.join(KINDS)}, not {kind!r}"
            )
        call = function if inspect.isroutine(function) else getattr(function, "__call__", None)  # noqa: B004
        is_async = inspect.isasyncgenfunction(call)
        if not (is_async or inspect.isgeneratorfunction(call)):
            raise HandlerError(name_of(function), "a middleware is a generator function: yield once, for the step")
        if is_async and kind != "run":
            raise HandlerError(
                name_of(function), f'around "{kind}" a middleware is a sync generator: write def, not async'
            )
        self._by_kind[kind].append(function)

    def include(self, other: Middleware) -> None:
        """Add the middleware of another app."""
        for kind in KINDS:
            own = self._by_kind[kind]
            own += [function for function in other._by_kind[kind] if function not in own]


def watch_finish(middleware: Sequence[Around[FinishCall]], worker_id: str, run: ActiveRun, outcome: Outcome) -> Begun:
    """Begin the middleware around the writing of this outcome."""
    if not middleware:
        return []
    status, reason, returns = outcome.status, outcome.reason, outcome.returns
    return watch(
        middleware, FinishCall(run.task, run.run_id, run.attempt, worker_id, status, reason, returns, run.trace)
    )


# --- tracing ---------------------------------------------------------------------------------------------

# The seam of tracing: the steps that a tracer observes and for which no middleware is called. See `mtask.otel`.


@dataclass(slots=True)
class FiredTask:
    """A task that a schedule publishes."""

    task_id: str
    name: str
    queue: str
    schedule_id: str
    #: The span that publishes the task. The tracer sets it.
    trace: Trace | None = None


class Tracer(Protocol):
    """Makes the spans of steps for which no middleware of users is called. Its methods are like middleware."""

    def isolated(self, call: RunCall, /) -> Generator[None, None, None]:
        """Observe, in the worker, the call of a handler that runs in an executor."""

    def fired(self, task: FiredTask, /) -> Generator[None, None, None]:
        """Observe the publishing of a task by a schedule."""
