"""Transactions of handlers: the lease is renewed first, pings pause, and the SUCCESS goes with the commit."""

from __future__ import annotations

import asyncio
from contextlib import AbstractContextManager, suppress
from time import monotonic

from mtask.errors import LeaseLost, TransactionConflict
from mtask.model.status import RunStatus
from mtask.store import claims, transactions
from mtask.store.driver import AsyncStore, SyncStore
from mtask.store.operation import Operation
from mtask.store.pipelines import Outcome
from mtask.store.types import AsyncSession, SyncSession
from mtask.worker.pinger import Pinger
from mtask.worker.run import HeldRun

Documents = list[dict[str, object]]


class RunTransactions:
    """Begins and ends the transactions of this worker's handlers."""

    def __init__(self, store: AsyncStore, sync_store: SyncStore, pinger: Pinger) -> None:
        self._store = store
        self._sync_store = sync_store
        self._pinger = pinger
        self._suspensions: dict[str, AbstractContextManager[None]] = {}

    async def begin(self, run: HeldRun) -> AsyncSession:
        """Renew the lease, suspend pings and start a transaction; raise LeaseLost."""
        suspending = asyncio.ensure_future(asyncio.to_thread(self._suspend, run))
        try:
            await asyncio.shield(suspending)
        except asyncio.CancelledError:
            suspending.add_done_callback(lambda _: self._resume(run))
            raise
        try:
            sent = monotonic()
            self._renewed(run, await self._store.run(_renewal(run)), sent)
            return await transactions.begin_async(self._store)
        except BaseException:
            self._resume(run)
            raise

    async def end(self, run: HeldRun, session: AsyncSession, error: BaseException | None) -> None:
        """Record the SUCCESS and commit, or abort; raise LeaseLost or TransactionConflict."""
        try:
            if error is None:
                await self._store.run(transactions.commit(_success(run), lambda: _may_commit(run)), session)
                self._succeeded(run)
        except Exception as failure:
            _raise_conflict(run, failure)
            raise
        finally:
            with suppress(Exception):  # what cannot be aborted ends by itself on the server
                await session.end_session()
            self._resume(run)

    def begin_sync(self, run: HeldRun) -> SyncSession:
        """Do as `begin`, in a handler's thread."""
        self._suspend(run)
        try:
            sent = monotonic()
            self._renewed(run, self._sync_store.run(_renewal(run)), sent)
            return transactions.begin(self._sync_store)
        except BaseException:
            self._resume(run)
            raise

    def end_sync(self, run: HeldRun, session: SyncSession, error: BaseException | None) -> None:
        """Do as `end`, in a handler's thread."""
        try:
            if error is None:
                self._sync_store.run(transactions.commit(_success(run), lambda: _may_commit(run)), session)
                self._succeeded(run)
        except Exception as failure:
            _raise_conflict(run, failure)
            raise
        finally:
            with suppress(Exception):
                session.end_session()
            self._resume(run)

    def _succeeded(self, run: HeldRun) -> None:
        # Before pings go on: the task is done, and no lease is left to lose.
        run.succeeded_in_transaction = True
        self._pinger.release(run)

    def _suspend(self, run: HeldRun) -> None:
        if run.run_id in self._suspensions:
            raise RuntimeError("this run is in a transaction already: use context.transaction() once")
        suspension = self._pinger.suspended(run)
        suspension.__enter__()
        self._suspensions[run.run_id] = suspension

    def _resume(self, run: HeldRun) -> None:
        suspension = self._suspensions.pop(run.run_id, None)
        if suspension is not None:
            suspension.__exit__(None, None, None)

    def _renewed(self, run: HeldRun, documents: Documents, sent: float) -> None:
        self._pinger.apply([run], documents, sent)
        if not _may_commit(run):
            raise LeaseLost(run.task_id, run.run_id)


def _renewal(run: HeldRun) -> Operation[Documents]:
    return claims.ping({run.run_id: run.task_id}, run.lease_ms)


def _success(run: HeldRun) -> Outcome:
    return Outcome(run.task_id, run.run_id, RunStatus.SUCCESS, progress=run.progress)


def _may_commit(run: HeldRun) -> bool:
    return not run.is_cancelled


def _raise_conflict(run: HeldRun, failure: Exception) -> None:
    if transactions.is_conflict(failure):
        reason = transactions.conflict_reason(failure)
        raise TransactionConflict(run.task_id, run.run_id, reason) from failure
