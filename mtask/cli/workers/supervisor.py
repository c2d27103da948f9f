"""The supervisor: runs several worker processes, for `mtask-worker --processes N`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from time import monotonic

from mtask.cli import interrupts
from mtask.kernel.worker.process.log import fields, logger
from mtask.kernel.worker.process.runtime import handle_ends
from mtask.kernel.worker.process.systemd import Service

_PAUSE, _MAX_PAUSE = 0.5, 30.0
#: The lifetime after which a process counts as healthy, in seconds. The next restart of a healthy process uses the
#: first pause again.
_HEALTHY = 30.0
#: The exit codes after which a restart would not help: wrong usage, and a worker_id in use.
_HOPELESS = frozenset({2, 5})
#: The exit code of a process that cannot use the database. Such a process is restarted only if some process has been
#: healthy before.
_NO_DATABASE = 3


@dataclass(slots=True)
class _Child:
    index: int
    process: subprocess.Popen[bytes] | None = None
    started: float = 0.0
    pause: float = _PAUSE
    restart_at: float | None = 0.0


class Supervisor:
    """Keeps N worker processes running: restarts dead ones after growing pauses, and passes signals on to all."""

    def __init__(
        self,
        commands: Sequence[Sequence[str]],
        environment: Mapping[str, str] | None = None,
        service: Service | None = None,
    ) -> None:
        """`service`: what this process is to systemd, which watches the supervisor and not its processes."""
        self._commands = commands
        self._environment = environment
        self._service = service
        self._children = [_Child(index) for index in range(len(commands))]
        self._wake = threading.Event()
        self._signals: list[int] = []
        self._is_stopping = False
        self._has_been_well = False
        self._exit_code = 0

    def run(self) -> int:
        """Run until a signal asks to end, or until no process can be restarted; return the exit code."""
        with interrupts.taking_over():
            handle_ends(self._on_signal)
        signal.signal(signal.SIGCHLD, lambda *_: self._wake.set())
        while True:
            self._pass_signals()
            self._reap()
            if self._is_stopping and not self._running():
                return self._exit_code
            if not self._running() and all(child.restart_at is None for child in self._children):
                return self._exit_code
            wait = self._start_due()
            if self._service is not None:
                self._show_life(self._service)
                wait = min(wait, self._service.interval or wait)
            self._wake.wait(wait)
            self._wake.clear()

    def _show_life(self, service: Service) -> None:
        values = {"STOPPING": "1"} if self._is_stopping else {"READY": "1"}
        if service.watchdog is not None:
            values["WATCHDOG"] = "1"
        service.tell(STATUS=f"{len(self._running())} of {len(self._children)} processes live", **values)

    def _on_signal(self, number: int, _frame: object) -> None:
        self._signals.append(number)
        self._wake.set()

    def _running(self) -> list[_Child]:
        return [child for child in self._children if child.process is not None]

    def _pass_signals(self) -> None:
        while self._signals:
            number = self._signals.pop(0)
            self._is_stopping = True
            for child in self._running():
                if child.process is not None and child.process.poll() is None:
                    child.process.send_signal(number)

    def _start_due(self) -> float:
        """Start the processes that are due; return the seconds until the next start, but at most 5."""
        now = monotonic()
        wait = 5.0
        for child in self._children:
            if child.process is not None or child.restart_at is None or self._is_stopping:
                continue
            if child.restart_at > now:
                wait = min(wait, child.restart_at - now)
                continue
            child.started = now
            # The process gets a process group of its own. So Ctrl-C reaches the process only once: through the
            # supervisor.
            child.process = subprocess.Popen(self._commands[child.index], env=self._environment, start_new_session=True)
            logger.info("worker process started", extra=fields(index=child.index, pid=child.process.pid))
        return wait

    def _reap(self) -> None:
        for child in self._running():
            code = child.process.poll() if child.process is not None else None
            if code is None:
                continue
            child.process = None
            if self._is_stopping or code == 0:
                child.restart_at = None  # this supervisor or a client has stopped the process
                self._exit_code = self._exit_code or max(code, 0)
                continue
            lived = monotonic() - child.started
            self._has_been_well |= lived > _HEALTHY
            if code in _HOPELESS or (code == _NO_DATABASE and not self._has_been_well):
                logger.error("worker process gave up", extra=fields(index=child.index, code=code))
                child.restart_at = None
                self._exit_code = code
                continue
            child.pause = _PAUSE if lived > _HEALTHY else child.pause
            child.restart_at = monotonic() + child.pause
            logger.warning(
                "worker process died, starting another",
                extra=fields(index=child.index, code=code, pause=child.pause),
            )
            child.pause = min(child.pause * 2, _MAX_PAUSE)


def worker_command(arguments: Sequence[str]) -> list[str]:
    """Return the command line of one worker process. The process runs with the Python interpreter of this process."""
    return [sys.executable, "-m", "mtask.cli.worker", *arguments]


def with_uri(environment: Mapping[str, str], uri: str) -> dict[str, str]:
    """Return the environment of a worker process, with the URI.

    The URI may hold a password. Every user of the machine can read the command line of a process, but only the user of
    the process can read its environment.
    """
    return {**environment, "MTASK_URI": uri}


def end_with_parent(parent: int) -> None:
    """Start a thread that ends this process gracefully after its parent has ended, before this call or later."""

    def watch() -> None:
        ended = threading.Event()
        while os.getppid() == parent:
            ended.wait(1.0)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="mtask-parent-watch", daemon=True).start()
