"""Begins and ends the transactions of handlers.

`begin` renews the lease and pauses the pings. `end` commits the SUCCESS together with the handler's writes. The renewal
stores the id of the session in the task's document. So a worker that rescues the task can end the session (see
`mtask.kernel.operations.sessions`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from datetime import timedelta
from functools import partial
from time import monotonic
from typing import Any, Protocol, TypeVar
from uuid import UUID

from mtask.errors import DatabaseUnavailable, Fail, InvalidInput, LeaseLost, MtaskError, TransactionConflict
from mtask.kernel.document.status import RunStatus
from mtask.kernel.driver.operation import Operation, within
from mtask.kernel.driver.stores import OPERATION_TIMEOUT, AsyncStore, SyncStore
from mtask.kernel.driver.types import AsyncSession, SyncSession
from mtask.kernel.operations import claim as claims
from mtask.kernel.operations import encode, sessions, transactions
from mtask.kernel.statements.finish import Outcome
from mtask.kernel.worker.process import runtime
from mtask.kernel.worker.process.log import fields, logger, told
from mtask.kernel.worker.process.time import Backoff
from mtask.kernel.worker.running.call import Called, HandlerStores
from mtask.kernel.worker.running.outcomes import ExecutorDied, Successes, describe, name_of
from mtask.kernel.worker.running.run import HeldRun

Documents = list[dict[str, object]]

_MIN_CALL = timedelta(milliseconds=200)
#: The number of spent sessions that are ended on the server together. The server itself would drop a session after half
#: an hour.
_MAX_SPENT = 100


class Leases(Protocol):
    """What a transaction asks of the pinger, or of what stands for it in an executor."""

    def suspended(self, run: HeldRun) -> AbstractContextManager[None]:
        """Send no ping for this run inside the `with` block."""

    def apply(self, runs: Sequence[HeldRun], documents: Documents, sent: float | None) -> None:
        """Apply the documents of these runs' tasks to the runs."""

    def release(self, run: HeldRun) -> None:
        """Ping this run no more: its transaction has committed."""


