"""What a benchmark is asked to measure."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

DEFAULT_RUNS = 5
DEFAULT_FOLDER = Path("build/benchmarks")


@dataclass(frozen=True, slots=True)
class Options:
    """Sizes; None: the benchmark's own."""

    runs: int = DEFAULT_RUNS
    tasks: int | None = None
    rate: float | None = None  #: tasks a second
    workers: int | None = None
    finished: int = 1_000_000  #: tasks in the collection that are done
    delayed: int = 100_000  #: tasks in it that wait for tomorrow
    purged: int = 200_000  #: tasks that a purge removes
    held: int = 1_000  #: tasks running at once
    window: float = 20.0  #: seconds for which an idle worker, or one that only pings, is watched
    size: int = 10_240  #: bytes of params, and of returns

    def tasks_or(self, usual: int) -> int:
        """Return how many tasks a run has."""
        return usual if self.tasks is None else self.tasks

    def rate_or(self, usual: float) -> float:
        """Return how many tasks are published a second."""
        return usual if self.rate is None else self.rate
