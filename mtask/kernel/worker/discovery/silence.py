"""Which silent workers count as dead: those that were seen to be silent for long."""

from __future__ import annotations

from collections.abc import Collection

#: The time for which a worker must be seen to be silent, in seconds. Its heartbeat has expired before. After the
#: database was away, the heartbeats of all workers may have expired, but each worker beats again sooner than this.
SILENCE = 15.0


class Silence:
    """Remembers since when workers are silent, by their incarnations."""

    def __init__(self) -> None:
        self._since: dict[str, float] = {}
        self._looked_at = 0.0

    def dead_among(self, silent: Collection[str], now: float) -> set[str]:
        """Return those that are silent for long. `now` is in monotonic seconds.

        Where nobody could look for long, the database was away. Then the time counts anew.
        """
        before = {} if now - self._looked_at > SILENCE else self._since
        self._looked_at = now
        self._since = {one: before.get(one, now) for one in silent}
        return {one for one, since in self._since.items() if now - since >= SILENCE}
