"""What is known while the demo runs: the one thing that it writes and the displays read."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from datetime import datetime

from mtask.demo.watch import Look, Rescue

#: The throughput shown is that of so many last seconds.
_WINDOW = 2.0
#: The step in which the workers do the work.
WORKING = "working"


@dataclass(frozen=True, slots=True)
class WorkerRow:
    """One worker as it is shown."""

    worker_id: str
    pid: int
    status: str
    running: int
    finished: int


@dataclass(frozen=True, slots=True)
class Kill:
    """A worker's end by SIGKILL."""

    worker_id: str
    pid: int
    time: datetime


@dataclass(slots=True)
class Scene:
    """Where the demo stands. Written by one thread; readers may see it a moment old."""

    title: str
    total: int
    #: Whether a worker is to be killed.
    has_kill: bool = False
    done: list[str] = field(default_factory=list)
    doing: str = ""
    #: Of the step under way: how much is done, of how much.
    step: tuple[int, int] | None = None
    look: Look = field(default_factory=Look)
    workers: list[WorkerRow] = field(default_factory=list)
    kill: Kill | None = None
    rescues: list[Rescue] = field(default_factory=list)
    work_began: float | None = None
    work_ended: float | None = None
    _seen: deque[tuple[float, int]] = field(default_factory=deque)

    def begin(self, doing: str, step: tuple[int, int] | None = None) -> None:
        """Say what comes next."""
        self.doing, self.step = doing, step

    def finish(self, done: str) -> None:
        """Say what was done."""
        self.done.append(done)
        self.doing, self.step = "", None

    def see(self, look: Look) -> None:
        """Take a new look at the tasks."""
        now = time.monotonic()
        self.look = look
        self._seen.append((now, look.finished))
        while len(self._seen) > 2 and self._seen[0][0] < now - _WINDOW:
            self._seen.popleft()

    @property
    def elapsed(self) -> float:
        """Seconds since the workers had something to do."""
        if self.work_began is None:
            return 0.0
        return (self.work_ended or time.monotonic()) - self.work_began

    @property
    def rate(self) -> float:
        """Tasks finished a second, lately."""
        if len(self._seen) < 2:
            return 0.0
        (since, before), (until, after) = self._seen[0], self._seen[-1]
        return max(0.0, (after - before) / max(until - since, 1e-3))
