"""Who this process is: host, pid, and the scope in which a pid means something."""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def host_name() -> str:
    """Return this host's name."""
    return socket.gethostname()


def pid_scope(pid: int | None = None) -> str | None:
    """Return boot, pid namespace and start of a process: with its pid, that is one process for ever.

    None where the system does not tell, or where there is no such process.
    """
    own = os.getpid() if pid is None else pid
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = os.readlink("/proc/self/ns/pid")
        fields = Path(f"/proc/{own}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    if fields[0] == "Z":
        return None
    return f"{boot}/{namespace}/{fields[19]}"


def automatic_worker_id() -> str:
    """Return a worker_id of host, pid and a random part."""
    return f"{host_name()}-{os.getpid()}-{secrets.token_hex(3)}"


def is_known_dead(document: Mapping[str, Any]) -> bool:
    """Whether the process that a worker's document tells of is known to be gone: its boot and pid namespace are
    ours, and no process here has its pid and start."""
    theirs, ours, pid = document.get("pid_scope"), pid_scope(), document.get("pid")
    if not isinstance(theirs, str) or ours is None or not isinstance(pid, int) or document.get("host") != host_name():
        return False
    if theirs.rpartition("/")[0] != ours.rpartition("/")[0]:
        return False
    return pid_scope(pid) != theirs
