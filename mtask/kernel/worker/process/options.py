"""The options of a worker process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

from mtask.app.app import App
from mtask.errors import InvalidInput
from mtask.features.isolation.options import ExecutorOptions
from mtask.features.logs.options import LogOptions
from mtask.kernel.document.identity import check_text
from mtask.kernel.document.status import WorkerStatus
from mtask.kernel.worker.process.registration import automatic_worker_id
from mtask.kernel.worker.process.systemd import Service

HEARTBEAT_INTERVAL = timedelta(seconds=10)
HEARTBEAT_TIMEOUT = timedelta(seconds=30)
CONCURRENCIES = range(10_001)


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """The options of one worker process."""

    uri: str = field(repr=False)  # the URI may hold a password
    database: str
    queues: Sequence[str] | None = None  #: None: the queues of the app's handlers, and "default"
    concurrency: int = 100
    scheduler: bool = True  #: whether this process also makes the firings of schedules
    worker_id: str | None = None
    shutdown_timeout: timedelta = timedelta(seconds=30)
    #: The function that ends the process with the given exit code. The worker calls it as the last resort of a stop,
    #: because a handler may block the event loop for good.
    hard_exit: Callable[[int], None] | None = None
    heartbeat_interval: timedelta = HEARTBEAT_INTERVAL
    heartbeat_timeout: timedelta = HEARTBEAT_TIMEOUT
    #: The options of features that few workers have, by their types.
    features: Sequence[object] = ()
    #: Which handlers run in child processes, and in how many.
    executors: ExecutorOptions = field(default_factory=ExecutorOptions)
    #: The file that tells probes of the worker's health. None: there is none.
    health_file: Path | None = None
    #: The service of systemd that this process is. None: systemd is told nothing.
    service: Service | None = None
    #: Which lines of the log are kept in the database, and in which format executors log.
    logs: LogOptions = field(default_factory=LogOptions)
    on_status: Callable[[WorkerStatus], None] | None = field(default=None, compare=False)

    def checked_queues(self, app: App) -> list[str]:
        """Return the queues to serve; raise InvalidInput if there is none, or if a name is invalid."""
        given = app.queues if self.queues is None else self.queues
        found = list(dict.fromkeys(check_text("queue", queue) for queue in given))
        if not found:
            raise InvalidInput("name at least one queue to serve.", field="queues")
        return found

    def checked_worker_id(self) -> str:
        """Return the worker_id, or a new one if none was given; raise InvalidInput if the worker_id is invalid."""
        return check_text("worker_id", automatic_worker_id() if self.worker_id is None else self.worker_id)

    def checked_concurrency(self) -> int:
        """Return the concurrency; raise InvalidInput if it is out of range."""
        if self.concurrency not in CONCURRENCIES:
            raise InvalidInput(f"concurrency {self.concurrency}: use 0 to {CONCURRENCIES[-1]}.", field="concurrency")
        return self.concurrency

    def checked_executors(self, app: App) -> ExecutorOptions | None:
        """Return the options of the executors, or None if no handler runs in one; raise InvalidInput."""
        self.executors.check()
        isolated = [name for name, handler in app.handlers.items() if self.executors.isolates(handler)]
        if not isolated:
            return None
        if self.executors.app is None:
            raise InvalidInput(
                f"handler {isolated[0]} is isolated: say which app the executors import, as package.module:app.",
                field="executors",
            )
        return self.executors
