"""The janitor of callbacks: publishes the tasks that tell ends of tasks, where no process has done it yet.

The loop in `Scans.run` calls it at intervals, and again after the database has failed.
"""

from __future__ import annotations

from typing import Any

from mtask.errors import OperationFailed
from mtask.features.callbacks import operations as callbacks
from mtask.worker.discovery.janitors.undone import Undone, look_after, warn_of_refusal
from mtask.worker.state.scope import Scope

#: While no callbacks are known, each n-th regular scan looks whether any are owed: once a minute. This worker knows of
#: them by its first claim of a task with a callback.
_EVERY = 12
#: The most batches that one scan settles. A batch that cannot be settled now must not hold up the scan.
_ROUNDS = 20

Document = dict[str, Any]


class CallbackJanitor:
    """Finds ends of tasks that are still to be told. Several workers may find the same ones: each is told by one."""

    def __init__(self, scope: Scope) -> None:
        self._ledger = scope.ledger
        self._store = scope.store
        self._owed: Undone[Document] = Undone(
            scope.store, callbacks.settle, lambda row: row["_id"], "callback not published"
        )

    async def look_after(self, count: int) -> None:
        """Settle what is owed. `count` is the number of regular scans before this one.

        A database without callbacks only costs a look now and then.
        """
        if count % _EVERY == _EVERY - 1:
            await self.look_for_callbacks()
        if self._ledger.has_callbacks:
            await look_after("callbacks", self._settle_owed)

    async def look_for_callbacks(self) -> None:
        """Look whether the database holds ends that are to be told, unless that is known."""
        if self._ledger.has_callbacks:
            return
        try:
            self._ledger.has_callbacks = await self._store.run(callbacks.is_any())
        except OperationFailed as error:
            warn_of_refusal("callbacks", error)

    async def _settle_owed(self) -> None:
        for _ in range(_ROUNDS):
            rows = await self._store.run(callbacks.find(self._owed.left_alone()))
            await self._owed.settle(rows)
            if len(rows) < callbacks.BATCH:
                break
