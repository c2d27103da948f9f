"""What runs now, and in which app: the request of a task, and the app that tasks of no app use."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol

from mtask import Client, Context
from mtask.contrib.celery import words
from mtask.contrib.celery.config import Config
from mtask.contrib.celery.exceptions import NotMapped


class AnyApp(Protocol):
    """The part of an app that tasks, signatures and results use."""

    @property
    def conf(self) -> Config:
        """The settings."""

    @property
    def client(self) -> Client:
        """The client that publishes."""

    @property
    def tasks(self) -> Mapping[str, Any]:
        """The tasks by name."""

    def handler(self, task: Any) -> Any:
        """Return the handler of mtask for a task."""


#: The apps of this process. Those without a name of their own, such as shared tasks, use the last one.
APPS: list[AnyApp] = []


def current() -> AnyApp:
    """Return the app that was made last; raise RuntimeError if there is none."""
    if not APPS:
        raise RuntimeError("there is no app: make one first, `app = Celery(...)`, or import the module that does")
    return APPS[-1]


@dataclass(frozen=True)
class Request:
    """What a bound task knows of its run: `self.request`."""

    #: The id of the task, NAME:KEY. None: the function was called, and no task runs.
    id: str | None = None
    task: str | None = None
    #: All arguments are in `kwargs`, by the names of the parameters.
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    #: How many tries have failed.
    retries: int = 0
    hostname: str | None = None
    delivery_info: Mapping[str, Any] = field(default_factory=dict)
    is_eager: bool = False
    called_directly: bool = True

    def __getattr__(self, name: str) -> Any:
        if name in words.OF_REQUEST:
            raise NotMapped(f"self.request.{name}", words.OF_REQUEST[name])
        raise AttributeError(f"the request of a task has no {name!r}")


@dataclass(frozen=True)
class Running:
    """A run of a task."""

    request: Request
    context: Context | None = None


_IDLE = Running(Request())
_RUNNING: ContextVar[Running] = ContextVar("mtask_celery_running", default=_IDLE)


def now_running() -> Running:
    """Return what runs in this thread."""
    return _RUNNING.get()


@contextmanager
def running(request: Request, context: Context | None = None) -> Iterator[None]:
    """Let the block be a run."""
    token = _RUNNING.set(Running(request, context))
    try:
        yield
    finally:
        _RUNNING.reset(token)
