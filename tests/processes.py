"""Processes that tests started, told by a variable that they inherit: whatever they start has it, too."""

from __future__ import annotations

import os
import signal
from pathlib import Path


def marked(variable: str, value: str) -> dict[int, str]:
    """Return the processes that live with this in their environment: each one's id and command line."""
    marker = f"{variable}={value}".encode()
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if marker in (entry / "environ").read_bytes().split(b"\0"):
                found[int(entry.name)] = command
        except OSError:  # it has ended, or is somebody else's
            continue
    return found


def kill_marked(variable: str, value: str) -> None:
    """Kill them all, whatever state they are in."""
    for pid in marked(variable, value):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
