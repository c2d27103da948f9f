"""Finds and ends the process that uses a folder of data files, and chooses ports."""

from __future__ import annotations

import contextlib
import fcntl
import os
import random
import signal
import socket
from datetime import timedelta
from pathlib import Path

from mtask.errors import MongodFailed
from mtask.local._supervise import command_lines, mongods_in, option
from mtask.local.folder import Deadline, wait_until

#: The time in which a process should end after SIGTERM. After this time, the process gets SIGKILL.
STOP_TIMEOUT = timedelta(seconds=20)
#: Time limit for the end of a process after SIGKILL.
KILL_TIMEOUT = timedelta(seconds=20)
#: Time limit for the release of the files and the port, after a process has left the list of processes.
RELEASE_TIMEOUT = timedelta(seconds=1)


def serving_pid(data: Path) -> int | None:
    """Return the pid of the process that serves these data files, or None if no live process does."""
    arguments = serving_arguments(data)
    return arguments[0] if arguments else None


def serving_arguments(data: Path) -> tuple[int, list[str]] | None:
    """Return the pid and the command line of the process that serves these data files, or None."""
    try:
        pid = int((data / "mongod.lock").read_text())
    except (OSError, ValueError):
        return None
    for found, arguments in command_lines(pid):
        if option(arguments, "dbpath") == str(data):
            return found, arguments
    return None


def kill_mongods(data: Path) -> None:
    """Kill every mongod that serves these data files or is just starting, and wait until all have ended."""

    def none_left() -> bool:
        pids = mongods_in(data)
        for pid in pids:
            send_signal(data, pid, signal.SIGKILL)
        return not pids and not is_held(data)

    if not wait_until(none_left, Deadline(KILL_TIMEOUT)):
        raise not_ended(data)


def stop_mongod(data: Path, timeout: timedelta) -> bool:
    """Stop the process that serves these data files; return whether there was such a process."""
    serving = serving_arguments(data)
    if serving is not None:
        send_signal(data, serving[0], signal.SIGTERM)
        # A paused process handles SIGTERM only after SIGCONT.
        send_signal(data, serving[0], signal.SIGCONT)
    if not wait_until(lambda: serving_pid(data) is None and not is_held(data), Deadline(timeout)):
        kill_mongods(data)
    port = option(serving[1], "port") if serving is not None else None
    if port is not None:
        wait_until(lambda: is_free(int(port)), Deadline(RELEASE_TIMEOUT))
    return serving is not None


def is_held(data: Path) -> bool:
    """Whether a process holds the data files. Call this only while no other process may start a mongod.

    A process that ends leaves the list of processes a moment before it releases the files.
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
    """Send a signal to a process, which may already have ended."""
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
    """Return the error for a process that is not visible here or that survived SIGKILL."""
    return MongodFailed(
        "mongod",
        f"a process that cannot be ended from here uses the data files in {data}",
        "It may run in another container, or hang on its disk. End it there, or choose another folder.",
        failed="did not stop",
    )


def is_stopped(pid: int) -> bool:
    """Whether SIGSTOP has reached every thread of the process; True if the system cannot tell."""
    try:
        stats = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/stat")]
    except OSError:  # a thread ended meanwhile
        return False
    # In this text, the state follows the process name, which is in brackets and may contain any character.
    return all(stat.rpartition(")")[2].split()[0] in "TtXZ" for stat in stats)


# --- ports -----------------------------------------------------------------------------------------------

# Chooses the ports on which servers listen.

#: The loopback interface: nobody beyond this machine can connect.
HOST = "127.0.0.1"
#: The range of ports to choose from. Linux and macOS choose the ports of outgoing connections above this range. An
#: outgoing connection could take such a port while its node is down. A client that reconnects could even connect to
#: itself.
FIRST_PORT, LAST_PORT = 20000, 32000


def is_free(port: int) -> bool:
    """Whether a server could listen on this port now."""
    with contextlib.closing(socket.socket(socket.AF_INET, socket.SOCK_STREAM)) as attempt:
        # mongod sets this option, too. With this option, connections that linger after a restart do not block the port.
        attempt.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            attempt.bind((HOST, port))
            attempt.listen(1)
        except OSError:
            return False
    return True


def free_ports(count: int) -> list[int]:
    """Return `count` ports that are free now. Another process may take one of them before the caller does."""
    candidates = random.sample(range(FIRST_PORT, LAST_PORT), LAST_PORT - FIRST_PORT)
    found: list[int] = []
    for port in candidates:
        if is_free(port):
            found.append(port)
            if len(found) == count:
                return found
    raise OSError(f"no free port on {HOST} from {FIRST_PORT} to {LAST_PORT}")