class RunTransactions:
    """Begins and ends the transactions of this worker's handlers."""

    def __init__(self, stores: HandlerStores, leases: Leases, successes: Successes, incarnation: str) -> None:
        """`incarnation`: that of this worker. It marks the runs whose handlers are still to return their values."""
        self._stores = stores
        self._incarnation = incarnation
        self._successes = successes
        self._pinger = leases
        self._suspensions: dict[str, AbstractContextManager[None]] = {}
        #: The number of the transaction that was started for a run, and how to abort it, by run_id.
        self._open: dict[str, tuple[int, Callable[[], Awaitable[None]]]] = {}
        #: The sessions that will not be used again and that the server still keeps.
        self._spent: list[UUID] = []

    async def begin(self, run: HeldRun) -> AsyncSession:
        """Renew the lease, suspend pings and start a transaction.

        Raises LeaseLost or DatabaseError. Raises RuntimeError if the run is in a transaction already.
        """
        suspending = asyncio.ensure_future(runtime.to_thread(self._suspend, run))
        try:
            await asyncio.shield(suspending)
        except asyncio.CancelledError:
            suspending.add_done_callback(lambda _: self._resume(run))
            raise
        try:
            store = self._stores.for_async()
            if store is None:
                raise LeaseLost(run.task_id, run.run_id)
            session = store.client.start_session()
            sent = monotonic()
            self._renewed(run, await store.run(_renewal(run, transactions.id_of(session))), sent)
            await transactions.start_async(session)
            self._open[run.run_id] = transactions.number_of(session), partial(self._abandon, store, session)
            return session
        except BaseException:
            self._resume(run)
            raise

    async def end(self, run: HeldRun, session: AsyncSession, error: BaseException | None) -> None:
        """Write the SUCCESS and commit the transaction. If `error` is given, abort the transaction.

        Raises LeaseLost, TransactionConflict or DatabaseError. Raises RuntimeError if the transaction is not open.
        """
        is_reusable = False
        store = self._stores.for_async()
        try:
            if error is None:
                if store is None:
                    raise LeaseLost(run.task_id, run.run_id)
                self._check_open(run, session)
                outcome = await store.run(encode.outcome(run.task, self._outcome(run)))
                await store.run(self._make_room(run, outcome))
                await store.run(_commit(run, outcome), session)
                is_reusable = run.is_lease_valid
                self._succeeded(run, outcome)
        except Exception as failure:
            _raise_conflict(run, failure)
            raise
        finally:
            with suppress(Exception):  # if the abort fails, the server ends the transaction later
                if is_reusable:
                    await session.end_session()
                else:
                    await self._abandon(store, session)
            self._resume(run)

    def begin_sync(self, run: HeldRun) -> SyncSession:
        """Do the same as `begin`, in a handler's thread."""
        self._suspend(run)
        try:
            store = self._stores.for_sync()
            if store is None:
                raise LeaseLost(run.task_id, run.run_id)
            session = store.client.start_session()
            sent = monotonic()
            self._renewed(run, store.run(_renewal(run, transactions.id_of(session))), sent)
            transactions.start(session)
            abandon = partial(runtime.to_thread, self._abandon_sync, store, session)
            self._open[run.run_id] = transactions.number_of(session), abandon
            return session
        except BaseException:
            self._resume(run)
            raise

    def end_sync(self, run: HeldRun, session: SyncSession, error: BaseException | None) -> None:
        """Do the same as `end`, in a handler's thread."""
        is_reusable = False
        store = self._stores.for_sync()
        try:
            if error is None:
                if store is None:
                    raise LeaseLost(run.task_id, run.run_id)
                self._check_open(run, session)
                outcome = store.run(encode.outcome(run.task, self._outcome(run)))
                store.run(self._make_room(run, outcome))
                store.run(_commit(run, outcome), session)
                is_reusable = run.is_lease_valid
                self._succeeded(run, outcome)
        except Exception as failure:
            _raise_conflict(run, failure)
            raise
        finally:
            with suppress(Exception):
                if is_reusable:
                    session.end_session()
                else:
                    self._abandon_sync(store, session)
            self._resume(run)

    async def leave(self, run: HeldRun) -> None:
        """Abort the transaction of a run whose handler is over. Nobody leaves its block any more."""
        _, abandon = self._open.get(run.run_id, (None, None))
        try:
            if abandon is not None:
                with suppress(Exception):  # if the abort fails, the server ends the transaction later
                    await abandon()
        finally:
            self._resume(run)

    # A task's document may still name the session of an earlier run. Such a session must not serve another run: a
    # worker that rescues the first task would end the session, and with it the transaction of the other run. So the
    # session is spent: it does not go back to the driver's pool of sessions.

    async def _abandon(self, store: AsyncStore | None, session: AsyncSession) -> None:
        if session.in_transaction:
            await session.abort_transaction()
        spent = self._spend(session)
        if spent and store is not None:
            await store.run(sessions.end(spent))

    def _abandon_sync(self, store: SyncStore | None, session: SyncSession) -> None:
        if session.in_transaction:
            session.abort_transaction()
        spent = self._spend(session)
        if spent and store is not None:
            store.run(sessions.end(spent))

    def _spend(self, session: SyncSession | AsyncSession) -> list[UUID]:
        """Note that this session is spent; return the sessions that should now be ended on the server."""
        self._spent.append(transactions.id_of(session))
        if len(self._spent) < _MAX_SPENT:
            return []
        spent, self._spent = self._spent, []
        return spent

    def _outcome(self, run: HeldRun) -> Outcome:
        """Return the SUCCESS to commit. It holds the result that the handler has set. Raises Fail for a wrong one."""
        outcome, _ = self._successes.outcome(run, run.result)
        if outcome.status is not RunStatus.SUCCESS:
            raise Fail(outcome.reason or "its result cannot be stored")
        owed_by = None if run.has_result or run.handler.returns_nothing else self._incarnation
        return replace(outcome, progress=run.progress, returns_owed_by=owed_by)

    def _make_room(self, run: HeldRun, success: Outcome) -> Operation[None]:
        """Take the room that the next task needs. That is no part of the transaction: two would conflict."""
        key = self._successes.room_of(success)
        if key is None:
            return
        try:
            yield from within(self._successes.take_room(key, 1), lambda: _time_left(run))
        except InvalidInput as error:
            raise Fail(f"the task cannot go on: {error}") from error

    def _succeeded(self, run: HeldRun, outcome: Outcome) -> None:
        run.goes_on, run.owes_value = outcome.next is not None, outcome.returns_owed_by is not None
        # This happens before the pings resume: the task has succeeded, so the run needs its lease no more.
        run.succeeded_in_transaction = True
        self._pinger.release(run)

    def _check_open(self, run: HeldRun, session: SyncSession | AsyncSession) -> None:
        """Raise RuntimeError if the run's transaction is over: the SUCCESS would be written without its writes.

        The handler may have begun another transaction on the session since.
        """
        number, _ = self._open.get(run.run_id, (None, None))  # None: the handler has returned before
        if not session.in_transaction or transactions.number_of(session) != number:
            raise RuntimeError("the handler has ended its transaction itself: leave that to the end of the block")

    def _suspend(self, run: HeldRun) -> None:
        if run.run_id in self._suspensions:
            raise RuntimeError("this run is in a transaction already: use context.transaction() once")
        suspension = self._pinger.suspended(run)
        suspension.__enter__()
        self._suspensions[run.run_id] = suspension

    def _resume(self, run: HeldRun) -> None:
        self._open.pop(run.run_id, None)
        suspension = self._suspensions.pop(run.run_id, None)
        if suspension is not None:
            suspension.__exit__(None, None, None)

    def _renewed(self, run: HeldRun, documents: Documents, sent: float) -> None:
        self._pinger.apply([run], documents, sent)
        if not _may_commit(run):
            raise LeaseLost(run.task_id, run.run_id)


