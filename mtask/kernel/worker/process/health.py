"""The health file: tells probes that the event loop turns, the pinger lives, and the database answers."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from mtask.errors import InvalidInput, shown
from mtask.health import Health, files_of_processes, parsed
from mtask.kernel.worker.process.log import fields, logger, told


class HealthFile:
    """The health file of this worker, written at each beat of its pulse and removed at the end."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def see(self, health: Health) -> None:
        """Write the file."""
        # Written beside the file and renamed: a probe never reads half of it.
        beside = self._path.with_name(f"{self._path.name}.new")
        try:
            beside.write_text(health.dumped(), encoding="utf-8")
            beside.replace(self._path)
        except OSError as error:
            logger.error("health file not written", extra=fields(path=str(self._path), reason=told(error)))

    def end(self) -> None:
        """Remove the file."""
        discard(self._path)


def discard(path: Path) -> None:
    """Remove the health file of a former process, or of this one."""
    with suppress(OSError):
        path.unlink(missing_ok=True)


def check(path: Path) -> None:
    """Check that the health file can be written, and remove that of a former process; raise InvalidInput."""
    reason = _reason_against(path)
    if reason is not None:
        remedy = "Name a file of its own in a folder that this process may write into."
        raise InvalidInput(f"--health-file {shown(str(path))}: {reason}. {remedy}", field="health_file")
    discard(path)
    for former in files_of_processes(path):
        if _reason_against(former) is None:
            discard(former)


def _reason_against(path: Path) -> str | None:
    if not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        return f"{shown(str(path.parent))} is no folder that this process may write into"
    try:
        parsed(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError):
        return "it is there, and is no health file"  # it would be overwritten
    return None
