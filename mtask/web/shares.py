"""Shares: what the server has little of is divided among its callers, so that none of them cuts the others off.

One rule divides everything: a caller may have as much as is left for the others. So the first caller gets half, the
next one half of the rest, and whoever comes gets something.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress

from mtask.web.access import Caller
from mtask.web.problems import Busy


class Shares:
    """What there is of one thing, and what each token and each tenant has of it."""

    def __init__(self, total: int, what: str, *, each: int | None = None) -> None:
        self._total, self._what, self._each = total, what, each
        self._of_tokens: Counter[str] = Counter()
        self._of_tenants: Counter[str] = Counter()
        self._used = 0
        self._waiting: list[asyncio.Future[None]] = []

    @property
    def used(self) -> int:
        """What all callers have."""
        return self._used

    def admits(self, caller: Caller, amount: int = 1) -> bool:
        """Whether the caller may have so much more."""
        own = self._of_tokens[caller.name]
        if self._each is not None and own + amount > self._each:
            return False
        # The tokens of one tenant share what the tenant may have by the same rule.
        of_tenant = 0 if caller.tenant is None else self._of_tenants[caller.tenant]
        return own + of_tenant <= self._total - self._used - amount

    @contextmanager
    def taken(self, caller: Caller, amount: int = 1) -> Iterator[None]:
        """Give the caller so much during the block; raise Busy."""
        if not self.admits(caller, amount):
            raise self._busy()
        self._change(caller, amount)
        try:
            yield
        finally:
            self._change(caller, -amount)

    @asynccontextmanager
    async def awaited(self, caller: Caller, amount: int, patience: float) -> AsyncIterator[None]:
        """Give the caller so much during the block, once there is enough; raise Busy after `patience` seconds."""
        with suppress(TimeoutError):  # then `taken` says that there is not enough
            async with asyncio.timeout(patience):
                while not self.admits(caller, amount):
                    given_back = asyncio.get_running_loop().create_future()
                    self._waiting.append(given_back)
                    await given_back
        with self.taken(caller, amount):
            yield

    def _change(self, caller: Caller, amount: int) -> None:
        waiting, self._waiting = self._waiting, []
        for one in waiting:  # each looks again, in the order in which they came
            if not one.done():
                one.set_result(None)
        self._used += amount
        for counted, who in ((self._of_tokens, caller.name), (self._of_tenants, caller.tenant)):
            if who is not None:
                counted[who] += amount
                if not counted[who]:
                    del counted[who]

    def _busy(self) -> Busy:
        return Busy(f"You have all {self._what} that the server has for you at the moment. Try again in a second.")
