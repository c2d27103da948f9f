"""`mtask-worker` processes that are forked from one that has imported mtask already. Imports cost most of their start.

Each has an environment, a session and a log of its own, and signals reach it as any other. `/proc/<pid>/environ` and
`cmdline` of such a process are those of the process that it was forked from. A test that reads these files starts its
worker as users do.
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
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from mtask.cli import worker
from mtask.database.schema import LAYOUTS

ROOT = Path(__file__).resolve().parents[1]
#: The first letters of the variables that take effect when a process starts: preloaded libraries, and their clock.
_FROM_START = ("LD_", "DYLD_", "FAKETIME")
#: What workers import only after they have read their flags, and the app of most tests.
_IMPORTED = (
    *("mtask.cli.workers.command", "mtask.cli.workers.serving", "mtask.features.isolation.pool"),
    "tests.acceptance.app",
)
#: Time limit for an answer of the forking process, in seconds.
_ANSWER = 60.0


@dataclass(eq=False)
class Forked:
    """A forked process, with the part of the interface of `subprocess.Popen` that the tests use."""

    pid: int
    returncode: int | None = None
    _ended: threading.Event = field(default_factory=threading.Event)

    def end(self, returncode: int) -> None:
        """Record the exit code, or minus the number of the signal that killed the process."""
        self.returncode = returncode
        self._ended.set()

    def poll(self) -> int | None:
        """Return the exit code, or None while the process lives."""
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end of the process. Return the exit code. Raises subprocess.TimeoutExpired."""
        if not self._ended.wait(timeout):
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        if self.returncode is None:
            with suppress(ProcessLookupError):  # it has ended, but the forking process has not told this one yet
                os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill the process."""
        self.send_signal(signal.SIGKILL)


class Nursery:
    """The forking process: it has imported mtask, and forks for each order."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        command = [sys.executable, "-m", "tests.forked"]
        self._process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self._lock = threading.Lock()
        self._born: SimpleQueue[Forked] = SimpleQueue()
        threading.Thread(target=self._listen, daemon=True).start()

    def start(self, arguments: Sequence[str], environment: Mapping[str, str], log: Path) -> Forked:
        """Fork `mtask-worker` with these arguments. It appends its output to the file `log`."""
        order = {"arguments": [*arguments], "environment": dict(environment), "log": str(log)}
        stdin = self._process.stdin
        assert stdin is not None
        with self._lock:
            stdin.write(json.dumps(order).encode() + b"\n")
            stdin.flush()
            return self._born.get(timeout=_ANSWER)

    def close(self) -> None:
        """End the forking process. The processes that it forked go on."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(_ANSWER)

    def _listen(self) -> None:
        assert self._process.stdout is not None
        living: dict[int, Forked] = {}
        with self._process.stdout as replies:
            for reply in map(json.loads, replies):
                pid = reply["pid"]
                if "code" in reply:
                    living.pop(pid).end(reply["code"])
                else:
                    living[pid] = Forked(pid)
                    self._born.put(living[pid])


def fork_worker(arguments: Sequence[str], environment: Mapping[str, str], log: Path) -> Forked:
    """Start an `mtask-worker` process with these arguments. It appends its output to the file `log`."""
    from_start = {name: environment[name] for name in sorted(environment) if name.startswith(_FROM_START)}
    return _nursery(tuple(from_start.items())).start(arguments, environment, log)


@cache
def _nursery(from_start: tuple[tuple[str, str], ...]) -> Nursery:
    """Return the forking process of this test process. It is started on first use."""
    made = Nursery({**os.environ, **dict(from_start)})
    atexit.register(made.close)
    return made


# --- in the forking process ---------------------------------------------------------------------------------------


def _serve() -> bool:
    """Fork for each order until there are no more. Return True in each forked process, and False in this one."""
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
            return False
        *whole, orders = (orders + received).split(b"\n")
        for order in map(json.loads, whole):
            pid = os.fork()
            if not pid:
                for descriptor in ends:
                    os.close(descriptor)
                _become(order)
                return True
            ends[os.pidfd_open(pid)] = pid
            _reply({"pid": pid})


def _reply(reply: dict[str, int]) -> None:
    os.write(1, json.dumps(reply).encode() + b"\n")


def _become(order: dict[str, Any]) -> None:
    os.setsid()
    nothing = os.open(os.devnull, os.O_RDONLY)
    log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    for opened, standard in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(opened, standard)
    os.close(nothing)
    os.close(log)
    os.environ.clear()
    os.environ.update(order["environment"])
    sys.argv = [str(worker.__file__), *order["arguments"]]


def main() -> None:
    """Serve orders from stdin. In a forked process, run `mtask-worker`, and end as Python does."""
    for name in _IMPORTED:
        importlib.import_module(name)
    for layout in LAYOUTS.values():
        layout.validator()  # its schema is kept
    gc.freeze()
    if _serve():
        worker.run()


if __name__ == "__main__":
    main()
