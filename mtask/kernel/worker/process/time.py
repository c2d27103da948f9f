"""Estimates the time of the server's clock. The estimate only suggests when to try a claim. The server decides."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from math import inf

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
