"""The rate at which the runs of executors end. It decides how many runs may wait for an executor."""

from __future__ import annotations

from collections.abc import Callable
from math import exp
from time import monotonic

#: As many runs as end within this time, in seconds, may wait for an executor. So executors do not wait for a claim, and
#: runs wait little for an executor.
_AHEAD = 0.3
#: The most runs that wait, as a multiple of the number of executors.
_MAX_TIMES = 50
#: The time constant of the moving average of the rate at which runs end, in seconds.
_MEMORY = 0.5


class Rate:
    """The number of runs that end per second: a moving average, which falls while none ends."""

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._at = clock()
        self._rate = 0.0

    def ended(self) -> None:
        """Note that a run has ended."""
        self._rate = self.now + 1 / _MEMORY
        self._at = self._clock()

    def forget(self) -> None:
        """Reset the average: a run has waited too long."""
        self._rate = 0.0

    @property
    def now(self) -> float:
        """The runs that end per second."""
        return self._rate * exp((self._at - self._clock()) / _MEMORY)


def ahead(rate: float, executors: int) -> int:
    """Return the number of runs that may wait for an executor, if this many runs end per second."""
    return min(int(rate * _AHEAD), _MAX_TIMES * executors)
