"""The pace: how long slots are taken and claims take, and so how many tasks to claim for slots that will be free."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic

#: Claimed at most for slots that are still taken.
MAX_AHEAD = 700
#: So many runs, or claims, weigh as much as all that were before them.
_MEMORY = 500.0
_CLAIM_MEMORY = 20.0
#: Before so many runs have ended, nothing is known of how long they take.
_MIN_ENDED = 20.0


class Pace:
    """Measures slots and claims; both means follow what was lately.

    While a claim is under way, `slots * claim time / run time` runs end. Claiming so many more keeps the slots busy
    where handlers are quick; where they take long, it comes to none.
    """

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._since = clock()
        self._taken = 0
        self._slot_seconds = 0.0
        self._ended = 0.0
        self._claim_seconds = 0.0
        self._claims = 0.0

    def begin(self) -> None:
        """Take down that a slot is taken."""
        self._count()
        self._taken += 1

    def end(self) -> None:
        """Take down that a slot is free again."""
        self._count()
        self._taken -= 1
        self._ended += 1
        if self._ended >= 2 * _MEMORY:
            self._ended /= 2
            self._slot_seconds /= 2

    def claimed(self, seconds: float) -> None:
        """Take down how long a claim took."""
        self._claim_seconds += seconds
        self._claims += 1
        if self._claims >= 2 * _CLAIM_MEMORY:
            self._claims /= 2
            self._claim_seconds /= 2

    def forget(self) -> None:
        """Forget how long slots are taken: what was claimed ahead waited too long for one."""
        self._count()
        self._slot_seconds = self._ended = 0.0

    def ahead(self, slots: int) -> int:
        """Return how many tasks to claim beyond the slots that are free."""
        self._count()
        if not self._claims or self._ended < _MIN_ENDED:
            return 0
        run_seconds = self._slot_seconds / self._ended
        expected = slots * (self._claim_seconds / self._claims)
        return MAX_AHEAD if expected >= MAX_AHEAD * run_seconds else int(expected / run_seconds)

    def _count(self) -> None:
        now = self._clock()
        self._slot_seconds += self._taken * (now - self._since)
        self._since = now
