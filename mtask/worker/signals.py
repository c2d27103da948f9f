"""The signals of a process that runs handlers. Processes that its handlers fork do not inherit them.

Else such a process would take SIGTERM for its parent, and nobody could end it but by SIGKILL.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType

#: The signals that ask a process to end. A closed terminal sends SIGHUP.
_ENDS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def handle_ends(handler: Callable[[int, FrameType | None], object]) -> None:
    """Let this process call `handler` when a signal asks it to end. A process under `nohup` ignores SIGHUP as before.

    Call this once in a process, in its main thread. The handler runs even while a handler of tasks blocks the event
    loop; those of `loop.add_signal_handler` do not.
    """
    has_hung_up = False

    def take(number: int, frame: FrameType | None) -> None:
        nonlocal has_hung_up
        if number == signal.SIGHUP and has_hung_up:
            return  # a closed terminal may send it twice: its shell passes it on, and ends
        has_hung_up |= number == signal.SIGHUP
        handler(number, frame)

    wanted = [number for number in _ENDS if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN]
    former = {number: signal.signal(number, take) for number in wanted}
    masks = threading.local()  # of the signals that the thread blocks which forks

    def before() -> None:
        # A signal that reached the child before it had signals of its own would be lost.
        masks.former = signal.pthread_sigmask(signal.SIG_BLOCK, former)

    def after() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, masks.former)

    def in_child() -> None:
        signal.set_wakeup_fd(-1)  # else its signals would wake the event loop of its parent
        for number, was in former.items():
            if signal.getsignal(number) is take:  # else the app has a handler of its own
                signal.signal(number, signal.SIG_DFL if was is None else was)
        after()

    os.register_at_fork(before=before, after_in_parent=after, after_in_child=in_child)
