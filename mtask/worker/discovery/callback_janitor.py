"""The janitor of callbacks: publishes the tasks that tell ends of tasks, where no process has done it yet.

The loop in `Scans.run` calls it at intervals, and again after the database has failed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import timedelta
from time import monotonic
from typing import Any

from mtask.errors import DatabaseTimeout, DatabaseUnavailable, MtaskError, OperationFailed
from mtask.store import callbacks
from mtask.store.driver.operation import within
from mtask.worker.log import fields, logger
from mtask.worker.state.scope import Scope

#: While no callbacks are known, each n-th regular scan looks whether any are owed: once a minute. This worker knows of
#: them by its first claim of a task with a callback.
_EVERY = 12
#: The most tasks that are settled together. Several workers may find the same ones, and publish each delivery once.
_GROUP = 100
#: The most batches that one scan settles.
_ROUNDS = 20
#: The time limit for settling a task alone, whose document may be locked, and the most that are settled so at once.
_ALONE_TIMEOUT, _MAX_ALONE = timedelta(seconds=1), 16
#: The first and the longest pause of a task that cannot be settled, in seconds, and the most that are remembered.
_PAUSE, _MAX_PAUSE, _MAX_HELD_UP = 5.0, 300.0, 1_000

Document = dict[str, Any]


class CallbackJanitor:
    """Finds ends of tasks that are still to be told."""

    def __init__(self, scope: Scope) -> None:
        self._scope = scope
        self._store = scope.store
        #: The tasks that could not be settled: until when they are left alone (monotonic seconds), and the last pause.
        self._held_up: dict[Any, tuple[float, float]] = {}

    async def look_after(self, count: int) -> None:
        """Settle what is owed. `count` is the number of regular scans before this one.

        A database without callbacks only costs a look now and then.
        """
        ledger = self._scope.ledger
        try:
            if count % _EVERY == _EVERY - 1:
                await self.look_for_callbacks()
            if ledger.has_callbacks:
                await self._settle_owed()
        except OperationFailed as error:
            self._warn(error)
        except DatabaseTimeout as error:
            logger.warning("callbacks not looked after, a document may be locked", extra=fields(reason=str(error)))
        except DatabaseUnavailable:
            raise
        except Exception:
            logger.exception("callbacks not looked after")

    async def look_for_callbacks(self) -> None:
        """Look whether the database holds ends that are to be told, unless that is known."""
        ledger = self._scope.ledger
        try:
            ledger.has_callbacks = ledger.has_callbacks or await self._store.run(callbacks.is_any())
        except OperationFailed as error:
            self._warn(error)

    def _warn(self, error: OperationFailed) -> None:
        # An index is missing, for example. The tasks of the users must not wait for that.
        logger.warning("callbacks not looked after; run `mtask init`", extra=fields(reason=str(error)))

    async def _settle_owed(self) -> None:
        for _ in range(_ROUNDS):
            now = monotonic()
            left = [task_id for task_id, (until, _) in self._held_up.items() if until > now]
            rows = await self._store.run(callbacks.find(left))
            for place in range(0, len(rows), _GROUP):
                await self._settle_group(rows[place : place + _GROUP])
            if len(rows) < callbacks.BATCH:
                break

    async def _settle_group(self, rows: Sequence[Document]) -> None:
        """Settle these tasks. If some cannot be settled, settle each apart, so that one holds up no other."""
        apart = [row for row in rows if row["_id"] in self._held_up]
        together = [row for row in rows if row["_id"] not in self._held_up]
        try:
            if together:
                await self._store.run(callbacks.settle(together))
        except DatabaseUnavailable as error:
            if not isinstance(error, DatabaseTimeout):
                raise
            apart += together
        except Exception:
            apart += together  # the one that cannot be settled is logged below
        at_once = asyncio.Semaphore(_MAX_ALONE)
        await asyncio.gather(*(self._settle_alone(row, at_once) for row in apart))

    async def _settle_alone(self, row: Document, at_once: asyncio.Semaphore) -> None:
        try:
            async with at_once:
                await self._store.run(within(callbacks.settle([row]), lambda: _ALONE_TIMEOUT))
            self._held_up.pop(row["_id"], None)
        except DatabaseUnavailable as error:
            if not isinstance(error, DatabaseTimeout):
                raise
            self._hold_up(row["_id"], error)
        except Exception as error:
            self._hold_up(row["_id"], error)

    def _hold_up(self, task_id: Any, error: Exception) -> None:
        """Leave this task alone for a while. Only its first failure is logged, and each pause is longer."""
        if task_id not in self._held_up:
            reason = str(error) if isinstance(error, MtaskError) else repr(error)
            logger.warning("callback not published, left alone for a while", extra=fields(task=task_id, reason=reason))
        _, pause = self._held_up.get(task_id, (0.0, _PAUSE / 2))
        pause = min(2 * pause, _MAX_PAUSE)
        self._held_up[task_id] = (monotonic() + pause, pause)
        if len(self._held_up) > _MAX_HELD_UP:
            del self._held_up[next(iter(self._held_up))]
