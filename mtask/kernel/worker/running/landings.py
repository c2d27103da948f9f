"""Landings: the claims of groups land in the order in which they began, unless one is late.

Several groups are claimed at once, each on a connection of its own. The tasks of an earlier group go first. So a group
whose reply has come waits for earlier ones, but not for one whose reply seems lost: slots may be free meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager, suppress

#: The longest wait for earlier claims: in seconds, or as a multiple of the time that the claim itself took.
_LEAST_WAIT, _PATIENCE = 0.25, 2.0


class Landings:
    """The claims of groups that are under way."""

    def __init__(self) -> None:
        self._under_way: dict[int, asyncio.Event] = {}  # in the order in which they began
        self._begun_cnt = 0

    @contextmanager
    def begin(self) -> Iterator[int]:
        """Return the number of a claim that begins. It lands at the end of the context, and others wait until then."""
        self._begun_cnt += 1
        number, landed = self._begun_cnt, asyncio.Event()
        self._under_way[number] = landed
        try:
            yield number
        finally:
            del self._under_way[number]
            landed.set()

    async def wait_for_earlier(self, number: int, took: float) -> None:
        """Wait until the claims that began earlier have landed. `took`: the time that this claim took, in seconds."""
        earlier = [landed for other, landed in self._under_way.items() if other < number]
        if earlier:
            with suppress(TimeoutError):
                async with asyncio.timeout(max(_LEAST_WAIT, _PATIENCE * took)):
                    for landed in earlier:
                        await landed.wait()
