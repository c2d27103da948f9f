"""What the bridge raises. `mtask.contrib.celery.exceptions` stands for `celery.exceptions`."""

from __future__ import annotations

from typing import Any

from mtask import MtaskError, TaskCanceled, WaitTimeout
from mtask import Retry as Retry
from mtask.contrib.celery.words import NAMES

#: `AsyncResult.get(timeout=...)` raises it.
TimeoutError = WaitTimeout  # noqa: A001 its name in Celery
#: `AsyncResult.get()` of a revoked task raises it.
TaskRevokedError = TaskCanceled


class NotMapped(MtaskError):
    """Something of Celery has no counterpart here. The message says what to write instead.

    `what` is what was used, `instead` what to write.
    """

    def __init__(self, what: str, instead: str) -> None:
        super().__init__(f"mtask.contrib.celery does not map {what}: {instead}")
        self.what = what
        self.instead = instead


class CeleryError(Exception):
    """The base of errors that tasks raise."""


class TaskError(CeleryError):
    """The base of errors about a task."""


class MaxRetriesExceededError(TaskError):
    """A task called `self.retry` more often than its max_retries allows."""


def __getattr__(name: str) -> Any:
    if name in NAMES:
        raise NotMapped(name, NAMES[name])
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
