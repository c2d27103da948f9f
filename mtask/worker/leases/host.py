"""Who this process is: host, pid, and the scope in which a pid means something."""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

#: Above every pid of Linux and macOS.
_PID_LIMIT = 2**31


def host_name() -> str:
    """Return this host's name."""
    return socket.gethostname()


def pid_scope(pid: int | None = None) -> str | None:
    """Return boot, pid namespace and start of a process: with its pid, that is one process for ever.

    None where the system does not tell, or where there is no such process.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = os.readlink("/proc/self/ns/pid")
        start = _start_of(os.getpid() if pid is None else pid)
    except OSError:
        return None
    return None if start is None else f"{boot}/{namespace}/{start}"


def _start_of(pid: int) -> str | None:
    """Return when a process started, by the kernel's count; None where it has ended and waits to be reaped.

    Raises OSError where /proc does not show the process.
    """
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return None if fields[0] == "Z" else fields[19]


def automatic_worker_id() -> str:
    """Return a worker_id of host, pid and a random part."""
    return f"{host_name()}-{os.getpid()}-{secrets.token_hex(3)}"


def is_known_dead(document: Mapping[str, Any]) -> bool:
    """Whether the process that a worker's document tells of is known to be gone: its boot and pid namespace are
    ours, and no process here has its pid and start."""
    theirs, ours, pid = document.get("pid_scope"), pid_scope(), document.get("pid")
    if not isinstance(theirs, str) or ours is None or not isinstance(pid, int) or document.get("host") != host_name():
        return False
    scope, _, start = theirs.rpartition("/")
    if scope != ours.rpartition("/")[0] or not 0 < pid < _PID_LIMIT:
        return False
    try:
        return _start_of(pid) != start
    except OSError:
        # /proc may be mounted with hidepid: it then shows no process of another user, dead or alive.
        return not _exists(pid)


def _exists(pid: int) -> bool:
    """Whether some process has this pid, as the kernel tells even where /proc does not."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # it is there, and another user's
        return True
    return True
