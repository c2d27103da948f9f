"""The health file: tells probes that the event loop turns, the pinger lives, and the database answers."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import Protocol

from mtask.errors import InvalidInput, shown
from mtask.health import Health, files_of_processes, parsed
from mtask.kernel.worker.process.log import fields, logger, told
from mtask.kernel.worker.process.state import Scope
from mtask.kernel.worker.running.leases import Pinger


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


# --- pulse -----------------------------------------------------------------------------------------------

# The pulse: shows whoever watches this worker that its event loop turns and its pinger lives.
#
# A thread of its own shows it, because a disk or a socket may be slow. Before each time the thread asks the event loop
# for a sign of life. Without the sign it shows nothing, and whoever watches notices. The log tells what blocks the
# loop.

#: The longest time between two beats, in seconds.
INTERVAL = 2.0
#: An event loop is told to be blocked if it gives no sign within so many waits of this length, in seconds. A process
#: that was frozen loses one of these waits, and no more.
_WAITS, _WAIT = 5, 1.0


class Witness(Protocol):
    """What is shown the pulse of this worker. The thread calls it, and at the first time the event loop."""

    def see(self, health: Health) -> None:
        """Take note that the worker lives."""

    def end(self) -> None:
        """Take note that the worker has ended in order."""


class Pulse:
    """Beats while the worker works."""

    def __init__(
        self,
        scope: Scope,
        pinger: Pinger,
        witnesses: Sequence[Witness],
        interval: float = INTERVAL,
    ) -> None:
        """The caller must create it in the worker's event loop. `interval`: the time between two beats, in seconds."""
        self._scope = scope
        self._pinger = pinger
        self._witnesses = witnesses
        self._interval = interval
        self._loop, self._loop_thread = asyncio.get_running_loop(), threading.get_ident()
        self._has_turned, self._is_awaited, self._is_stopped = threading.Event(), threading.Event(), False
        self._thread = threading.Thread(target=self._run, name="mtask-pulse", daemon=True)

    def start(self) -> None:
        """Beat now, and go on in the thread."""
        self._beat()
        self._thread.start()

    def beat_soon(self) -> None:
        """Beat without waiting for the interval: the worker's status has changed."""
        self._is_awaited.set()

    def stop(self) -> None:
        """Beat no more."""
        self._is_stopped = True
        self._is_awaited.set()
        self._has_turned.set()
        if self._thread.ident is not None:  # the thread was started
            self._thread.join(timeout=INTERVAL)
        for witness in self._witnesses:
            witness.end()

    def _run(self) -> None:
        while not self._is_stopped:
            self._is_awaited.wait(self._interval)
            self._is_awaited.clear()
            self._has_turned.clear()
            try:
                self._loop.call_soon_threadsafe(self._has_turned.set)
            except RuntimeError:  # the event loop has closed: the worker has ended
                return
            if not any(self._has_turned.wait(_WAIT) for _ in range(_WAITS)):
                self._tell_of_block()
            self._has_turned.wait()
            if self._pinger.is_alive and not self._is_stopped:
                self._beat()

    def _tell_of_block(self) -> None:
        """Name what the event loop executes, in the log: the handler and the line of code."""
        task = asyncio.current_task(self._loop)
        run = next((run for run in self._scope.ledger.runs if task is not None and run.asyncio_task is task), None)
        named = {} if run is None else {"task": run.task_id, "run": run.run_id, "handler": run.name}
        frame = sys._current_frames().get(self._loop_thread)
        if frame is not None:
            file = frame.f_code.co_filename.rpartition("/")[2]
            named["at"] = f"{file}:{frame.f_lineno} in {frame.f_code.co_name}"
        logger.warning("event loop is blocked: no other async handler goes on", extra=fields(**named))

    def _beat(self) -> None:
        answered, is_answered = self._pinger.answered
        status = self._scope.vitals.status.value
        health = Health(self._scope.worker_id, os.getpid(), status, monotonic(), answered, is_answered)
        for witness in self._witnesses:
            witness.see(health)
