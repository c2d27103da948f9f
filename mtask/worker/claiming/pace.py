"""The pace: how many runs end while a claim is under way, and so how many to claim for slots that will be free."""

from __future__ import annotations

from collections.abc import Callable
from math import exp
from time import monotonic

#: How long what was claimed ahead waits for a slot, in seconds, before it is handed back.
PATIENCE = 0.5
#: So many times what ends while a claim is under way: one goes, one gathers, so that groups are large.
_SHARE = 2.0
#: No more than what ends within so many seconds, however long claims take.
_MAX_LOOK = 0.25
#: What was so many seconds ago counts about a third of what is now.
_MEMORY = 0.25
#: After such a pause, in seconds, what was is no guide; nor does a longer one weigh more.
_PAUSE = 1.0
_CLAIM_SHARE = 0.4
#: At most so many times the slots: the more is held, the more waits for its lease to lapse if the process dies.
_MAX_TIMES = 10


class Pace:
    """Measures how many runs end in a second, and how long claims take.

    Claiming ahead what will end meanwhile keeps the slots busy where handlers are quick: with more at hand more end
    during the next claim, until the process can do no more. Where handlers take long, it comes to none.
    """

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._landed_at = clock()
        self._ended_since = 0
        self._ended = self._seconds = self._claim_seconds = 0.0
        self._ahead = 0

    def ended(self) -> None:
        """Take down that a run has ended."""
        self._ended_since += 1

    def claimed(self, seconds: float) -> None:
        """Take down that a claim has landed, and how long it took."""
        now = self._clock()
        since = min(now - self._landed_at, _PAUSE)
        memory = exp(-since / _MEMORY)
        self._landed_at = now
        self._ended = memory * self._ended + self._ended_since
        self._seconds = memory * self._seconds + since
        self._ended_since = 0
        self._claim_seconds += _CLAIM_SHARE * (seconds - self._claim_seconds)
        rate = self._ended / self._seconds if self._seconds > 0 else 0.0
        self._ahead = int(rate * min(_SHARE * self._claim_seconds, _MAX_LOOK))

    def forget(self) -> None:
        """Begin anew: what was claimed ahead has waited too long for a slot."""
        self._ended = self._seconds = 0.0
        self._ended_since = self._ahead = 0

    def ahead(self, slots: int) -> int:
        """Return how many tasks to claim beyond the slots that are free, of so many; none after a pause."""
        return min(self._ahead, _MAX_TIMES * slots) if self._clock() - self._landed_at < _PAUSE else 0
