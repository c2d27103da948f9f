"""Carries out bulk changes beside the requests: those that this server began, and those that another process left."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress

from mtask.client import AsyncClient
from mtask.errors import MtaskError

logger = logging.getLogger("mtask.web")
#: The time between two searches for bulk changes that nobody carries out, in seconds.
_LOOK_EVERY = 30.0


class Bulks:
    """The bulk changes that this process carries out."""

    def __init__(self, client: AsyncClient, *, is_read_only: bool) -> None:
        self._client = client
        self._is_read_only = is_read_only
        self._loop: asyncio.AbstractEventLoop | None = None
        self._carried: dict[str, asyncio.Task[None]] = {}
        self._looking: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """Look for bulk changes that another process has left, now and then."""
        self._loop = asyncio.get_running_loop()
        if not self._is_read_only:
            self._looking = asyncio.create_task(self._look())

    def carry(self, bulk_id: str) -> None:
        """Carry a bulk change out, unless this process does already. Any thread may call this."""
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._carry_here, bulk_id)

    def _carry_here(self, bulk_id: str) -> None:
        if bulk_id not in self._carried:
            self._carried[bulk_id] = asyncio.create_task(self._carry(bulk_id))

    async def end(self) -> None:
        """Stop. Another process goes on once the leases have lapsed."""
        stopped = [*self._carried.values(), *([] if self._looking is None else [self._looking])]
        for each in stopped:
            each.cancel()
        if stopped:
            await asyncio.wait(stopped)

    async def _carry(self, bulk_id: str) -> None:
        try:
            await self._client.carry_bulk(bulk_id)
        except MtaskError as error:
            logger.warning("a bulk change was left: %s: %s", type(error).__name__, error)
        finally:
            del self._carried[bulk_id]

    async def _look(self) -> None:
        while True:
            with suppress(MtaskError):
                for found in await self._client.bulks(limit=1000):
                    if not found.is_over:
                        self.carry(found.bulk_id)
            await asyncio.sleep(_LOOK_EVERY)
