"""The health file: tells probes that the event loop turns, the pinger lives, and the database answers.

A thread of its own writes the file, because the disk may be slow. The thread asks the event loop for a sign of life
before each write; without the sign it writes nothing, and the file grows old.
"""

from __future__ import annotations

import asyncio
import os
import threading
from contextlib import suppress
from pathlib import Path
from time import monotonic

from mtask.errors import InvalidInput, shown
from mtask.health import Health, files_of_processes, parsed
from mtask.worker.leases.pinger import Pinger
from mtask.worker.log import fields, logger
from mtask.worker.state.scope import Vitals

#: The time between two writes, in seconds.
INTERVAL = 2.0


class HealthFile:
    """Writes the health file while the worker works, and removes it at the end."""

    def __init__(self, path: Path, worker_id: str, vitals: Vitals, pinger: Pinger) -> None:
        """The caller must create it in the worker's event loop."""
        self._path = path
        self._worker_id = worker_id
        self._vitals = vitals
        self._pinger = pinger
        self._loop = asyncio.get_running_loop()
        self._has_turned, self._is_stopped = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="mtask-health", daemon=True)

    def start(self) -> None:
        """Write the file, and go on writing it in the thread."""
        self._write()
        self._thread.start()

    def stop(self) -> None:
        """Stop writing, and remove the file."""
        self._is_stopped.set()
        self._has_turned.set()
        if self._thread.ident is not None:  # the thread was started
            self._thread.join(timeout=INTERVAL)
        discard(self._path)

    def _run(self) -> None:
        while not self._is_stopped.wait(INTERVAL):
            self._has_turned.clear()
            try:
                self._loop.call_soon_threadsafe(self._has_turned.set)
            except RuntimeError:  # the event loop has closed: the worker has ended
                return
            self._has_turned.wait()
            if self._pinger.is_alive and not self._is_stopped.is_set():
                self._write()

    def _write(self) -> None:
        answered, is_answered = self._pinger.answered
        status = self._vitals.status.value
        health = Health(self._worker_id, os.getpid(), status, monotonic(), answered, is_answered)
        # Written beside the file and renamed: a probe never reads half of it.
        beside = self._path.with_name(f"{self._path.name}.new")
        try:
            beside.write_text(health.dumped(), encoding="utf-8")
            beside.replace(self._path)
        except OSError as error:
            logger.error("health file not written", extra=fields(path=str(self._path), reason=str(error)))


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
