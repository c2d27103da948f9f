"""The health of a worker process, as its health file tells it, and the judgement of a probe.

The times are of the machine's monotonic clock, which all its processes share: a change of the wall clock makes no
worker look dead.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

#: The age from which a health file counts as stale, in seconds.
MAX_AGE = 60.0


@dataclass(frozen=True, slots=True)
class Health:
    """The content of a health file."""

    worker_id: str
    pid: int
    status: str
    #: When the file was written. It is written only while the event loop turns and the pinger lives.
    written: float
    #: When the database last answered a heartbeat.
    answered: float
    #: Whether it answered the last one.
    is_answered: bool

    def dumped(self) -> str:
        """Return the content of the file."""
        return json.dumps(asdict(self)) + "\n"

    def not_alive(self, now: float, max_age: float = MAX_AGE) -> str | None:
        """Return why the worker does not count as alive, or None if it does. A database that is away is no reason."""
        if not 0 <= now - self.written <= max_age:  # a file of the time before a restart of the machine is ahead
            return "the file is stale: the event loop or the pinger stands still, or the process is gone"
        return None

    def not_ready(self, now: float, max_age: float = MAX_AGE) -> str | None:
        """Return why the worker cannot take tasks now, or None if it can."""
        reason = self.not_alive(now, max_age)
        if reason is None and self.status != "running":
            return f"its status is {self.status}, not running"
        if reason is None and not (self.is_answered and now - self.answered <= max_age):
            return f"the database has not answered for {now - self.answered:.0f} s"
        return reason


def files_of_processes(path: Path) -> list[Path]:
    """Return the health files of the processes of a supervisor that was given this path."""
    return [found for found in path.parent.glob(f"{path.name}.*") if found.suffix[1:].isdigit()]


def parsed(text: str) -> Health:
    """Return the content of a health file; raise ValueError if it is none."""
    found = json.loads(text)
    if not isinstance(found, dict):
        raise ValueError("it is no object")
    kinds = {"worker_id": str, "pid": int, "status": str, "written": float, "answered": float, "is_answered": bool}
    for name, kind in kinds.items():
        if type(found.get(name)) is not kind:
            raise ValueError(f"its {name} is missing or of another type")
    return Health(**{name: found[name] for name in kinds})
