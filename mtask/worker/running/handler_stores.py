"""Clients for the transactions of handlers: apart from those by which the engine claims, pings and finishes."""

from __future__ import annotations

import asyncio
import threading

from mtask.store.driver import connect
from mtask.store.driver.stores import AsyncStore, SyncStore


class HandlerStores:
    """Two stores, one for async handlers and one for plain ones, each made when the first transaction asks for it.

    What a handler does in its transaction may take long. In a pool of its own it takes no connection from pings, and
    no time limit of the engine's ends it.
    """

    def __init__(self, uri: str, database: str, app_name: str) -> None:
        self._uri = uri
        self._database = database
        self._app_name = app_name
        self._lock = threading.Lock()
        self._async: AsyncStore | None = None
        self._sync: SyncStore | None = None
        self._is_closed = False

    def for_async(self) -> AsyncStore | None:
        """Return the store of async handlers, None once these are closed. To be called in the event loop."""
        if self._async is None and not self._is_closed:
            self._async = connect.async_store(self._uri, self._database, self._app_name)
        return self._async

    def for_plain(self) -> SyncStore | None:
        """Return the store of plain handlers, None once these are closed. To be called in any thread."""
        with self._lock:
            if self._sync is None and not self._is_closed:
                self._sync = connect.sync_store(self._uri, self._database, self._app_name)
            return self._sync

    async def close(self) -> None:
        """Close what was made, and make no more: a plain handler may outlive its worker."""
        with self._lock:
            self._is_closed = True
            made_async, self._async = self._async, None
            made_sync, self._sync = self._sync, None
        if made_async is not None:
            await made_async.close()
        if made_sync is not None:
            await asyncio.to_thread(made_sync.close)
