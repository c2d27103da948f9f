"""Remove a temporary folder, and kill every mongod in it, once the process that made the folder has ended.

This module runs as a script, with the standard library alone, so that it starts in milliseconds:
`python -I -S _supervise.py FOLDER PARENT_PID`. Its standard input is a pipe that the parent keeps open. The pipe ends
when the parent has closed it or has died. A child process of the parent also holds the pipe, until the child has become
a mongod. So when the pipe ends, every mongod that the parent has begun to start is running, and one sweep finds all of
them.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

SWEEP_SECONDS = 30.0
POLL_SECONDS = 0.02


def command_lines(only: int | None = None) -> Iterator[tuple[int, list[str]]]:
    """Yield the pid and the arguments (--name=value) of every visible live process, or only of the process `only`."""
    proc = Path("/proc")
    if (proc / "self" / "cmdline").exists():
        names = [entry.name for entry in proc.iterdir()] if only is None else [str(only)]
        for name in names:
            if name.isdigit():
                # A process may end meanwhile. A zombie process has no arguments.
                with contextlib.suppress(OSError):
                    arguments = (proc / name / "cmdline").read_bytes().rstrip(b"\0")
                    if arguments:
                        yield int(name), os.fsdecode(arguments).split("\0")
        return
    which = ["-ax"] if only is None else ["-p", str(only)]
    # The exit code is not checked: it is 1 if the process does not exist.
    listing = subprocess.run(["ps", *which, "-ww", "-o", "pid=,command="], capture_output=True, text=True)
    for line in listing.stdout.splitlines():
        pid, _, command = line.strip().partition(" ")
        first, *others = command.split(" --")
        yield int(pid), [first, *(f"--{argument}" for argument in others)]


def option(arguments: list[str], name: str) -> str | None:
    """Return the value of the argument --name=value, or None if there is no such argument."""
    prefix = f"--{name}="
    return next((part.removeprefix(prefix) for part in arguments if part.startswith(prefix)), None)


def mongods_in(folder: Path) -> list[int]:
    """Return the pids of the mongods whose data are in the folder or below it."""
    found = []
    for pid, arguments in command_lines():
        data = option(arguments, "dbpath")
        if data is not None and Path(data).is_relative_to(folder):
            found.append(pid)
    return found


def sweep(folder: Path) -> bool:
    """Kill every mongod in the folder and remove the folder; return whether this succeeded within SWEEP_SECONDS."""
    end = time.monotonic() + SWEEP_SECONDS
    while time.monotonic() < end:
        pids = mongods_in(folder)
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if not pids:
            shutil.rmtree(folder, ignore_errors=True)
            # A mongod that forked while the processes were listed may have been missed.
            if not folder.exists() and not mongods_in(folder):
                return True
        time.sleep(POLL_SECONDS)
    return False


def wait_for_parent(parent: int) -> None:
    """Wait until the pipe on standard input ends, or until the parent has died and other processes hold the pipe."""
    while os.getppid() == parent:
        readable, _, _ = select.select([0], [], [], 1.0)
        if readable and not os.read(0, 1):
            return


def main() -> int:
    """Wait for the parent's end, then sweep the folder."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    wait_for_parent(int(sys.argv[2]))
    return 0 if sweep(Path(sys.argv[1])) else 1


if __name__ == "__main__":
    sys.exit(main())
