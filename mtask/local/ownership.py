"""Which process owns a folder of data files, and how it is ended."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
from datetime import timedelta
from pathlib import Path

from mtask.errors import MongodFailed
from mtask.local._supervise import command_lines, mongods_in, option
from mtask.local.ports import is_free
from mtask.local.waiting import Deadline, wait_until

#: From SIGTERM to SIGKILL.
STOP_TIMEOUT = timedelta(seconds=20)
#: From SIGKILL to the end of a process.
KILL_TIMEOUT = timedelta(seconds=20)
#: From the moment when a process is off the list to the moment when its files and its port are free.
RELEASE_TIMEOUT = timedelta(seconds=1)


def serving_pid(data: Path) -> int | None:
    """Return the process that serves these data files, or None: a lock file left by a dead one counts for nothing."""
    arguments = serving_arguments(data)
    return arguments[0] if arguments else None


def serving_arguments(data: Path) -> tuple[int, list[str]] | None:
    """Return the pid and the command line of the process that serves these data files."""
    try:
        pid = int((data / "mongod.lock").read_text())
    except (OSError, ValueError):
        return None
    for found, arguments in command_lines(pid):
        if option(arguments, "dbpath") == str(data):
            return found, arguments
    return None


def kill_mongods(data: Path) -> None:
    """Kill every process with these data files, serving or starting, and wait until none is left."""

    def none_left() -> bool:
        pids = mongods_in(data)
        for pid in pids:
            send_signal(data, pid, signal.SIGKILL)
        return not pids and not is_held(data)

    if not wait_until(none_left, Deadline(KILL_TIMEOUT)):
        raise not_ended(data)


def stop_mongod(data: Path, timeout: timedelta) -> bool:
    """End the process that serves these data files; tell whether there was one."""
    serving = serving_arguments(data)
    if serving is not None:
        send_signal(data, serving[0], signal.SIGTERM)
        # A paused process takes no SIGTERM.
        send_signal(data, serving[0], signal.SIGCONT)
    if not wait_until(lambda: serving_pid(data) is None and not is_held(data), Deadline(timeout)):
        kill_mongods(data)
    port = option(serving[1], "port") if serving is not None else None
    if port is not None:
        wait_until(lambda: is_free(int(port)), Deadline(RELEASE_TIMEOUT))
    return serving is not None


def is_held(data: Path) -> bool:
    """Tell whether some process holds the data files; only for whoever alone may start one.

    A process that ends is off the list a moment before it lets go of them.
    """
    try:
        with (data / "mongod.lock").open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def send_signal(data: Path, pid: int, number: signal.Signals) -> None:
    """Send a signal to a process that may have ended by now."""
    try:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
    except PermissionError as error:
        raise MongodFailed(
            f"mongod {pid}",
            f"it belongs to another user and uses the data files in {data}",
            "End it as that user, or choose another folder.",
            failed="did not stop",
        ) from error


def not_ended(data: Path) -> MongodFailed:
    """Return the error for a process that cannot be seen, or outlived SIGKILL."""
    return MongodFailed(
        "mongod",
        f"a process that cannot be ended from here uses the data files in {data}",
        "It may run in another container, or hang on its disk. End it there, or choose another folder.",
        failed="did not stop",
    )


def is_stopped(pid: int) -> bool:
    """Whether SIGSTOP has reached every thread of the process; True where the system does not tell."""
    try:
        stats = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/stat")]
    except OSError:  # a thread ended meanwhile
        return False
    # The state follows the name, which may hold anything, in brackets.
    return all(stat.rpartition(")")[2].split()[0] in "TtXZ" for stat in stats)
