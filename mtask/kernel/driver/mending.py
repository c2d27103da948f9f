"""Mends how the driver waits. A call that was given up could lock the driver for ever."""

from __future__ import annotations

import asyncio
from typing import Any, Protocol

import pymongo.asynchronous.pool
import pymongo.asynchronous.topology
import pymongo.lock

_NAME = "_async_cond_wait"


class Condition(Protocol):
    """A condition of asyncio, or the driver's own."""

    async def wait(self) -> bool:
        """Give the lock back, wait until notified, and take the lock again."""

    def notify(self, n: int = 1) -> None:
        """Wake some of those that wait."""


def mend_waits() -> None:
    """Let the driver wait for a server, and for a free connection, by `wait_for_condition`.

    The driver calls `asyncio.wait_for(condition.wait(), timeout)` while it holds the lock of the condition. Before
    Python 3.12, `wait_for` runs `condition.wait()` in another asyncio task. If the caller is cancelled while that task
    takes the lock again, the caller goes on alone. It gives back a lock that it does not hold, and the other task ends
    without giving the lock back. From then on, each call of the client waits for ever, and so do its monitors. From
    Python 3.12 on, the time limit cancels the asyncio task in which the wait began, even if another one ends the call.

    This holds for all asyncio clients of the driver in this process.
    """
    for module in (pymongo.lock, pymongo.asynchronous.pool, pymongo.asynchronous.topology):
        if hasattr(module, _NAME):
            setattr(module, _NAME, wait_for_condition)


async def wait_for_condition(condition: Condition, timeout: float | None) -> bool:
    """Wait until the condition is notified, and return True; return False after `timeout`, in seconds.

    The caller holds the lock, and does so again at the end, however the wait ends. None: there is no limit.
    """
    waiting = asyncio.create_task(condition.wait())
    received: tuple[Any, ...] | None = None  #: what a cancellation said. None: none has come.
    try:
        await asyncio.wait((waiting,), timeout=timeout)
    except asyncio.CancelledError as error:
        received = error.args
    waiting.cancel()
    while not waiting.done():
        try:
            await asyncio.wait((waiting,))
        except asyncio.CancelledError as error:
            received = error.args if received is None else received
    is_woken = not waiting.cancelled() and waiting.result()
    if received is None:
        return is_woken
    if is_woken:
        condition.notify()  # another one can use what this one was woken for
    raise asyncio.CancelledError(*received)
