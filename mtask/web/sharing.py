"""Answers of the database that all callers of the server share."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Shared(Generic[T]):
    """An answer of the database that costs much, so that all callers share one that is fresh enough."""

    #: The time for which an answer is fresh: in seconds, and as a multiple of the time that it took.
    FRESH, TIMES = 5.0, 10.0

    def __init__(self, read: Callable[[], Awaitable[T]]) -> None:
        self._read = read
        self._lock = asyncio.Lock()
        self._known: tuple[T, float] | None = None

    async def get(self) -> T:
        """Return the answer."""
        async with self._lock:
            began = time.monotonic()
            if self._known is not None and began < self._known[1]:
                return self._known[0]
            found = await self._read()
            ended = time.monotonic()
            self._known = found, ended + max(self.FRESH, self.TIMES * (ended - began))
            return found