def _renewal(run: HeldRun, session_id: UUID) -> Operation[Documents]:
    ping = claims.ping({run.run_id: run.task_id}, run.lease_ms, session_id=str(session_id))
    return within(ping, lambda: _time_left(run))


def _commit(run: HeldRun, success: Outcome) -> Operation[None]:
    return within(transactions.commit(success, lambda: _may_commit(run)), lambda: _time_left(run))


def _time_left(run: HeldRun) -> timedelta:
    """Return the time limit of a statement that the worker sends in a transaction or just before it.

    The limit is the time left of the lease, but at most the usual limit.
    """
    left = timedelta(seconds=run.trusted_until - monotonic())
    return max(_MIN_CALL, min(OPERATION_TIMEOUT, left))


def _may_commit(run: HeldRun) -> bool:
    return not run.is_cancelled


def _raise_conflict(run: HeldRun, failure: Exception) -> None:
    if transactions.is_conflict(failure):
        reason = transactions.conflict_reason(failure)
        raise TransactionConflict(run.task_id, run.run_id, reason) from failure


# --- returns ---------------------------------------------------------------------------------------------

# Values that handlers return after their transactions have committed: stores them, or says that they are lost.

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
            encoded = yield from encode.value(run.task, encode.RETURNS, value)
            return (yield from transactions.store_return(run.task_id, run.run_id, encoded))

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


def late_value(run: HeldRun, called: Called, successes: Successes) -> tuple[Any, str | None]:
    """Return the value that a handler returned after its transaction had committed, and why it cannot be stored.

    To read it runs code of the app. Whatever that raises, the value is lost.
    """
    try:
        return _late_value(run, called, successes)
    except BaseException as error:
        reason = f"what the handler returned or raised cannot be read: {describe(error)}"
        _say_lost(run, reason)
        return None, reason


def _late_value(run: HeldRun, called: Called, successes: Successes) -> tuple[Any, str | None]:
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
    outcome, _ = successes.outcome(run, run.result if run.has_result else called.returned)
    if outcome.reason is not None:  # it is refused
        logger.error(outcome.reason, extra=fields(task=run.task_id, run=run.run_id))
    return outcome.returns, outcome.reason


def _say_lost(run: HeldRun, reason: str) -> None:
    logger.error("returns not stored", extra=fields(task=run.task_id, run=run.run_id, reason=reason))
