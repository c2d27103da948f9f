"""Processes of the peers, and the CPU of a process with all of its children."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from benchmarks.measuring.server import NotMeasured
from benchmarks.peers.lines import Note, notes_in

_LIBC = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1
_TICKS = os.sysconf("SC_CLK_TCK")
_LINES = "lines.txt"
_PUBLISH_PATIENCE = 300.0
_STOP_PATIENCE = 5.0


def end_with_parent() -> None:
    """End this process with the one that started it; to be called between fork and exec. On Linux only.

    It calls one function of C and takes no lock, so threads may call it.
    """
    if sys.platform == "linux":
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def cpu_of_tree(pid: int) -> float:
    """Return the CPU seconds of a process, of its living children, and of those that it has waited for."""
    return sum(_tree(pid).values()) / _TICKS


def tree_of(pid: int) -> list[int]:
    """Return the pids of a process and of its living children, and of theirs."""
    return list(_tree(pid))


def _tree(pid: int) -> dict[int, int]:
    """Return the clock ticks of each process of the tree, with those of the children that it has waited for."""
    children: dict[int, list[int]] = {}
    used: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            # The name of the program, in brackets, may contain blanks.
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        children.setdefault(int(fields[1]), []).append(int(entry.name))
        used[int(entry.name)] = sum(int(ticks) for ticks in fields[11:15])
    found: dict[int, int] = {}
    waiting = [pid]
    while waiting:
        one = waiting.pop()
        if one in used:
            found[one] = used[one]
        waiting += children.get(one, [])
    return found


class Program:
    """How one peer's worker and publisher are started, on one database, with one folder for the notes."""

    def __init__(
        self, worker: Sequence[str], publisher: Sequence[str], folder: Path, environment: Mapping[str, str]
    ) -> None:
        self.folder = folder
        self._worker = [*worker]
        self._publisher = [*publisher]
        # Without the user's MTASK_ variables: the defaults are measured.
        inherited = {key: value for key, value in os.environ.items() if not key.startswith("MTASK_")}
        self._environment = {**inherited, **environment, "PEER_FOLDER": str(folder)}
        self._lines = folder / _LINES

    def notes(self) -> list[Note]:
        """Return what handlers have noted so far."""
        return notes_in(self._lines.read_text()) if self._lines.exists() else []

    def count(self) -> int:
        """Return the number of lines so far; this costs less than reading them as notes."""
        return self._lines.read_bytes().count(b"\n") if self._lines.exists() else 0

    def publish(
        self, kind: str, count: int, *, first: int = 0, hold_ms: int = 0, bound: float = 0.0
    ) -> Mapping[str, Any]:
        """Publish tasks in a process of their own; return its answer: `seconds`, `count`, `is_bulk`.

        `bound`: calls a second if `kind` is paced, else the most seconds, 0 for any number.
        """
        command = [*self._publisher, "publish", kind, str(count), str(first), str(hold_ms), f"{bound:g}"]
        try:
            done = subprocess.run(
                command,
                cwd=self.folder,
                env=self._environment,
                capture_output=True,
                text=True,
                timeout=_PUBLISH_PATIENCE,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise NotMeasured(f"publishing {count:,} tasks took more than {_PUBLISH_PATIENCE:g} s.") from None
        answer = done.stdout.strip().rpartition("\n")[2]
        if done.returncode != 0 or not answer.startswith("{"):
            raise NotMeasured(f"its publisher ended with {done.returncode}: {done.stderr[-1_500:]}")
        found: dict[str, Any] = json.loads(answer)
        return found

    def worker(self) -> WorkerProcess:
        """Start a worker."""
        return WorkerProcess(self._worker, self.folder, self._environment)


class WorkerProcess:
    """One worker in a process group of its own; a context manager that ends it."""

    def __init__(self, command: Sequence[str], folder: Path, environment: Mapping[str, str]) -> None:
        self._log = folder / "worker.log"
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                command,
                cwd=folder,
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=end_with_parent,
            )

    @property
    def pid(self) -> int:
        """The pid of its main process."""
        return self._process.pid

    def cpu(self) -> float:
        """Return the CPU seconds of the worker and of its children."""
        return cpu_of_tree(self.pid)

    def check(self) -> None:
        """Raise NotMeasured if it has ended."""
        code = self._process.poll()
        if code is not None:
            raise NotMeasured(f"its worker ended with {code}: {self.log()}")

    def log(self) -> str:
        """Return the end of its log."""
        return self._log.read_text(errors="replace")[-1_500:]

    def kill(self) -> None:
        """Kill it and its children with SIGKILL, as the system does when memory is short."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_STOP_PATIENCE)
        self.kill()
