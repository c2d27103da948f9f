"""How densely a server is written to, told from its replies: what it costs to wait for news there depends on it."""

from __future__ import annotations

from enum import Enum
from math import inf

#: Writes a second, of any kind and by anybody, from which on it is dense; and below which it is not any more.
DENSE_FROM, DENSE_UNTIL = 1_000.0, 500.0
#: Writes a second from which on there is some traffic.
SOME_FROM = 50.0
#: How long it counts as dense after it was last seen to be, and as some traffic after that or news, in seconds: the end
#: of a group is not the end of the load.
DENSE_LASTS, SOME_LASTS = 2.0, 5.0
#: Between two times that are compared, in seconds at least.
WINDOW = 0.2


class Density(Enum):
    """How much is written to a server, whoever writes it."""

    STILL = "still"  #: next to nothing
    SOME = "some"
    DENSE = "dense"


class Traffic:
    """Tells the density of the writes to a server; there is some traffic until more is known.

    MongoDB numbers its writes anew in each second: two of its replies tell how many there were in between, or, where
    another second has begun, how many at least.
    """

    def __init__(self, now: float) -> None:
        """`now`, here and below: monotonic, in seconds."""
        self._second, self._number = -1, 0
        self._seen_at = -inf
        self._dense_at, self._some_at = -inf, now
        self.density = Density.SOME

    def note(self, second: int, number: int, now: float, *, is_news: bool = False) -> None:
        """Take the server's last write, as a reply told it: the second, and its number in that.

        `is_news`: the reply brought something.
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
