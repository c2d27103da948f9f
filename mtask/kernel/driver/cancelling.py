"""Ends asyncio tasks that wait for the driver."""

from __future__ import annotations

import asyncio
from typing import Any

#: The time after which a cancellation is repeated, in seconds. The driver closes a connection in less time. What it
#: counts while it does so bears one interruption, but not two.
AGAIN = 1.0


async def cancel(task: asyncio.Future[Any]) -> None:
    """Cancel an asyncio task, and wait until it has ended.

    One cancellation may not be enough. The driver waits for the network by `asyncio.wait_for`. Before Python 3.12, this
    function drops a cancellation that comes while its wait ends anyway. The operation then goes on to its time limit.
    """
    while not task.done():
        task.cancel()
        await asyncio.wait((task,), timeout=AGAIN)
