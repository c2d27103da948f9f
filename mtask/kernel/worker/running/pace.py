"""The pace: estimates how many slots become free during a claim. The worker claims tasks for these slots ahead."""

from __future__ import annotations

from collections.abc import Callable
from math import exp
from time import monotonic

#: The longest time for which a claimed run waits for a slot, in seconds. After this time the run is handed back.
PATIENCE = 0.5
#: The number of tasks to claim ahead, as a multiple of the number of runs that end during a claim. The runs that wait
#: keep the slots busy while claims or scans take long. And the larger the multiple, the sooner the worker is at its
#: capacity.
_SHARE = 8.0
#: The number of tasks claimed ahead is at most the number of runs that end within this time, in seconds.
_MAX_SPAN = 0.25
#: The number of tasks claimed ahead is at most this multiple of the number of runs that have ended lately. A few quick
#: runs do not show that the next ones are quick.
_EVIDENCE = 4
#: The time constant of the moving average of the rate at which runs end, in seconds.
_MEMORY = 0.25
#: The time without claims after which nothing is claimed ahead, in seconds. In the average, a longer time without
#: claims counts as this time. After such a time without runs, the rate is measured anew.
_PAUSE = 1.0
#: The weight of the newest claim in the moving average of the durations of claims.
_CLAIM_SHARE = 0.4
#: The most tasks to claim ahead, as a multiple of the number of slots. A limit is needed: if the process dies, each
#: claimed task waits until its lease lapses.
_MAX_TIMES = 10
#: The most bytes of params in a group, and the most bytes that are claimed ahead, as far as sizes can be foreseen.
_MAX_BYTES = 8 * 1024 * 1024
#: If params are smaller than before, the expected size shrinks by this fraction of the difference.
_SIZE_SHARE = 0.2


class Pace:
    """Measures how many runs end per second and how long claims take.

    If handlers are quick, slots become free while a claim is under way. Tasks that were claimed ahead keep these slots
    busy. With more tasks claimed ahead, more runs end during the next claim. So the number of tasks claimed ahead grows
    until the process is at its capacity. If handlers are slow, hardly any run ends during a claim, and nothing is
    claimed ahead. The time without runs does not count, so the first claims of a burst tell how quick its handlers are.
    """

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._landed_at = clock()
        #: The time at which the last run ended; None: there are runs, as far as this class knows.
        self._rests_since: float | None = self._landed_at
        self._ended_since = 0
        self._ended = self._seconds = self._claim_seconds = 0.0
        self._ahead = 0
        #: The size of a task's params that is expected, in bytes: that of the largest recent groups.
        self._size = 0.0

    def ended(self) -> None:
        """Note that a run has ended."""
        self._ended_since += 1

    def rests(self) -> None:
        """Note that no run is left."""
        self._rests_since = self._clock()

    def claimed(self, seconds: float) -> None:
        """Note that a claim has ended. `seconds`: the duration of the claim."""
        now = self._clock()
        since = now - self._landed_at
        rest = 0.0 if self._rests_since is None else now - self._rests_since
        self._landed_at, self._rests_since = now, None
        if rest >= _PAUSE:
            self.forget()  # the tasks of the next burst may be of another kind
        memory = exp(-min(since, _PAUSE) / _MEMORY)
        self._ended = memory * self._ended + self._ended_since
        self._seconds = memory * self._seconds + min(since - rest, _PAUSE)
        self._ended_since = 0
        share = _CLAIM_SHARE if self._claim_seconds else 1.0
        self._claim_seconds += share * (seconds - self._claim_seconds)
        rate = self._ended / self._seconds if self._seconds > 0 else 0.0
        self._ahead = int(min(rate * min(_SHARE * self._claim_seconds, _MAX_SPAN), _EVIDENCE * self._ended))

    def forget(self) -> None:
        """Reset the averages. Call this when a run that was claimed ahead has waited too long for a slot."""
        self._ended = self._seconds = 0.0
        self._ended_since = self._ahead = 0

    def read(self, count: int, size: int) -> None:
        """Note the number of tasks of a claimed group, and the size of their params in bytes.

        Large params take long to be read, and all of a group wait for them. They also fill the memory.
        """
        if count:
            mean = size / count
            self._size = max(mean, self._size + _SIZE_SHARE * (mean - self._size))

    def within_bytes(self, count: int) -> int:
        """Return this number of tasks, or the lower number, at least 1, that keeps their params within 8 MB."""
        return count if self._size * count <= _MAX_BYTES else max(1, int(_MAX_BYTES / self._size))

    def ahead(self, slots: int) -> int:
        """Return the number of tasks to claim beyond the free slots; 0 if the last claim ended too long ago.

        `slots`: the number of all slots.
        """
        return (
            self.within_bytes(min(self._ahead, _MAX_TIMES * slots)) if self._clock() - self._landed_at < _PAUSE else 0
        )
