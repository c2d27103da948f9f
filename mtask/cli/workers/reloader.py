"""The reloader: runs the worker anew when its code has changed, for `mtask-worker --reload`.

The worker is a child process. So an error of the app ends the child, and the reloader waits for the next change.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.util import cache_from_source
from pathlib import Path
from time import monotonic

from mtask.cli import interrupts
from mtask.kernel.worker.process.log import fields, logger
from mtask.kernel.worker.process.runtime import handle_ends
from mtask.search.findings import listed

#: The time between two looks at the files, in seconds. It is also this multiple of what a look takes.
_INTERVAL, _TIMES = 0.5, 20
#: The time without a further change after which the worker is started anew, in seconds: a tool may save many files.
_CALM = 0.1
#: How long a worker may finish its runs before they go back uncounted, and how long it may take to end after that, in
#: seconds. Then it is killed.
_GRACE, _PATIENCE = 2.0, 10.0
#: The folders that hold no code of the user, beside hidden ones and virtual environments.
_LEFT_OUT = frozenset({"__pycache__", "node_modules", "site-packages"})


class Sources:
    """The files of the user's code: each `*.py` in a folder and below, and the folder's own `.env`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._seen = self._read()

    def __len__(self) -> int:
        return len(self._seen)

    def changed(self) -> list[str]:
        """Return the paths of the files that were saved, added or removed since the last call."""
        before, self._seen = self._seen, self._read()
        return sorted(name for name in before.keys() | self._seen.keys() if before.get(name) != self._seen.get(name))

    def _read(self) -> dict[str, tuple[int, int]]:
        """Return the time and the size of each file, by its path in the folder."""
        found: dict[str, tuple[int, int]] = {}
        folders = [""]
        while folders:
            folder = folders.pop()
            with suppress(OSError), os.scandir(self.folder / folder) as listing:  # it may be gone, or not for us
                entries = list(listing)
                if folder and any(entry.name == "pyvenv.cfg" for entry in entries):
                    continue
                for entry in entries:
                    path = os.path.join(folder, entry.name)
                    if entry.name.endswith(".py") or path == ".env":
                        with suppress(OSError):
                            told = entry.stat()
                            found[path] = told.st_mtime_ns, told.st_size
                    elif entry.is_dir(follow_symlinks=False) and not _is_left_out(entry.name):
                        folders.append(path)
        return found

    def forget_bytecode(self, names: Sequence[str]) -> None:
        """Remove what Python keeps of these files.

        Python knows its bytecode by the size of the file and the second in which it was saved. A file may be saved
        twice within a second.
        """
        for name in names:
            if name.endswith(".py"):
                with suppress(OSError, NotImplementedError):
                    os.unlink(cache_from_source(str(self.folder / name)))


def _is_left_out(name: str) -> bool:
    return name.startswith(".") or name in _LEFT_OUT


class Reloader:
    """Runs a worker, and runs it anew each time that the code has changed."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], folder: Path) -> None:
        self._command = command
        self._environment = environment
        self._sources = Sources(folder)
        self._wake = threading.Event()
        self._signals: list[int] = []
        self._is_stopping = False
        self._exit_code = 0

    def run(self) -> int:
        """Run until a signal asks to end, or until the worker has ended in order; return the exit code."""
        with interrupts.taking_over():
            handle_ends(self._on_signal)
        signal.signal(signal.SIGCHLD, lambda *_: self._wake.set())
        told = fields(files=len(self._sources), folder=str(self._sources.folder))
        logger.info("the worker restarts when a file is saved", extra=told)
        while True:
            # A session of its own: so Ctrl-C reaches the worker only once, through this process.
            worker = subprocess.Popen(self._command, env=self._environment, start_new_session=True)
            changed = self._until_change(worker)
            if not changed:
                return self._exit_code
            logger.info("code changed, starting the worker anew", extra=fields(files=listed(changed)))
            _stop(worker)
            if self._is_stopping:
                return 0
            self._sources.forget_bytecode(changed)

    def _on_signal(self, number: int, _frame: object) -> None:
        self._is_stopping = True
        self._signals.append(number)
        self._wake.set()

    def _until_change(self, worker: subprocess.Popen[bytes]) -> list[str]:
        """Wait until files have changed; return their paths. Return none if the worker has ended, and is to stay so."""
        has_failed = False
        while True:
            code = worker.poll()
            if code is not None and (code == 0 or self._is_stopping):
                self._exit_code = 0 if has_failed else max(code, 0)
                return []
            if code is not None and not has_failed:
                has_failed = True
                logger.error("the worker has ended, waiting for a file to be saved", extra=fields(code=code))
            while self._signals:
                worker.send_signal(self._signals.pop(0))
            began = monotonic()
            changed = [] if self._is_stopping else self._sources.changed()
            if changed:
                return self._until_calm(changed)
            self._wake.wait(max(_INTERVAL, _TIMES * (monotonic() - began)))
            self._wake.clear()

    def _until_calm(self, changed: Sequence[str]) -> list[str]:
        """Wait until no more files change; return the paths of all that have changed."""
        every = set(changed)
        while not self._wake.wait(_CALM) and (changed := self._sources.changed()):
            every.update(changed)
        return sorted(every)


def _stop(worker: subprocess.Popen[bytes]) -> None:
    """Stop a worker: let it finish its runs for a short time, hand the others back, and end."""
    for number, patience in ((signal.SIGTERM, _GRACE), (signal.SIGTERM, _PATIENCE), (signal.SIGKILL, None)):
        worker.send_signal(number)
        with suppress(subprocess.TimeoutExpired):
            worker.wait(patience)
            return
