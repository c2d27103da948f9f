"""Endurance: a loop of the worker outlives what nobody foresaw, instead of taking the process with it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from time import monotonic

from mtask.worker.log import fields, logger

#: Between two tries, in seconds: twice as long each time, and at most.
_PAUSE, _MAX_PAUSE = 0.1, 5.0
#: A loop that has lasted so long, in seconds, begins with the first pause again.
_CALM = 30.0


async def enduring(loop: Callable[[], Awaitable[None]]) -> None:
    """Run a loop to its end; where it raises what it does not expect, log that, pause, and run it again."""
    pause = _PAUSE
    while True:
        began = monotonic()
        try:
            await loop()
        except Exception:
            # One line each time: what fails at once is paused for, so the log does not fill up either.
            name = getattr(loop, "__qualname__", repr(loop))
            logger.exception("a loop of the worker failed, and goes on", extra=fields(loop=name))
        else:
            return
        pause = _PAUSE if monotonic() - began > _CALM else pause
        await asyncio.sleep(pause)
        pause = min(2 * pause, _MAX_PAUSE)
