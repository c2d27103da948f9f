"""Mends how the driver waits before Python 3.12. A call that was given up could lock the driver for ever."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any, TypeVar

import pymongo.lock

T = TypeVar("T")


def mend_waits() -> None:
    """Let the driver wait for a server, and for a free connection, by `wait_within`.

    The driver calls `asyncio.wait_for(condition.wait(), timeout)` while it holds the lock of the condition. Before
    Python 3.12, `wait_for` runs `condition.wait()` in another asyncio task. If the caller is cancelled while that task
    takes the lock again, the caller goes on alone. It gives back a lock that it does not hold, and the other task ends
    without giving the lock back. From then on, each call of the client waits for ever, and so do its monitors.

    This holds for all asyncio clients of the driver in this process.
    """
    if sys.version_info < (3, 12):
        pymongo.lock.wait_for = wait_within  # type: ignore[attr-defined, assignment]


async def wait_within(waiting: Coroutine[Any, Any, T], timeout: float | None) -> T:
    """Wait as `asyncio.wait_for` does, but never end before `waiting` has ended.

    `timeout`: in seconds; None: without a limit. Raises TimeoutError.
    """
    task = asyncio.create_task(waiting)
    received: tuple[Any, ...] | None = None  #: what a cancellation said. None: none has come.
    try:
        await asyncio.wait((task,), timeout=timeout)
    except asyncio.CancelledError as error:
        received = error.args
    task.cancel()
    while not task.done():
        try:
            await asyncio.wait((task,))
        except asyncio.CancelledError as error:
            received = received or error.args
    with suppress(asyncio.CancelledError):
        # Whoever has woken it counts on it. So its answer comes before a cancellation, as with `asyncio.wait_for`.
        return task.result()
    if received is not None:
        raise asyncio.CancelledError(*received)
    raise TimeoutError
