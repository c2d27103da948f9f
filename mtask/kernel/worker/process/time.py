"""Estimates the time of the server's clock. The estimate only suggests when to try a claim. The server decides."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from datetime import UTC, datetime
from math import inf
from time import monotonic

from mtask.kernel.worker.process.log import fields, logger

#: The time after which a bound is renewed, in seconds: the clocks may drift.
_RENEW = 10.0
#: The server's clock shows whole milliseconds: it may be later than it shows by this time, in seconds.
_TICK = 0.001

_EPOCH = datetime.fromtimestamp(0, UTC).replace(tzinfo=None)


class ServerClock:
    """Converts times of the server's clock into times of this process's monotonic clock.

    The wall clock of this machine is never read, because it may be wrong by minutes. The server reads its clock at an
    unknown time between `sent` and `received` (monotonic seconds). So each reading gives two bounds of the estimate.

    Times without a time zone are in UTC: batch queries read dates like this.
    """

    def __init__(self, server_time: datetime, sent: float, received: float) -> None:
        # The first estimate assumes that the server read its clock just when the reply arrived. So the estimate lags
        # behind the server's clock by at most a round trip. Attempts may come late by that time, but never early.
        self._offset = seconds_of(server_time) - received
        #: The least upper bounds of the offset: of the readings since `_renewed`, and of those before.
        self._bound = self._older_bound = inf
        self._renewed = sent
        self.observe(server_time, sent, received)

    def observe(self, server_time: datetime, sent: float, received: float) -> None:
        """Keep the estimate if it lies within the bounds of this reading. If not, move it to the nearer bound.

        So a slow reply does not spoil an estimate from a quick reply. And the estimate follows if either clock drifts
        or is set. `sent` and `received` are monotonic seconds.
        """
        shown = seconds_of(server_time)
        self._offset = min(max(self._offset, shown - received), shown - sent)
        if sent - self._renewed > _RENEW:
            self._older_bound = self._bound if sent - self._renewed <= 2 * _RENEW else inf
            self._bound, self._renewed = inf, sent
        self._bound = min(self._bound, shown + _TICK - sent)

    def monotonic_of(self, instant: datetime) -> float:
        """Return the monotonic instant (seconds) at which the server's clock shows this time."""
        return seconds_of(instant) - self._offset

    def monotonic(self, seconds: float) -> float:
        """Return the monotonic instant (seconds) of these seconds since 1970 on the server's clock."""
        return seconds - self._offset

    def latest(self, monotonic: float) -> float:
        """Return the latest time that the server's clock may show at this monotonic instant, in seconds since 1970."""
        return monotonic + max(self._offset, min(self._bound, self._older_bound))

    def instant_of(self, seconds: float) -> datetime:
        """Return the instant of these seconds since 1970. The server stores milliseconds."""
        return datetime.fromtimestamp(round(seconds, 3), tz=UTC)

    def now(self) -> datetime:
        """Return the estimate of the server's time now."""
        return datetime.fromtimestamp(time.monotonic() + self._offset, tz=UTC)


def seconds_of(instant: datetime) -> float:
    """Return the seconds since 1970."""
    return (instant - _EPOCH).total_seconds() if instant.tzinfo is None else instant.timestamp()


# --- tempo -----------------------------------------------------------------------------------------------

# The tempo of the database: the usual duration of statements, and a time limit that is computed from it.
#
# The time limit is for statements that may meet a locked document.

#: The time after which a document counts as locked, as a multiple of the usual duration of a statement.
_TIMES = 3.0
#: If a statement takes less than the usual duration, the usual duration shrinks by this fraction of the difference.
_DECAY = 0.1


class Tempo:
    """The usual duration of statements on tasks. All parts of a worker share this object, and several threads use it.

    An open transaction locks each document that it has written. A statement on a locked document waits for the end of
    the transaction, in the worst case for minutes. All other tasks in the same statement wait, too.

    But a statement also takes long if the server is busy. So the time limit of a statement follows the slowest of the
    recent statements.
    """

    def __init__(self, usual: float) -> None:
        """`usual`: the duration that is assumed, in seconds, until a statement was measured."""
        self._usual = usual

    def took(self, seconds: float) -> None:
        """Note the duration of a statement, in seconds.

        The statement was answered, or it was given up because the server is busy.
        """
        self._usual = max(seconds, self._usual + _DECAY * (seconds - self._usual))

    def limit(self, least: float, most: float) -> float:
        """Return the time limit of a statement that may meet a locked document: `least` to `most`, in seconds."""
        return min(most, max(least, _TIMES * self._usual))


# --- timing ----------------------------------------------------------------------------------------------

# Timing: waiting for a wake-up with a time limit, pauses between tries, and loops that survive unexpected errors.

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
