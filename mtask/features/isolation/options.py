"""The options of a worker's executors."""

from __future__ import annotations

import os
from dataclasses import dataclass

from mtask.errors import InvalidInput
from mtask.kernel.document.handlers import Handler, IsolationKind

MAX_EXECUTORS = 1000
#: The least limit of an executor's memory, in MiB. The Python interpreter and mtask alone need about 50.
LEAST_MEMORY = 64


@dataclass(frozen=True, slots=True)
class ExecutorOptions:
    """How a worker isolates handlers."""

    app: str | None = None  #: the app as package.module:app, which each executor imports; None: no executors
    isolation: IsolationKind = "thread"  #: where sync handlers run that do not say it themselves
    count: int | None = None  #: the most executors; None: the number of cores
    max_runs: int | None = None  #: the runs after which an executor is replaced; None: never
    max_memory_mib: int | None = None  #: the resident memory at which an executor is killed, in MiB; None: no limit
    is_off: bool = False  #: whether all handlers run in the worker's process, whatever they say

    def isolates(self, handler: Handler) -> bool:
        """Whether this handler runs in an executor."""
        if self.is_off:
            return False
        if handler.isolation is not None:
            return handler.isolation == "process"
        return self.isolation == "process" and not handler.is_async

    @property
    def size(self) -> int:
        """The most executors at once."""
        return self.count or _cores()

    def check(self) -> None:
        """Raise InvalidInput for an option that is out of range."""
        if self.isolation not in ("thread", "process"):
            raise InvalidInput(f'isolation {self.isolation!r}: use "thread" or "process".', field="isolation")
        if self.count is not None and not 1 <= self.count <= MAX_EXECUTORS:
            raise InvalidInput(f"executors {self.count}: use 1 to {MAX_EXECUTORS}.", field="executors")
        if self.max_runs is not None and self.max_runs < 1:
            raise InvalidInput(f"max runs per executor {self.max_runs}: use 1 or more.", field="max_runs_per_executor")
        if self.max_memory_mib is not None and self.max_memory_mib < LEAST_MEMORY:
            raise InvalidInput(
                f"max executor memory {self.max_memory_mib} MiB: use {LEAST_MEMORY} or more.",
                field="max_executor_memory",
            )


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
