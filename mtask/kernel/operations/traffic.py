"""Estimates the density of writes on a server from its replies.

The cost of waiting in a change stream depends on this density.
"""

from __future__ import annotations

from enum import Enum
from math import inf

#: Rates of writes per second, by all clients. Traffic becomes dense when the rate reaches DENSE_FROM. It stays dense
#: until the rate falls below DENSE_UNTIL.
DENSE_FROM, DENSE_UNTIL = 1_000.0, 500.0
#: The lowest rate at which traffic counts as `SOME`, in writes per second.
SOME_FROM = 50.0
#: Traffic counts as dense until DENSE_LASTS seconds after its rate was last dense. It counts as `SOME` until SOME_LASTS
#: seconds after its rate last reached SOME_FROM, or after the last event. Load comes in bursts, so these times bridge
#: pauses.
DENSE_LASTS, SOME_LASTS = 2.0, 5.0
#: The least time between two replies that are compared, in seconds.
WINDOW = 0.2


class Density(Enum):
    """The rate of writes to a server, by all clients."""

    STILL = "still"  #: almost no writes
    SOME = "some"
    DENSE = "dense"


class Traffic:
    """Estimates the density of writes on a server. The estimate begins with `SOME`.

    MongoDB numbers the writes within each second. So the numbers in two replies tell how many writes came in between.
    If a new second has begun in between, the number in the later reply is a lower bound.
    """

    def __init__(self, now: float) -> None:
        """Begin the estimate. In each method, `now` is a monotonic time, in seconds."""
        self._second, self._number = -1, 0
        self._seen_at = -inf
        self._dense_at, self._some_at = -inf, now
        self.density = Density.SOME

    @property
    def is_dense(self) -> bool:
        """Whether writes are so dense that waiting in a change stream costs the server too much."""
        return self.density is Density.DENSE

    def note(self, second: int, number: int, now: float, *, is_news: bool = False) -> None:
        """Record the server's last write from a reply: its second, and its number in that second.

        `is_news` says that the reply contained an event.
        """
        if is_news:
            self._some_at = now
        passed = now - self._seen_at
        if passed >= WINDOW:
            if self._second >= 0:
                self._compare(number - self._number if second == self._second else number, passed, now)
            self._second, self._number, self._seen_at = second, number, now
        if now - self._dense_at < DENSE_LASTS:
            self.density = Density.DENSE
        else:
            self.density = Density.SOME if now - self._some_at < SOME_LASTS else Density.STILL

    def _compare(self, written: int, passed: float, now: float) -> None:
        if written >= passed * (DENSE_UNTIL if self.density is Density.DENSE else DENSE_FROM):
            self._dense_at = now
        if written >= passed * SOME_FROM:
            self._some_at = now
