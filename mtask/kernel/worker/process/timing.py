"""Timing: waiting for a wake-up with a time limit, pauses between tries, and loops that survive unexpected errors."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from contextlib import suppress
from time import monotonic

from mtask.kernel.worker.process.log import fields, logger

#: The first and the longest pause before a failed loop runs again, in seconds.
_PAUSE, _MAX_PAUSE = 0.1, 5.0
#: If a loop fails after it has run for longer than this time, in seconds, it begins with the first pause again.
_CALM = 30.0


async def wake_or_wait(wake: asyncio.Event, seconds: float | None) -> None:
    """Wait until the event is set, but for at most `seconds`; None: without a time limit."""
    if seconds is None:
        await wake.wait()
        return
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await wake.wait()


class Backoff:
    """The pauses between tries. Each pause is twice as long as the one before, up to the longest.

    A random factor varies each pause, so that many workers do not repeat a failed request at the same instant.
    """

    def __init__(self, first: float, longest: float) -> None:
        """`first` and `longest` are in seconds."""
        self._first = self._next = first
        self._longest = longest

    def next(self) -> float:
        """Return the next pause in seconds, multiplied by a random factor from 0.5 to 1.5."""
        pause, self._next = self._next, min(2 * self._next, self._longest)
        return pause * (0.5 + random.random())

    def reset(self) -> None:
        """Begin with the first pause again. Call this after a try has succeeded."""
        self._next = self._first


async def enduring(loop: Callable[[], Awaitable[None]]) -> None:
    """Run a loop to its end. If the loop raises an exception, log the exception, pause and run the loop again."""
    pauses = Backoff(_PAUSE, _MAX_PAUSE)
    while True:
        began = monotonic()
        try:
            await loop()
        except Exception:
            # Each error is logged. The pause keeps a loop that fails at once from filling up the log.
            name = getattr(loop, "__qualname__", repr(loop))
            logger.exception("a loop of the worker failed, and goes on", extra=fields(loop=name))
        else:
            return
        if monotonic() - began > _CALM:
            pauses.reset()
        await asyncio.sleep(pauses.next())
