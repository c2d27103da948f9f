"""The cost of work: round trips, bytes and CPU, as differences of the server's and the processes' counters."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

from benchmarks.report.figures import Figure, Target, compared

_PATHS = {
    "requests": "network.numRequests",
    "bytes_in": "network.bytesIn",
    "bytes_out": "network.bytesOut",
    "keys_examined": "metrics.queryExecutor.scanned",
    "docs_examined": "metrics.queryExecutor.scannedObjects",
}
_MICRO = 1e-6


@dataclass(frozen=True, slots=True)
class Counters:
    """The server's counters since its start; NaN for a counter that it does not report."""

    requests: float = 0.0
    bytes_in: float = 0.0  #: into the server
    bytes_out: float = 0.0
    keys_examined: float = 0.0
    docs_examined: float = 0.0
    cpu: float = 0.0  #: seconds, of the server's process

    @classmethod
    def of(cls, status: Mapping[str, Any]) -> Self:
        """Read an answer of `serverStatus`."""
        user, system = (_number(status, f"extra_info.{kind}_time_us") for kind in ("user", "system"))
        return cls(**{name: _number(status, path) for name, path in _PATHS.items()}, cpu=(user + system) * _MICRO)

    def __add__(self, other: Counters) -> Counters:
        return Counters(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def __sub__(self, other: Counters) -> Counters:
        return Counters(*(getattr(self, f.name) - getattr(other, f.name) for f in fields(self)))

    def __mul__(self, factor: float) -> Counters:
        return Counters(*(getattr(self, f.name) * factor for f in fields(self)))


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of a number of tasks."""

    tasks: int
    seconds: float
    server: Counters
    client_cpu: float  #: seconds, of the processes that did the work

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            self.tasks + other.tasks,
            self.seconds + other.seconds,
            self.server + other.server,
            self.client_cpu + other.client_cpu,
        )

    @property
    def rate(self) -> float:
        """Tasks a second."""
        return self.tasks / self.seconds if self.seconds > 0 else math.nan

    @property
    def round_trips(self) -> float:
        """Requests to the server for each task."""
        return self.server.requests / self.tasks

    @property
    def bytes(self) -> float:
        """Bytes to and from the server for each task."""
        return (self.server.bytes_in + self.server.bytes_out) / self.tasks

    @property
    def docs_examined(self) -> float:
        """Documents that the server examined for each task."""
        return self.server.docs_examined / self.tasks

    @property
    def server_us(self) -> float:
        """CPU of the server for each task, µs."""
        return self.server.cpu / self.tasks / _MICRO

    @property
    def client_us(self) -> float:
        """CPU of the client's processes for each task, µs."""
        return self.client_cpu / self.tasks / _MICRO


NOTHING = Cost(0, 0.0, Counters(), 0.0)


def total(costs: Iterable[Cost]) -> Cost:
    """Return the costs, added up."""
    return sum(costs, NOTHING)


def cost_figures(
    what: str,
    ours: Sequence[Cost],
    raw: Sequence[Cost],
    target: Target | None,
    *,
    has_rate: bool = True,
    of_parts: Mapping[str, Target] = MappingProxyType({}),
) -> list[Figure]:
    """Return throughput and costs a task; each run is compared with the raw ceiling of the same run.

    `target` is that of the throughput. `of_parts` holds the targets of costs, by the attribute of `Cost`.
    """
    found = []
    if has_rate:
        found.append(compared(what, "tasks/s", [c.rate for c in ours], [c.rate for c in raw], target))
    parts = (
        ("round trips a task", "", "round_trips"),
        ("bytes a task", "B", "bytes"),
        ("documents examined a task", "", "docs_examined"),
        ("server CPU a task", "µs", "server_us"),
        ("client CPU a task", "µs", "client_us"),
    )
    for name, unit, part in parts:
        values, against = ([getattr(cost, part) for cost in costs] for costs in (ours, raw))
        found.append(compared(f"{what}: {name}", unit, values, against, of_parts.get(part)))
    return found


def cpu_parts(costs: Sequence[Cost]) -> dict[str, float]:
    """Return the CPU a task over all runs, µs by part."""
    whole = total(costs)
    return {"server": whole.server_us, "client": whole.client_us} if whole.tasks else {}


def cpu_of(pids: Iterable[int]) -> float:
    """Return the CPU that these processes have taken so far, in seconds; a process that has ended counts 0."""
    return sum(_ticks(pid) for pid in pids) / os.sysconf("SC_CLK_TCK")


def children_of(pid: int) -> list[int]:
    """Return the processes that this process has started, and that are there."""
    found: list[int] = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):  # the thread has ended
            found += map(int, path.read_text().split())
    return found


def _ticks(pid: int) -> int:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0
    return ticks_in(stat)


def ticks_in(stat: str) -> int:
    """Return user and system time, in clock ticks, from a process's `stat`; its name may hold blanks and brackets."""
    columns = stat.rpartition(")")[2].split()
    return int(columns[11]) + int(columns[12])


def _number(status: Mapping[str, Any], path: str) -> float:
    found: Any = status
    for part in path.split("."):
        found = found.get(part) if isinstance(found, Mapping) else None
    return float(found) if isinstance(found, int | float) else math.nan
