"""Ends asyncio tasks that wait for the driver."""

from __future__ import annotations

import asyncio
from typing import Any

#: The time after which a cancellation is repeated, in seconds. The driver closes a connection in less time.
_AGAIN = 0.25


async def cancel(task: asyncio.Future[Any]) -> None:
    """Cancel an asyncio task, and wait until it has ended.

    One cancellation may not be enough. The driver waits for a server by `asyncio.wait_for`, and before Python 3.12 this
    function drops a cancellation that comes while its wait ends anyway. The operation then goes on to its time limit.
    """
    if not task.done():
        task.cancel()
        await wait_for_end(task)


async def wait_for_end(task: asyncio.Future[Any]) -> None:
    """Wait until a task that was cancelled has ended. Cancel it again from time to time."""
    while not (await asyncio.wait((task,), timeout=_AGAIN))[0]:
        task.cancel()
