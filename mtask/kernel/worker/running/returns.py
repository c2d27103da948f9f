"""Values that handlers return after their transactions have committed: stores them, or says that they are lost."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

from mtask.app.next import Next
from mtask.errors import DatabaseUnavailable, MtaskError
from mtask.features.encryption import encrypt as sealing
from mtask.features.encryption.cipher import RETURNS
from mtask.kernel.driver.operation import Operation
from mtask.kernel.driver.stores import AsyncStore
from mtask.kernel.operations import transactions
from mtask.kernel.worker.process.log import fields, logger, told
from mtask.kernel.worker.process.timing import Backoff
from mtask.kernel.worker.running.call import Called
from mtask.kernel.worker.running.outcomes import ExecutorDied, checked, describe, name_of
from mtask.kernel.worker.running.run import HeldRun

T = TypeVar("T")
#: The pauses between tries while the database is away, in seconds.
_PAUSE, _MAX_PAUSE = 0.1, 2.0


class LateReturns:
    """Stores what handlers return after their transactions have committed."""

    def __init__(self, store: AsyncStore) -> None:
        self._store = store

    async def store(self, run: HeldRun, value: Any, lost: str | None) -> None:
        """Store the value, or why it is lost. While the database is away, try again, until the worker ends."""
        try:
            if lost is None:
                lost = await self._stored(run, value)
            if lost is not None:
                reason = lost
                await self._surely(run, lambda: transactions.lose_return(run.task_id, run.run_id, reason))
        except MtaskError as error:  # the mark stays until the worker ends
            _say_lost(run, told(error))

    async def _stored(self, run: HeldRun, value: Any) -> str | None:
        """Store the value. Return why that cannot be done, or None."""

        def storing() -> Operation[bool]:
            sealed = yield from sealing.seal_value(run.task, RETURNS, value)
            return (yield from transactions.store_return(run.task_id, run.run_id, sealed))

        try:
            if not await self._surely(run, storing):
                _say_lost(run, "it came too late")
        except MtaskError as error:
            reason = f"the handler's return value was refused: {told(error)}"
            _say_lost(run, reason)
            return reason
        return None

    async def _surely(self, run: HeldRun, make: Callable[[], Operation[T]]) -> T:
        pauses = Backoff(_PAUSE, _MAX_PAUSE)
        while True:
            try:
                return await self._store.run(make())
            except DatabaseUnavailable as error:
                logger.warning(
                    "returns not stored yet", extra=fields(task=run.task_id, run=run.run_id, reason=told(error))
                )
                await asyncio.sleep(pauses.next())


def late_value(run: HeldRun, called: Called) -> tuple[Any, str | None]:
    """Return the value that a handler returned after its transaction had committed, and why it cannot be stored.

    To read it runs code of the app. Whatever that raises, the value is lost.
    """
    try:
        return _late_value(run, called)
    except BaseException as error:
        reason = f"what the handler returned or raised cannot be read: {describe(error)}"
        _say_lost(run, reason)
        return None, reason


def _late_value(run: HeldRun, called: Called) -> tuple[Any, str | None]:
    if called.lost is not None:
        return None, called.lost
    if called.raised is not None:
        logger.error(
            "handler failed after its transaction had committed: the task stays SUCCESS",
            extra=fields(task=run.task_id, run=run.run_id),
            exc_info=called.raised,
        )
        is_dead = isinstance(called.raised, ExecutorDied)
        what = f"executor {called.raised}," if is_dead else f"the handler raised {name_of(called.raised)}"
        return None, f"{what} after its transaction had committed"
    if run.has_result and not run.owes_value:
        return None, None  # the result is in the commit
    returned = run.result if run.has_result else called.returned
    if isinstance(returned, Next):
        reason = "Next came after the transaction had committed: call context.set_result(Next(...)) in the block"
        logger.error(reason, extra=fields(task=run.task_id, run=run.run_id))
        return None, reason
    value, _, refused = checked(returned)
    if refused:
        logger.error(refused, extra=fields(task=run.task_id, run=run.run_id))
    return value, refused


def _say_lost(run: HeldRun, reason: str) -> None:
    logger.error("returns not stored", extra=fields(task=run.task_id, run=run.run_id, reason=reason))
