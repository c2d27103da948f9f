"""The pace: how many runs end while a claim is under way, and so how many to claim for slots that will be free."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic

#: No claim is taken to last longer, in seconds: what was claimed ahead waits no longer than this for its slot.
MAX_WAIT = 0.25
#: Of what ends while a claim is under way: one goes, one gathers, so that groups are large.
_SHARE = 2.0
#: What was before the last claim counts so much.
_MEMORY = 0.6
#: After such a pause, in seconds, it begins anew.
_PAUSE = 1.0


class Pace:
    """Measures how many runs end in a second, and how long claims take.

    Claiming ahead what will end meanwhile keeps the slots busy where handlers are quick: with more at hand more end
    during the next claim, until the process can do no more. Where handlers take long, it comes to none. And no more is
    held than is about to run: the fewer wait for a lease to lapse if the process dies.
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
        since, self._landed_at = now - self._landed_at, now
        ended, self._ended_since = self._ended_since, 0
        if since > _PAUSE:
            self.forget()
            return
        self._ended = _MEMORY * self._ended + ended
        self._seconds = _MEMORY * self._seconds + since
        self._claim_seconds += (1 - _MEMORY) * (min(seconds, MAX_WAIT) - self._claim_seconds)
        rate = self._ended / self._seconds if self._seconds > 0 else 0.0
        self._ahead = int(_SHARE * rate * self._claim_seconds)

    def forget(self) -> None:
        """Begin anew: what was claimed ahead has waited too long for a slot."""
        self._ended = self._seconds = 0.0
        self._ahead = 0

    @property
    def ahead(self) -> int:
        """How many tasks to claim beyond the slots that are free."""
        return self._ahead
