"""The room apart: a second event loop, in a thread of its own, for requests with large bodies.

What such a request costs is computing: to parse the body, to check it, and to encode it for the database. On the event
loop of the server, all other requests would wait for that. The two loops take turns, so the others go on. Bodies are
parsed one after the other in a third thread: so those that are parsed leave time for the answers of the database.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar, TypeVarTuple, Unpack

from mtask.client import AsyncClient

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
