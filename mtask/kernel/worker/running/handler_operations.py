"""Handler operations: run what handlers ask of the database, on the connections for handlers."""

from __future__ import annotations

from collections.abc import Mapping

from mtask.errors import DatabaseUnavailable
from mtask.kernel.document.handlers import Handler
from mtask.kernel.driver.operation import Operation, T
from mtask.kernel.worker.running.handler_stores import HandlerStores

_STOPPED = "the worker has stopped"


class RunOperations:
    """Runs the operations of this worker's handlers."""

    def __init__(self, stores: HandlerStores, handlers: Mapping[str, Handler]) -> None:
        self._stores = stores
        self.handlers = handlers

    async def run(self, operation: Operation[T]) -> T:
        """Run an operation for an async handler; raise a subclass of DatabaseError."""
        store = self._stores.for_async()
        if store is None:
            raise DatabaseUnavailable(_STOPPED)
        return await store.run(operation)

    def run_sync(self, operation: Operation[T]) -> T:
        """Run an operation for a sync handler, in its thread; raise a subclass of DatabaseError."""
        store = self._stores.for_sync()
        if store is None:
            raise DatabaseUnavailable(_STOPPED)
        return store.run(operation)
