"""The rooms of one server: what its callers share, and what each of them may have of it."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any, TypeVar, TypeVarTuple, Unpack

from mtask.client import AsyncClient
from mtask.web.access import Caller
from mtask.web.problems import Busy
from mtask.web.settings import WebSettings


class Rooms:
    """What the callers of one server share."""

    def __init__(self, settings: WebSettings, make_client: MakeClient) -> None:
        most = settings.connections
        few = most // 4  # of each kind of what lasts, so that all together leave connections for requests
        self.requests = Shares(most, "the requests at once")
        self.streams = Shares(min(settings.max_streams, few), "the event streams", each=settings.max_streams_each)
        self.pages = Shares(min(settings.max_pages, few), "the live pages")
        self.waiters = Shares(min(settings.max_waiters, few), "the waits")
        self.catch_ups = Shares(settings.max_catch_ups, "the streams of old events")
        self.bodies = Shares(settings.max_held_bytes, "the room for large bodies")
        self.values = Shares(settings.max_held_values, "the room for large bodies")
        #: Where requests with large bodies are answered.
        self.apart = Apart(make_client)


# --- shares ----------------------------------------------------------------------------------------------

# What the server has little of is divided among its callers, so that none of them cuts the others off.
#
# One rule divides everything: a caller may have as much as is left for the others. So the first caller gets half, the
# next one half of the rest, and whoever comes gets something.


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


# --- apart -----------------------------------------------------------------------------------------------

# The room apart: a second event loop, in a thread of its own, for requests with large bodies.
#
# What such a request costs is computing: to parse the body, to check it, and to encode it for the database. On the
# event loop of the server, all other requests would wait for that. The two loops take turns, so the others go on.
# Bodies are parsed one after the other in a third thread: so those that are parsed leave time for the answers of the
# database.

T = TypeVar("T")
Given = TypeVarTuple("Given")
_TURN = 0.001
#: Makes a client of the server's database. A client of the driver belongs to one event loop.
MakeClient = Callable[[], AsyncClient]


class Apart:
    """The second event loop. It begins with the first request that needs it."""

    def __init__(self, make_client: MakeClient) -> None:
        self._make_client = make_client
        self._client: AsyncClient | None = None
        self._parsing = ThreadPoolExecutor(1, "mtask web parsing")
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    async def compute(self, function: Callable[[Unpack[Given]], T], *given: *Given) -> T:
        """Call a function that only computes, when those before it have ended. What it raises is raised."""
        return await asyncio.get_running_loop().run_in_executor(self._parsing, function, *given)

    async def run(self, work: Callable[[AsyncClient], Coroutine[Any, Any, T]]) -> T:
        """Run the work there, with the client of that loop. What it raises is raised."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._run(work), self._begun()))

    async def end(self) -> None:
        """End the loop, and close its client. What still runs there is canceled."""
        self._parsing.shutdown(wait=False, cancel_futures=True)
        if self._loop is None or self._thread is None:
            return
        await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._close(), self._loop))
        self._loop.call_soon_threadsafe(self._loop.stop)
        await asyncio.to_thread(self._thread.join)
        self._loop.close()
        self._loop = None

    def _begun(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            # An answer takes some turns of the server's loop, and each waits for this time, in seconds, while others
            # compute. Python's own is 0.005.
            sys.setswitchinterval(_TURN)
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(target=self._loop.run_forever, name="mtask web apart", daemon=True)
            self._thread.start()
        return self._loop

    async def _run(self, work: Callable[[AsyncClient], Coroutine[Any, Any, T]]) -> T:
        if self._client is None:
            self._client = self._make_client()
        return await work(self._client)

    async def _close(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        if others:
            await asyncio.wait(others)
        if self._client is not None:
            await self._client.close()
