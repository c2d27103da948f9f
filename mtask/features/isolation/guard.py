"""The guard: a small process that outlives the worker, and ends what its executors have started.

Linux kills an executor with its worker, but not the processes that the executor has started. Other systems kill
neither.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

from mtask.features.isolation.processes import wait_for_end

_SCRIPT = Path(__file__).with_name("_guard.py")
#: The longest wait for the end of the guard, in seconds. Without executors, it has nothing to do.
_END = 3.0


class Guard:
    """Starts the guard process, and tells it of executors."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._groups: set[int] = set()

    def start(self) -> None:
        """Start the process if it does not run, and tell it of all executors."""
        with self._lock:
            if self._process is not None and self._process.poll() is None:
                return
            command = [sys.executable, "-I", "-S", str(_SCRIPT)]
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, bufsize=0, start_new_session=True)
            self._tell("".join(f"+{pid}\n" for pid in self._groups))

    def add(self, pid: int) -> None:
        """Guard this executor. Its process group has its id."""
        with self._lock:
            self._groups.add(pid)
            self._tell(f"+{pid}\n")

    def remove(self, pid: int) -> None:
        """Forget an executor of which nothing is left: another process may get its id."""
        with self._lock:
            self._groups.discard(pid)
            self._tell(f"-{pid}\n")

    def stop(self) -> None:
        """End the process."""
        with self._lock:
            process, self._process = self._process, None
        if process is not None and process.stdin is not None:
            process.stdin.close()
            wait_for_end(process, _END)

    def _tell(self, text: str) -> None:
        if self._process is not None and self._process.stdin is not None:
            with suppress(OSError):  # it has been killed: the next start of an executor starts another
                self._process.stdin.write(text.encode())
