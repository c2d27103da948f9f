"""The options of a benchmark: sizes and rates."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

DEFAULT_RUNS = 5
DEFAULT_FOLDER = Path("build/benchmarks")


@dataclass(frozen=True, slots=True)
class Options:
    """Sizes and rates; None stands for the benchmark's own default."""

    runs: int = DEFAULT_RUNS
    tasks: int | None = None
    rate: float | None = None  #: tasks, or requests, a second
    workers: int | None = None
    finished: int = 1_000_000  #: tasks in the collection that are done
    delayed: int = 100_000  #: tasks in it that are due tomorrow
    purged: int = 200_000  #: tasks that a purge removes
    held: int = 1_000  #: tasks running at once
    window: float = 20.0  #: seconds that an idle or only pinging worker, or a web process with viewers, is observed
    clients: int = 16  #: clients that send large bodies
    kills: int = 20  #: workers that are killed
    only: tuple[str, ...] = ()  #: the parts that are measured; none: all
    size: int = 10_240  #: bytes of params, and of returns

    def tasks_or(self, usual: int) -> int:
        """Return how many tasks a run has."""
        return usual if self.tasks is None else self.tasks

    def rate_or(self, usual: float) -> float:
        """Return how many tasks are published, or requests are sent, a second."""
        return usual if self.rate is None else self.rate
