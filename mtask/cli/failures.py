"""How a command ends: its exit code, and outputs that may be closed or full."""

from __future__ import annotations

import errno
import io
import os
import sys
from contextlib import suppress

OK = 0
OTHER = 1
USAGE = 2
NOT_FOUND = 4
CONFLICT = 5
WAIT_TIMEOUT = 6
PROBLEMS = 7
TASK_FAILED = 8
TASK_CANCELED = 9
INTERRUPTED = 130

EXIT_CODES: dict[int, str] = {
    OK: "done",
    OTHER: "another error",
    USAGE: "bad input",
    3: "the database, or the embedded mongod",
    NOT_FOUND: "not found",
    CONFLICT: "conflict: it exists, is running, is not finished, is in use, or is malformed",
    WAIT_TIMEOUT: "timed out while waiting",
    PROBLEMS: "doctor found something that does not work",
    TASK_FAILED: "wait, result: the task ended as FAIL",
    TASK_CANCELED: "wait, result: the task ended as CANCELED",
    INTERRUPTED: "interrupted",
}


# --- streams ---------------------------------------------------------------------------------------------

# Stdout and stderr that may be closed or full: a command does its work all the same.

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import TextIO


class _ClosedOutput(io.TextIOBase):
    """Stands for a stdout that was closed before the process began: a write raises OSError."""

    def write(self, text: str, /) -> int:
        raise OSError(errno.EBADF, os.strerror(errno.EBADF))


def prepare() -> None:
    """Put something in the place of each stream that is closed, and escape letters that a terminal lacks."""
    if None in (sys.stdin, sys.stdout, sys.stderr):
        # Else a socket or a file would get the number of the closed stream.
        while (made := os.open(os.devnull, os.O_RDWR)) < 3:
            os.set_inheritable(made, True)
        os.close(made)
        sys.stdout = sys.stdout or _ClosedOutput()
        sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115 it lives as long as the process
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def leave_lost() -> None:
    """Let the interpreter flush its streams when it exits. If one takes no more text, it would exit with 120."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            with suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def is_lost(stream: TextIO) -> bool:
    """Whether the stream takes no more text. An empty line is written to find out: what failed before is dropped."""
    try:
        stream.write("\n")
        stream.flush()
    except (OSError, ValueError):
        return True
    return False
