"""The tempo of the database: the usual duration of statements, and a time limit that is computed from it.

The time limit is for statements that may meet a locked document.
"""

from __future__ import annotations

#: The time after which a document counts as locked, as a multiple of the usual duration of a statement.
_TIMES = 3.0
#: If a statement takes less than the usual duration, the usual duration shrinks by this fraction of the difference.
_DECAY = 0.1


class Tempo:
    """The usual duration of statements on tasks. All parts of a worker share this object, and several threads use it.

    An open transaction locks each document that it has written. A statement on a locked document waits for the end of
    the transaction, in the worst case for minutes. All other tasks in the same statement wait, too.

    But a statement also takes long if the server is busy. So the time limit of a statement follows the slowest of the
    recent statements.
    """

    def __init__(self, usual: float) -> None:
        """`usual`: the duration that is assumed, in seconds, until a statement was measured."""
        self._usual = usual

    def took(self, seconds: float) -> None:
        """Note the duration of a statement, in seconds.

        The statement was answered, or it was given up because the server is busy.
        """
        self._usual = max(seconds, self._usual + _DECAY * (seconds - self._usual))

    def limit(self, least: float, most: float) -> float:
        """Return the time limit of a statement that may meet a locked document: `least` to `most`, in seconds."""
        return min(most, max(least, _TIMES * self._usual))
