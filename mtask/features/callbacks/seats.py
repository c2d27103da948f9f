"""The seats of messages that are under way, shared so that no receiver and no tenant takes those of all others."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

#: The most messages that a worker sends at once.
MOST = 40


class Seats:
    """The seats. Whoever has some may have as many as are left for the others: half, then half of the rest, and so on.

    So a receiver that does not answer delays its own messages, and those of its tenant. Threads may ask at once.
    """

    def __init__(self, most: int) -> None:
        self._left = most
        self._of: Counter[str] = Counter()
        self._lock = threading.Lock()

    @contextmanager
    def taken(self, owners: Sequence[str]) -> Iterator[bool]:
        """Take a seat for these owners during the block; give whether there was one."""
        with self._lock:
            is_taken = all(self._of[owner] < self._left for owner in owners)
            if is_taken:
                self._left -= 1
                self._of.update(owners)
        try:
            yield is_taken
        finally:
            if is_taken:
                with self._lock:
                    self._left += 1
                    self._of.subtract(owners)
                    self._of = +self._of  # without those that have none
