"""Kills the executors of a worker, and all that their handlers have started, once the worker has ended.

This module runs as a script, with the standard library alone, so that it starts quickly and needs little memory:
`python -I -S _guard.py`. Its standard input is a pipe from the worker, which tells of executors: `+PID` of a new one,
`-PID` of one that is gone. When the pipe ends, the worker has ended, and what is left of it is killed.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys


def main() -> None:
    """Note the executors until the pipe ends, and then kill those that are left."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the worker's end counts, and nothing else
    groups: set[int] = set()
    for line in sys.stdin.buffer:
        pid = int(line[1:])
        if line.startswith(b"+"):
            groups.add(pid)
        else:
            groups.discard(pid)
    for group in groups:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    main()
