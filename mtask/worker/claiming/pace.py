"""The pace: measures how many runs end while a claim is under way. The worker claims tasks ahead for their slots."""

from __future__ import annotations

from collections.abc import Callable
from math import exp
from time import monotonic

#: The longest time that a run that was claimed ahead waits for a slot, in seconds. Then it is handed back.
PATIENCE = 0.5
#: The number of tasks to claim ahead, as a multiple of the runs that end during a claim. It is more than 1, because the
#: next group gathers while one group is under way.
_SHARE = 2.0
#: The longest time, in seconds, for which tasks are claimed ahead: at most the number of runs that end within it.
_MAX_SPAN = 0.25
#: The time constant of the moving average, in seconds.
_MEMORY = 0.25
#: The time without claims after which nothing is claimed ahead, in seconds. In the average, longer times count as this.
_PAUSE = 1.0
#: The weight of the last claim in the moving average of their durations.
_CLAIM_SHARE = 0.4
#: The most tasks to claim ahead, as a multiple of the slots: if the process dies, each held task waits for the lapse of
#: its lease.
_MAX_TIMES = 10


class Pace:
    """Measures how many runs end per second and how long claims take.

    With quick handlers, claiming ahead keeps the slots busy during a claim. More tasks in hand let more runs end during
    the next claim, until the process is at its capacity. With slow handlers, hardly any run ends during a claim, and
    nothing is claimed ahead.
    """

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._landed_at = clock()
        self._ended_since = 0
        self._ended = self._seconds = self._claim_seconds = 0.0
        self._ahead = 0

    def ended(self) -> None:
        """Note that a run has ended."""
        self._ended_since += 1

    def claimed(self, seconds: float) -> None:
        """Note that a claim has landed after this many seconds."""
        now = self._clock()
        since = min(now - self._landed_at, _PAUSE)
        memory = exp(-since / _MEMORY)
        self._landed_at = now
        self._ended = memory * self._ended + self._ended_since
        self._seconds = memory * self._seconds + since
        self._ended_since = 0
        self._claim_seconds += _CLAIM_SHARE * (seconds - self._claim_seconds)
        rate = self._ended / self._seconds if self._seconds > 0 else 0.0
        self._ahead = int(rate * min(_SHARE * self._claim_seconds, _MAX_SPAN))

    def forget(self) -> None:
        """Reset the averages: a run that was claimed ahead has waited too long for a slot."""
        self._ended = self._seconds = 0.0
        self._ended_since = self._ahead = 0

    def ahead(self, slots: int) -> int:
        """Return the number of tasks to claim beyond the free slots; 0 after a pause. `slots`: all slots."""
        return min(self._ahead, _MAX_TIMES * slots) if self._clock() - self._landed_at < _PAUSE else 0
