"""How long runs take in executors. This decides how many runs may wait for an executor."""

from __future__ import annotations

#: As many runs may wait for an executor as the executors run within this time, in seconds. So executors do not wait for
#: a claim, and runs wait little for an executor.
_AHEAD = 0.3
#: The most runs that wait, as a multiple of the number of executors.
_MAX_TIMES = 50
#: The weight of the newest run in the moving average of the durations of runs, if the run was longer than the average,
#: and if it was shorter. After long runs, the average must come down soon: executors would wait for claims meanwhile.
_LONGER, _SHORTER = 0.2, 0.5


class Rate:
    """The number of runs that the executors can end per second, by the durations of the latest runs.

    Counting the ends would not do: executors that wait for slow claims end few runs, and then too few are claimed.
    """

    def __init__(self) -> None:
        #: The moving average of the durations of runs, in seconds. None: not known.
        self._seconds: float | None = None

    def took(self, seconds: float) -> None:
        """Note that a run has taken this time in its executor."""
        if self._seconds is None:
            self._seconds = seconds
        else:
            weight = _LONGER if seconds > self._seconds else _SHORTER
            self._seconds += weight * (seconds - self._seconds)

    def forget(self) -> None:
        """Reset the average: a run has waited too long."""
        self._seconds = None

    def ahead(self, executors: int) -> int:
        """Return the number of runs that may wait for one of so many executors."""
        if self._seconds is None:
            return 0
        most = _MAX_TIMES * executors
        return most if self._seconds <= _AHEAD / _MAX_TIMES else min(most, int(executors * _AHEAD / self._seconds))
