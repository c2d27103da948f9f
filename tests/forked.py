"""Processes that are forked from one that has imported mtask already: Python's imports cost most of a short process.

Each has an environment, a session, a working folder and an output of its own, and signals reach it as any other. What
depends on a fresh interpreter is started as users start it: `/proc/<pid>/environ` and `cmdline` of a forked process are
those of the process that it was forked from.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
#: Imported before the first fork.
_MODULES = ("mtask.cli.worker", "mtask.cli.main", "mtask.worker.worker", "mtask.testing", "tests.acceptance.app")
#: What these variables say holds from a process's start on: libraries to preload, and the clock that they show.
_FROM_START = ("LD_", "DYLD_", "FAKETIME")
_ANSWER = 60.0


@dataclass(eq=False)
class Forked:
    """A forked process, with what of `subprocess.Popen` the tests use."""

    pid: int
    returncode: int | None = None
    _ended: threading.Event = field(default_factory=threading.Event)

    def end(self, returncode: int) -> None:
        """Note how the process ended: its exit code, or minus the signal that killed it."""
        self.returncode = returncode
        self._ended.set()

    def poll(self) -> int | None:
        """Return the exit code, or None while the process lives."""
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end, and return the exit code. Raises subprocess.TimeoutExpired."""
        if not self._ended.wait(timeout):
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        if self.returncode is None:
            with suppress(ProcessLookupError):  # it has ended, and the news of that is on its way
                os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill it."""
        self.send_signal(signal.SIGKILL)


class Nursery:
    """The process that has imported mtask, and forks on demand."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        command = [sys.executable, "-m", "tests.forked"]
        self._process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self._lock = threading.Lock()
        self._born = threading.Condition()
        self._processes: dict[int, Forked] = {}
        self._unclaimed: list[Forked] = []
        threading.Thread(target=self._listen, daemon=True).start()

    def start(
        self, entry: str, arguments: Sequence[str], environment: Mapping[str, str], log: Path, folder: Path = ROOT
    ) -> Forked:
        """Fork a process that calls `entry` (module:function) with these arguments in sys.argv; it logs into a file."""
        order = {
            "entry": entry,
            "arguments": [*arguments],
            "environment": dict(environment),
            "log": str(log),
            "folder": str(folder),
        }
        stdin = self._process.stdin
        assert stdin is not None
        with self._lock:
            stdin.write(json.dumps(order).encode() + b"\n")
            stdin.flush()
            with self._born:
                assert self._born.wait_for(lambda: bool(self._unclaimed), _ANSWER), "the forking process is silent"
                return self._unclaimed.pop()

    def close(self) -> None:
        """End the forking process; what it forked lives on."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(_ANSWER)

    def _listen(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as replies:
            for line in replies:
                reply = json.loads(line)
                if "code" in reply:
                    self._processes.pop(reply["pid"]).end(reply["code"])
                    continue
                with self._born:
                    born = self._processes[reply["pid"]] = Forked(reply["pid"])
                    self._unclaimed.append(born)
                    self._born.notify_all()


def fork(entry: str, arguments: Sequence[str], environment: Mapping[str, str], log: Path) -> Forked:
    """Fork a process that calls `entry` (module:function) with these arguments in sys.argv, and logs into a file."""
    from_start = {name: environment[name] for name in sorted(environment) if name.startswith(_FROM_START)}
    return _nursery(tuple(from_start.items())).start(entry, arguments, environment, log)


@cache
def _nursery(from_start: tuple[tuple[str, str], ...]) -> Nursery:
    """Return this test process's own, started on first use."""
    made = Nursery({**os.environ, **dict(from_start)})
    atexit.register(made.close)
    return made


# --- in the forking process ---------------------------------------------------------------------------------------


def _serve() -> Callable[[], Any] | None:
    """Fork for each order until there are no more. Return in each forked process with what it is to call."""
    ends: dict[int, int] = {}  # the processes that live, by the descriptor that tells of their end
    orders = b""
    while True:
        ready, _, _ = select.select([0, *ends], [], [])
        for descriptor in ready:
            if descriptor:
                _, status = os.waitpid(pid := ends.pop(descriptor), 0)
                os.close(descriptor)
                _reply({"pid": pid, "code": os.waitstatus_to_exitcode(status)})
        if 0 not in ready:
            continue
        received = os.read(0, 1 << 16)
        if not received:
            return None
        *whole, orders = (orders + received).split(b"\n")
        for order in map(json.loads, whole):
            pid = os.fork()
            if not pid:
                for descriptor in ends:
                    os.close(descriptor)
                return _become(order)
            ends[os.pidfd_open(pid)] = pid
            _reply({"pid": pid})


def _reply(reply: dict[str, int]) -> None:
    os.write(1, json.dumps(reply).encode() + b"\n")


def _become(order: dict[str, Any]) -> Callable[[], Any]:
    os.setsid()
    nothing = os.open(os.devnull, os.O_RDONLY)
    log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    for opened, standard in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(opened, standard)
    os.close(nothing)
    os.close(log)
    os.environ.clear()
    os.environ.update(order["environment"])
    os.chdir(order["folder"])
    module, _, function = order["entry"].partition(":")
    imported = importlib.import_module(module)
    sys.argv = [str(imported.__file__), *order["arguments"]]
    entry: Callable[[], Any] = getattr(imported, function)
    return entry


def main() -> None:
    """Serve orders from stdin; as a forked process, do what was ordered, and end as Python does."""
    for module in _MODULES:
        importlib.import_module(module)
    gc.freeze()
    entry = _serve()
    if entry is not None:
        entry()


if __name__ == "__main__":
    main()
