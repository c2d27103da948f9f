"""Finds processes that tests started, by an environment variable that child processes inherit, and heeds signals."""

from __future__ import annotations

import os
import signal
from pathlib import Path


def marked(variable: str, value: str) -> dict[int, str]:
    """Return the id and command line of each live process that has this text in its environment."""
    marker = f"{variable}={value}".encode()
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if marker in (entry / "environ").read_bytes().split(b"\0"):
                found[int(entry.name)] = command
        except OSError:  # the process has ended, or belongs to another user
            continue
    return found


def kill_marked(variable: str, value: str) -> None:
    """Kill all these processes, also stopped ones."""
    for pid in marked(variable, value):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


def heed_signals() -> None:
    """Let SIGINT and SIGTERM end a long run as Ctrl-C does, with all that it has started.

    A shell may have SIGINT ignored in the background, and by default SIGTERM ends a process without any cleaning up.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
