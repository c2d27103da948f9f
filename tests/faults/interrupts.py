"""Signals to the long runs: each ends a run as Ctrl-C does, with all that the run has started."""

from __future__ import annotations

import signal


def heed_signals() -> None:
    """Let SIGINT and SIGTERM raise KeyboardInterrupt in the main thread.

    A shell may have SIGINT ignored in the background, and by default SIGTERM ends a process without any cleaning up.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
