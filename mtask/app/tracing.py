"""The seam of tracing: the steps that a tracer observes and for which no middleware is called. See `mtask.otel`."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Protocol

from mtask.app.middleware import RunCall
from mtask.kernel.document.values import Trace


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
