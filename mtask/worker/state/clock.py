"""The server's clock, as this process knows it: only a hint for when to try; the server decides."""

from __future__ import annotations

import time
from datetime import UTC, datetime


class ServerClock:
    """Maps the server's instants to this process's monotonic clock.

    The wall clock of this machine is never read: it may be wrong by minutes. A reading tells that the server's
    clock showed it some time between `sent` and `received` (monotonic seconds): two bounds, and no more.
    """

    def __init__(self, server_time: datetime, sent: float, received: float) -> None:
        # Counted from the reply, the estimate lags by at most a round trip: attempts come late by that, not early.
        self._offset = server_time.timestamp() - received
        self.observe(server_time, sent, received)

    def observe(self, server_time: datetime, sent: float, received: float) -> None:
        """Keep the estimate where it lies within the reading's bounds, else move it to the nearer one.

        So a slow answer spoils nothing that a quick one has told; a drift or a step of either clock is followed.
        """
        shown = server_time.timestamp()
        self._offset = min(max(self._offset, shown - received), shown - sent)

    def monotonic_of(self, instant: datetime) -> float:
        """Return the monotonic instant (seconds) at which the server's clock shows this."""
        return instant.timestamp() - self._offset

    def now(self) -> datetime:
        """Return about what the server's clock shows now."""
        return datetime.fromtimestamp(time.monotonic() + self._offset, tz=UTC)
