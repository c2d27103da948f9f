"""The state of the running demo: the demo writes it, and the displays read it."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from datetime import datetime

from mtask.demo.watch import Look, Rescue

#: The length of the period over which the displayed throughput is measured, in seconds. The period ends now.
_WINDOW = 2.0
#: The step in which the workers run the tasks.
WORKING = "working"


@dataclass(frozen=True, slots=True)
class WorkerRow:
    """One worker in the display."""

    worker_id: str
    pid: int
    status: str
    running: int
    finished: int


@dataclass(frozen=True, slots=True)
class Kill:
    """The kill of a worker by SIGKILL."""

    worker_id: str
    pid: int
    time: datetime


@dataclass(slots=True)
class Scene:
    """The progress of the demo. One thread writes it; readers may see a slightly older state."""

    title: str
    total: int
    #: Whether the demo kills a worker.
    has_kill: bool = False
    done: list[str] = field(default_factory=list)
    doing: str = ""
    #: The progress of the current step: the number of items that are done, and the number of all items.
    step: tuple[int, int] | None = None
    look: Look = field(default_factory=Look)
    workers: list[WorkerRow] = field(default_factory=list)
    kill: Kill | None = None
    rescues: list[Rescue] = field(default_factory=list)
    work_began: float | None = None
    work_ended: float | None = None
    _seen: deque[tuple[float, int]] = field(default_factory=deque)

    def begin(self, doing: str, step: tuple[int, int] | None = None) -> None:
        """Note the next step."""
        self.doing, self.step = doing, step

    def finish(self, done: str) -> None:
        """Note a finished step."""
        self.done.append(done)
        self.doing, self.step = "", None

    def see(self, look: Look) -> None:
        """Store a new look at the tasks, with the current time."""
        now = time.monotonic()
        self.look = look
        self._seen.append((now, look.finished))
        while len(self._seen) > 2 and self._seen[0][0] < now - _WINDOW:
            self._seen.popleft()

    @property
    def elapsed(self) -> float:
        """The time since the first publish, in seconds. It stops when all tasks have finished."""
        if self.work_began is None:
            return 0.0
        return (self.work_ended or time.monotonic()) - self.work_began

    @property
    def rate(self) -> float:
        """The recent throughput, in finished tasks a second."""
        if len(self._seen) < 2:
            return 0.0
        (since, before), (until, after) = self._seen[0], self._seen[-1]
        return max(0.0, (after - before) / max(until - since, 1e-3))
