"""Stdout and stderr that may be closed or full: a command does its work all the same."""

from __future__ import annotations

import errno
import io
import os
import sys
from contextlib import suppress

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
