"""Ends commands on SIGINT and similar signals, without a deadlock; and a worker that has not started yet.

A signal handler may raise an exception between any two steps of the main thread: also after a `with lock:` has taken
the lock, and before it can release it. Who takes that lock next waits forever.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from types import FrameType
from typing import Any, Self

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
        if (stores := sys.modules.get("mtask.kernel.driver.stores")) is not None:  # most of these commands load none
            stores.unbound()
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


# --- leaving ---------------------------------------------------------------------------------------------

# A worker that has not started yet has nothing to hand back: a signal ends its process at once, as after a stop.


class _Leaving:
    """Exits with 0 on a signal. A process that was forked meanwhile ends by the signal itself."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self.former: dict[int, Any] = {}

    def __call__(self, number: int, _frame: FrameType | None) -> None:
        if os.getpid() != self._pid:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        try:
            for stream in (sys.stdout, sys.stderr):
                with suppress(Exception):  # the signal may have come amid a write
                    stream.flush()
        finally:
            os._exit(0)


@contextmanager
def leaving() -> Iterator[None]:
    """Let SIGINT, SIGTERM and SIGHUP end this process with 0 in the block, until `taking_over` puts others in charge.

    A process under `nohup` ignores SIGHUP as before.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    leave = _Leaving()
    for number in _SIGNALS:
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
            leave.former[number] = signal.signal(number, leave)
    try:
        yield
    finally:
        for left, handler in leave.former.items():
            if signal.getsignal(left) is leave:
                signal.signal(left, handler)


@contextmanager
def taking_over() -> Iterator[None]:
    """Put back the handlers from before `leaving`, so that the block can install others. No signal comes in between."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        for number in _SIGNALS:
            handler = signal.getsignal(number)
            if isinstance(handler, _Leaving):
                signal.signal(number, handler.former[number])
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
