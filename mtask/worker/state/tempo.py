"""The tempo of the database: how long statements take at present, and so how long to wait for a locked document."""

from __future__ import annotations

#: A document counts as locked after this many times the usual duration of a statement.
_TIMES = 3.0
#: The part of the way that the usual duration goes towards a shorter one, at each statement.
_DECAY = 0.1


class Tempo:
    """How long statements on tasks take. Shared by all parts of a worker, and read and set from several threads.

    A statement that meets a document which an open transaction has written waits for the end of that transaction, for
    minutes if need be, and so do all other tasks of its group. A statement on a busy server takes long, too. So the
    time limit of a statement follows what the slowest of the last statements took.
    """

    def __init__(self, usual: float) -> None:
        """Begin with the duration of a statement that was just sent, in seconds."""
        self._usual = usual

    def took(self, seconds: float) -> None:
        """Learn how long a statement took that was answered, or given up because the server is busy."""
        self._usual = max(seconds, self._usual + _DECAY * (seconds - self._usual))

    def limit(self, least: float, most: float) -> float:
        """Return how long to wait for a statement that may meet a locked document, in seconds."""
        return min(most, max(least, _TIMES * self._usual))
