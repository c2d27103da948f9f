"""Estimates the server's clock. The estimate only suggests when to try; the server decides."""

from __future__ import annotations

import time
from datetime import UTC, datetime


class ServerClock:
    """Maps the server's instants to this process's monotonic clock.

    The wall clock of this machine is never read: it may be wrong by minutes. A reading of the server's clock was
    taken at an unknown time between `sent` and `received` (monotonic seconds). So it gives two bounds of the estimate.
    """

    def __init__(self, server_time: datetime, sent: float, received: float) -> None:
        # The first estimate assumes that the server's clock was read when the reply arrived. So the estimate lags by at
        # most a round trip: attempts come late by that time, never early.
        self._offset = server_time.timestamp() - received
        self.observe(server_time, sent, received)

    def observe(self, server_time: datetime, sent: float, received: float) -> None:
        """Keep the estimate if it lies within the bounds of this reading; else move it to the nearer bound.

        So a slow reply does not spoil the estimate from a quick reply, and the estimate follows a drift or a step of
        either clock. `sent` and `received` are monotonic seconds.
        """
        shown = server_time.timestamp()
        self._offset = min(max(self._offset, shown - received), shown - sent)

    def monotonic_of(self, instant: datetime) -> float:
        """Return the monotonic instant (seconds) at which the server's clock shows this time."""
        return instant.timestamp() - self._offset

    def now(self) -> datetime:
        """Return the estimate of the server's time now."""
        return datetime.fromtimestamp(time.monotonic() + self._offset, tz=UTC)
