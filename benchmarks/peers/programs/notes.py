"""What handlers of the Python peers note: one line for each start, and for each end of a task that holds."""

from __future__ import annotations

import asyncio
import os
import time

_file = os.open(os.path.join(os.environ["PEER_FOLDER"], "lines.txt"), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)


def begun(number: int, sent: int) -> None:
    """Note that the handler of this task has begun; `sent` is the publisher's time in ns."""
    os.write(_file, b"b %d %d %d\n" % (number, sent, time.monotonic_ns()))


def ended(number: int) -> None:
    """Note that the handler of this task has reached its end."""
    os.write(_file, b"e %d 0 %d\n" % (number, time.monotonic_ns()))


def handle(number: int, sent: int, hold_ms: int) -> None:
    """Be the handler of every sync peer."""
    begun(number, sent)
    if hold_ms:
        time.sleep(hold_ms / 1000)
        ended(number)


async def handle_async(number: int, sent: int, hold_ms: int) -> None:
    """Be the handler of every async peer."""
    begun(number, sent)
    if hold_ms:
        await asyncio.sleep(hold_ms / 1000)
        ended(number)
