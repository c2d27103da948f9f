"""Handler stores: the database connections for the transactions of handlers. The worker itself uses others."""

from __future__ import annotations

import threading

from mtask.features.encryption.cipher import Sealer
from mtask.kernel.driver import connect
from mtask.kernel.driver.stores import AsyncStore, SyncStore
from mtask.kernel.worker.process import aside


class HandlerStores:
    """Two stores, one for async and one for sync handlers. The first transaction of each kind opens its store.

    The statements in a handler's transaction may take long. They use a connection pool of their own, so they take no
    connection away from claims, pings and finishes. The worker's time limits do not apply to these statements.
    """

    def __init__(self, uri: str, database: str, app_name: str, sealer: Sealer | None = None) -> None:
        """`sealer` encrypts what handlers publish, and decrypts what they read."""
        self._uri = uri
        self._database = database
        self._app_name = app_name
        self._sealer = sealer
        self._lock = threading.Lock()
        self._async: AsyncStore | None = None
        self._sync: SyncStore | None = None
        self._is_closed = False

    def for_async(self) -> AsyncStore | None:
        """Return the store of async handlers; None after `close`. Call this in the event loop."""
        if self._async is None and not self._is_closed:
            self._async = connect.async_store(self._uri, self._database, self._app_name)
            self._async.sealer = self._sealer
        return self._async

    def for_sync(self) -> SyncStore | None:
        """Return the store of sync handlers; None after `close`. Any thread may call this."""
        with self._lock:
            if self._sync is None and not self._is_closed:
                self._sync = connect.sync_store(self._uri, self._database, self._app_name)
                self._sync.sealer = self._sealer
            return self._sync

    async def close(self) -> None:
        """Close the open stores. No store is opened after that, because a sync handler may outlive its worker."""
        with self._lock:
            self._is_closed = True
            made_async, self._async = self._async, None
            made_sync, self._sync = self._sync, None
        if made_async is not None:
            await made_async.close()
        if made_sync is not None:
            await aside.to_thread(made_sync.close)
