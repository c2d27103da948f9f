"""How densely a server is written to, told from its replies: what it costs to wait for news there depends on it."""

from __future__ import annotations

from math import inf

#: Writes a second, of any kind and by anybody, from which on it is dense; and below which it is not any more.
DENSE, SPARSE = 1_000.0, 500.0
#: Dense it is for so long after it was last seen to be, in seconds: a group's end is not the end of the load.
LASTS = 2.0
#: Between two times that are compared, in seconds at least.
WINDOW = 0.2


class Traffic:
    """Whether much is written to a server, whoever writes it.

    MongoDB numbers its writes anew in each second: two of its replies tell how many there were in between, or, where
    another second has begun, how many at least. Dense until something else is known.
    """

    def __init__(self, now: float) -> None:
        """`now`, here and below: monotonic, in seconds."""
        self._second, self._number = -1, 0
        self._seen_at = -inf
        self._dense_at = now
        self.is_dense = True

    def note(self, second: int, number: int, now: float) -> None:
        """Take the server's last write, as a reply told it: the second, and its number in that."""
        passed = now - self._seen_at
        if passed < WINDOW:
            return
        if self._second >= 0:
            written = number - self._number if second == self._second else number
            if written >= passed * (SPARSE if self.is_dense else DENSE):
                self._dense_at = now
            self.is_dense = now - self._dense_at < LASTS
        self._second, self._number, self._seen_at = second, number, now
