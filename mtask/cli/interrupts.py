"""Ends commands on SIGINT and similar signals, without a deadlock.

A signal handler may raise an exception between any two steps of the main thread: also after a `with lock:` has taken
the lock, and before it can release it. Who takes that lock next waits forever.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import FrameType
from typing import Self

from mtask.cli.failures import INTERRUPTED

#: The time in which an interrupted command must end.
PATIENCE = timedelta(seconds=10)
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
#: The packages whose code takes locks of which other threads wait.
_LOCKING = frozenset({"concurrent", "logging", "pymongo", "queue", "rich", "subprocess", "threading"})


class Interruption:
    """Lets the first SIGINT, SIGTERM or SIGHUP end a block. Later signals do not disturb the cleanup.

    The signal raises KeyboardInterrupt at once, unless the main thread is in code that takes locks. Then the next
    `check`, or the end of the block, raises it.
    """

    def __init__(self) -> None:
        from mtask.kernel.driver.stores import unbound  # not at the top: `ending` needs no driver

        self.is_pending = False
        self._unbound = unbound

    def check(self) -> None:
        """Raise KeyboardInterrupt if a signal has arrived that raised none."""
        if self.is_pending:
            self.is_pending = False
            raise KeyboardInterrupt

    def __enter__(self) -> Self:
        self._former = {number: signal.signal(number, self._handle) for number in _SIGNALS}
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)
        if kind is None:
            self.check()

    def _handle(self, _number: int, frame: FrameType | None) -> None:
        for number in _SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        self.is_pending = True
        if not _takes_locks(frame):
            self._unbound()
            self.check()


def _takes_locks(frame: FrameType | None) -> bool:
    """Whether this frame, or one that called it, belongs to code that takes locks."""
    while frame is not None:
        if str(frame.f_globals.get("__name__")).partition(".")[0] in _LOCKING:
            return True
        frame = frame.f_back
    return False


@contextmanager
def ending(patience: timedelta = PATIENCE) -> Iterator[None]:
    """Let SIGINT raise KeyboardInterrupt in the block. End the process if the block has not ended in time after that.

    A short command has nothing to clean up that the server does not clean up itself.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGALRM, lambda *_: os._exit(INTERRUPTED))
        signal.setitimer(signal.ITIMER_REAL, patience.total_seconds())
        signal.default_int_handler(number, frame)

    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:  # the caller has its own, or ignores it
        yield
        return
    signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGINT, signal.default_int_handler)
