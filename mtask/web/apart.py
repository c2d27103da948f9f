"""The room apart: a second event loop, in a thread of its own, for requests with large bodies.

What such a request costs is computing: to parse the body, to check it, and to encode it for the database. On the event
loop of the server, all other requests would wait for that. The two loops take turns, so the others go on. All large
requests share the one thread, so it holds them back, and not the server.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from mtask.client import AsyncClient

T = TypeVar("T")
#: Makes a client of the server's database. A client of the driver belongs to one event loop.
MakeClient = Callable[[], AsyncClient]


class Apart:
    """The second event loop. It begins with the first request that needs it."""

    def __init__(self, make_client: MakeClient) -> None:
        self._make_client = make_client
        self._client: AsyncClient | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    async def run(self, work: Callable[[AsyncClient], Coroutine[Any, Any, T]]) -> T:
        """Run the work there, with the client of that loop. What it raises is raised."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._run(work), self._begun()))

    async def end(self) -> None:
        """End the loop, and close its client. What still runs there is canceled."""
        if self._loop is None or self._thread is None:
            return
        await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._close(), self._loop))
        self._loop.call_soon_threadsafe(self._loop.stop)
        await asyncio.to_thread(self._thread.join)
        self._loop.close()
        self._loop = None

    def _begun(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
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
