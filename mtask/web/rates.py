"""The limit of requests: each caller may send so many in a second, and some more at once."""

from __future__ import annotations

from collections import OrderedDict

#: The most callers that are remembered. One that is forgotten begins with a full measure.
_MOST = 10_000
#: The number of requests that a caller may send at once, in seconds of the usual rate.
_BURST = 2.0


class Rates:
    """A measure for each caller. It fills up with time, and each request takes one part of it."""

    def __init__(self, per_second: float, burst: float = _BURST) -> None:
        self._per_second = per_second
        self._most = max(1.0, per_second * burst)
        self._left: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def delay(self, caller: str, now: float, *, take: bool = True) -> float:
        """Take one request of a caller; return 0, or the seconds after which to send it again. `now`: in seconds.

        Without `take`, the caller keeps what it has.
        """
        if not self._per_second:
            return 0.0
        left, at = self._left.pop(caller, (self._most, now))
        left = min(self._most, left + max(0.0, now - at) * self._per_second)
        delay = 0.0 if left >= 1 else (1 - left) / self._per_second
        self._left[caller] = (left - 1 if take and not delay else left, now)
        if len(self._left) > _MOST:
            self._left.popitem(last=False)
        return delay
