"""Identifies this process by its host, its pid and the scope in which the pid is unique."""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

#: The bound of pids: all pids of Linux and macOS are smaller.
_PID_LIMIT = 2**31


def host_name() -> str:
    """Return this host's name."""
    return socket.gethostname()


def pid_scope(pid: int | None = None) -> str | None:
    """Return the boot id, the pid namespace and the start time of a process.

    Together with the pid, the three values identify the process for ever. `pid`: None stands for this process. Returns
    None if the system does not show these values, or if the process does not exist.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = os.readlink("/proc/self/ns/pid")
        start = _start_of(os.getpid() if pid is None else pid)
    except OSError:
        return None
    return None if start is None else f"{boot}/{namespace}/{start}"


def _start_of(pid: int) -> str | None:
    """Return the start time of a process, in the kernel's clock ticks; None: it has ended and waits to be reaped.

    Raises OSError if /proc does not show the process.
    """
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return None if fields[0] == "Z" else fields[19]


def automatic_worker_id() -> str:
    """Return a new worker_id: the host, the pid and a random part."""
    return f"{host_name()}-{os.getpid()}-{secrets.token_hex(3)}"


def is_known_dead(document: Mapping[str, Any]) -> bool:
    """Whether the process of this worker document is known to be dead.

    The process is known to be dead if two conditions hold: it ran on this host, in this boot and pid namespace; and no
    process now has the same pid and start time.
    """
    theirs, ours, pid = document.get("pid_scope"), pid_scope(), document.get("pid")
    if not isinstance(theirs, str) or ours is None or not isinstance(pid, int) or document.get("host") != host_name():
        return False
    scope, _, start = theirs.rpartition("/")
    if scope != ours.rpartition("/")[0] or not 0 < pid < _PID_LIMIT:
        return False
    try:
        return _start_of(pid) != start
    except OSError:
        # If /proc is mounted with hidepid, /proc shows no process of another user, dead or alive.
        return not _exists(pid)


def _exists(pid: int) -> bool:
    """Whether a process has this pid. The check does not need /proc."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # the process exists and belongs to another user
        return True
    return True
