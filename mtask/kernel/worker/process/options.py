"""The options of a worker process, without those of features: `mtask.parts.worker` has these, too."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

from mtask.errors import InvalidInput
from mtask.kernel.document.identity import check_text
from mtask.kernel.document.status import WorkerStatus
from mtask.kernel.worker.process.registration import automatic_worker_id
from mtask.kernel.worker.process.systemd import Service

HEARTBEAT_INTERVAL = timedelta(seconds=10)
HEARTBEAT_TIMEOUT = timedelta(seconds=30)
CONCURRENCIES = range(10_001)


@dataclass(frozen=True, slots=True)
class ProcessOptions:
    """What a worker process is, whatever its features do."""

    uri: str = field(repr=False)  # the URI may hold a password
    database: str
    queues: Sequence[str] | None = None  #: None: the queues of the app's handlers, and "default"
    concurrency: int = 100
    worker_id: str | None = None
    shutdown_timeout: timedelta = timedelta(seconds=30)
    #: The function that ends the process with the given exit code. The worker calls it as the last resort of a stop,
    #: because a handler may block the event loop for good.
    hard_exit: Callable[[int], None] | None = None
    heartbeat_interval: timedelta = HEARTBEAT_INTERVAL
    heartbeat_timeout: timedelta = HEARTBEAT_TIMEOUT
    #: The options of features that few workers have, by their types.
    features: Sequence[object] = ()
    #: The file that tells probes of the worker's health. None: there is none.
    health_file: Path | None = None
    #: The service of systemd that this process is. None: systemd is told nothing.
    service: Service | None = None
    #: Whether the worker stops as soon as it holds nothing, and nothing is due that it may take.
    burst: bool = False
    on_status: Callable[[WorkerStatus], None] | None = field(default=None, compare=False)

    def checked_queues(self, of_handlers: Sequence[str]) -> list[str]:
        """Return the queues to serve; raise InvalidInput if there is none, or if a name is invalid."""
        given = of_handlers if self.queues is None else self.queues
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
