"""Callbacks in a worker: who delivers them, and who publishes those that no process has published yet."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeVar

from mtask.app.app import App
from mtask.errors import OperationFailed
from mtask.features.callbacks import operations
from mtask.features.callbacks.allowed import CallbackOptions
from mtask.features.callbacks.rules import DELIVERY_QUEUE
from mtask.kernel.worker.discovery.relays import Undone, look_after, warn_of_refusal
from mtask.kernel.worker.process.options import ProcessOptions
from mtask.kernel.worker.process.part import Part
from mtask.kernel.worker.process.state import Scope

#: While no callbacks are known, each n-th regular scan looks whether any are owed: once a minute. This worker knows of
#: them by its first claim of a task with a callback.
_EVERY = 12
#: The most batches that one scan settles. A batch that cannot be settled now must not hold up the scan.
_ROUNDS = 20

Document = dict[str, Any]
Options = TypeVar("Options", bound=ProcessOptions)


def extended(app: App, options: Options) -> tuple[App, Options]:
    """Let a worker with `CallbackOptions` deliver callbacks."""
    given = next((one for one in options.features if isinstance(one, CallbackOptions)), None)
    if given is None:
        return app, options
    from mtask.features.callbacks.sending import with_deliveries  # few workers deliver callbacks

    queues = None if options.queues is None else [*options.queues, DELIVERY_QUEUE]
    return with_deliveries(app, given, options.concurrency), replace(options, queues=queues)


class CallbackPart(Part):
    """Finds ends of tasks that are still to be told. Several workers may find the same ones: each is told by one."""

    def __init__(self, scope: Scope) -> None:
        self._owing = scope.ledger.owing
        self._store = scope.store
        self._owed: Undone[Document] = Undone(
            scope.store, operations.settle, lambda row: row["_id"], "callback not published"
        )

    async def upkeep(self, count: int, *, is_full: bool) -> None:
        """Settle what is owed. A database without callbacks only costs a look now and then."""
        if "callback" not in self._owing and (is_full or count % _EVERY == _EVERY - 1):
            await self._look()
        if "callback" in self._owing:
            await look_after("callbacks", self._settle_owed)

    async def _look(self) -> None:
        try:
            if await self._store.run(operations.is_any()):
                self._owing.add("callback")
        except OperationFailed as error:
            warn_of_refusal("callbacks", error)

    async def _settle_owed(self) -> None:
        for _ in range(_ROUNDS):
            rows = await self._store.run(operations.find(self._owed.left_alone()))
            await self._owed.settle(rows)
            if len(rows) < operations.BATCH:
                break
