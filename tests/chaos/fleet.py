"""The fleet: the worker and publisher processes of a run, each in a place of its own that a nemesis can ill-treat."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mtask.local.ownership import is_stopped
from tests.chaos.history import History
from tests.mongo import eventually
from tests.workers import ROOT

PATIENCE = 60.0


class State:
    """What a place's process is doing, for the display."""

    UP = "up"
    FROZEN = "paused"
    STOPPING = "stopping"
    DOWN = "killed"


@dataclass(frozen=True, slots=True)
class End:
    """How one process of a place ended: `expected` says whether a nemesis or the harness brought it about.

    `began` and `at` are monotonic seconds: the process lived between them, and no other one had its pid.
    """

    place: str
    pid: int
    exit_code: int
    expected: bool
    began: float
    at: float


class Place:
    """A place for one process: started, killed, frozen, stopped in order, and started again under the same name.

    One thing is done to a place at a time: nemeses hold its `lock` while they ill-treat it.
    """

    def __init__(
        self, name: str, kind: str, command: Sequence[str], environment: Mapping[str, str], folder: Path
    ) -> None:
        self.name = name
        self.kind = kind
        self.lock = threading.Lock()
        self.ends: list[End] = []
        self.state = State.DOWN
        self.history = History(folder)
        self.log_path = folder / f"{name}.log"
        self._command = list(command)
        #: A change has an effect from the next start on.
        self.environment = {**os.environ, **environment}
        self._process: subprocess.Popen[bytes] | None = None
        self._began = 0.0

    @property
    def pid(self) -> int | None:
        """The living process's id."""
        process = self._process
        return process.pid if process is not None and process.poll() is None else None

    def start(self) -> None:
        """Start the process; it need not be at work yet when this returns."""
        self._began = time.monotonic()
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(
                self._command,
                cwd=ROOT,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.state = State.UP

    def kill(self) -> None:
        """End it as `kill -9` does."""
        self._send(signal.SIGKILL)
        self._ended(PATIENCE, expected=True)

    def freeze(self) -> None:
        """Stop it where it stands, and wait until it does."""
        pid = self.pid
        if pid is None:
            return
        self._send(signal.SIGSTOP)
        self.state = State.FROZEN
        eventually(lambda: self.pid is None or is_stopped(pid), 10, f"{self.name} frozen", interval=0.002)

    def thaw(self) -> None:
        """Let it go on."""
        self._send(signal.SIGCONT)
        self.state = State.UP if self.pid is not None else State.DOWN

    def stop(self, timeout: float = PATIENCE) -> int:
        """Ask it to end, as SIGTERM does; return its exit code. One that doesn't is killed, and -9 returned."""
        self.state = State.STOPPING
        self._send(signal.SIGTERM)
        return self._ended(timeout, expected=True)

    def notice_end(self) -> bool:
        """Whether it ended by itself since it was last looked at; this is written down."""
        if self._process is None or self._process.poll() is None:
            return False
        self._ended(0, expected=False)
        return True

    def _send(self, number: signal.Signals) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(number)

    def _ended(self, timeout: float, *, expected: bool) -> int:
        if self._process is None:
            return 0
        try:
            code = self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait(PATIENCE)
        self.ends.append(End(self.name, self._process.pid, code, expected, self._began, time.monotonic()))
        self._process = None
        self.state = State.DOWN
        return code


class Fleet:
    """All places of one kind, with a keeper that starts again what has ended by itself, as a supervisor would."""

    def __init__(self, places: Sequence[Place], *, restart_after: float = 0.5) -> None:
        self.places = list(places)
        self._restart_after = restart_after
        self._is_stopped = threading.Event()
        self._keeper = threading.Thread(target=self._keep, name="keeper", daemon=True)

    def __getitem__(self, name: str) -> Place:
        return next(place for place in self.places if place.name == name)

    def start(self) -> None:
        """Start them all, and keep them up."""
        for place in self.places:
            place.start()
        self._keeper.start()

    def _keep(self) -> None:
        while not self._is_stopped.wait(self._restart_after):
            for place in self.places:
                if place.lock.acquire(blocking=False):
                    try:
                        if place.notice_end():
                            place.start()
                    finally:
                        place.lock.release()

    def stop(self, timeout: float = PATIENCE) -> dict[str, int]:
        """Ask all to end, at once; return their exit codes. Nothing is left running, whatever happens."""
        self._is_stopped.set()
        if self._keeper.is_alive():
            self._keeper.join(PATIENCE)
        codes: dict[str, int] = {}
        threads = [
            threading.Thread(target=lambda place=place: codes.__setitem__(place.name, place.stop(timeout)))
            for place in self.places
            if place.pid is not None
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return codes

    def kill(self) -> None:
        """End all at once, in whatever state they are."""
        self._is_stopped.set()
        for place in self.places:
            place.kill()


def python(module: str, *arguments: str) -> list[str]:
    """Return the command that runs a module."""
    return [sys.executable, "-m", module, *arguments]


class Sampler:
    """Reads what a process uses from /proc."""

    @staticmethod
    def of(pid: int) -> dict[str, float] | None:
        """Return memory in MiB, threads and open files of a process, or None if it is gone."""
        try:
            status = dict(
                line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":" in line
            )
            files = len(os.listdir(f"/proc/{pid}/fd"))
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return None
        if "VmRSS" not in status:
            return None
        return {
            "memory_mib": int(status["VmRSS"].split()[0]) / 1024,
            "threads": int(status["Threads"]),
            "files": files,
            "cpu_s": (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK"),
        }
