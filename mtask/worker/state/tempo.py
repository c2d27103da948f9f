"""The tempo of the database: the usual duration of statements, and the time limit that follows from it.

The time limit is for statements that may meet a locked document.
"""

from __future__ import annotations

#: The time after which a document counts as locked, as a multiple of the usual duration of a statement.
_TIMES = 3.0
#: The fraction of the difference by which a shorter statement reduces the usual duration.
_DECAY = 0.1


class Tempo:
    """The usual duration of statements on tasks. All parts of a worker share it, from several threads.

    A statement on a document that an open transaction has written waits for the end of the transaction, for minutes in
    the worst case, and so do all other tasks of its group. But a statement on a busy server also takes long. So the
    time limit of a statement follows the slowest of the recent statements.
    """

    def __init__(self, usual: float) -> None:
        """`usual`: the duration of a first statement, in seconds."""
        self._usual = usual

    def took(self, seconds: float) -> None:
        """Note the duration of a statement that was answered, or given up because the server is busy, in seconds."""
        self._usual = max(seconds, self._usual + _DECAY * (seconds - self._usual))

    def limit(self, least: float, most: float) -> float:
        """Return the time limit of a statement that may meet a locked document: `least` to `most`, all in seconds."""
        return min(most, max(least, _TIMES * self._usual))
