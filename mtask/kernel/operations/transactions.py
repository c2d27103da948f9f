"""The handler's transaction: the handler's writes and the run's SUCCESS commit together, or not at all."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from time import monotonic
from typing import Any
from uuid import UUID

from pymongo.errors import PyMongoError
from pymongo.read_concern import ReadConcern
from pymongo.read_preferences import ReadPreference
from pymongo.write_concern import WriteConcern

from mtask.errors import DatabaseError, DatabaseUnavailable, LeaseLost
from mtask.kernel.document.task import runs_in
from mtask.kernel.driver.errors import first_line
from mtask.kernel.driver.indexes import OWED_INDEX
from mtask.kernel.driver.operation import Call, Operation, T, tasks
from mtask.kernel.driver.stores import AsyncStore, SyncStore
from mtask.kernel.driver.types import AsyncSession, SyncSession
from mtask.kernel.operations import claim as claims
from mtask.kernel.statements import filters, finish
from mtask.kernel.statements.finish import Outcome

#: The time for which a transaction is tried again after conflicts. A publisher that was killed amid its transaction
#: holds up others under the same keys until the server ends its session, a minute or so.
_PATIENCE = timedelta(seconds=100)
_OPTIONS: dict[str, Any] = {
    "read_concern": ReadConcern("snapshot"),
    "write_concern": WriteConcern(w="majority", j=True),
    "read_preference": ReadPreference.PRIMARY,
}


def start(session: SyncSession) -> None:
    """Start a transaction. The driver sends nothing before the first statement of the transaction."""
    session.start_transaction(**_OPTIONS)


async def start_async(session: AsyncSession) -> None:
    """Start a transaction. The driver sends nothing before the first statement of the transaction."""
    await session.start_transaction(**_OPTIONS)


def id_of(session: SyncSession | AsyncSession) -> UUID:
    """Return the id under which the server knows a session."""
    return UUID(bytes=bytes(session.session_id["id"]))


def number_of(session: SyncSession | AsyncSession) -> int:
    """Return the number of the session's newest transaction. The driver counts each one, and has no public name for it.

    A handler may end the transaction of its run and start another one: that one has another number.
    """
    number: int = session._server_session.transaction_id
    return number


def commit(outcome: Outcome, is_lease_valid: Callable[[], bool]) -> Operation[None]:
    """Write the SUCCESS and commit the transaction. Raises LeaseLost if the run has lost its lease.

    The caller must run this operation in the transaction's session. After a LeaseLost, the caller must not commit. If
    the reply to the commit is lost, the commit is sent again as long as the lease is valid. A second commit does not
    repeat the writes.
    """
    if not is_lease_valid() or not (yield from claims.finish_in_transaction(outcome)):
        raise LeaseLost(outcome.task_id, outcome.run_id)
    while True:
        try:
            yield Call("session", "commit_transaction")
        except DatabaseError as error:
            if not _has_label(error, "UnknownTransactionCommitResult") or not is_lease_valid():
                raise
        else:
            return


def transact(store: SyncStore, make: Callable[[], Operation[T]], patience: timedelta = _PATIENCE) -> T:
    """Run the operation that `make` returns in a transaction of its own; return its result.

    If the transaction conflicts with another one, run a new operation in a new transaction, until `patience` is over.
    """
    tries = _Tries(patience)
    with store.client.start_session() as session:
        while True:
            start(session)
            try:
                result = store.run(make(), session)
                store.run(_commit_surely(tries), session)
            except BaseException as error:
                if session.in_transaction:
                    with suppress(PyMongoError):
                        session.abort_transaction()
                time.sleep(tries.pause_after(error))
            else:
                return result


async def transact_async(store: AsyncStore, make: Callable[[], Operation[T]], patience: timedelta = _PATIENCE) -> T:
    """Run the operation that `make` returns in a transaction of its own; return its result. See `transact`."""
    tries = _Tries(patience)
    async with store.client.start_session() as session:
        while True:
            await start_async(session)
            try:
                result = await store.run(make(), session)
                await store.run(_commit_surely(tries), session)
            except BaseException as error:
                if session.in_transaction:
                    with suppress(PyMongoError):
                        await session.abort_transaction()
                await asyncio.sleep(tries.pause_after(error))
            else:
                return result


class _Tries:
    """Decides how often a transaction is tried."""

    def __init__(self, patience: timedelta) -> None:
        self._until = monotonic() + patience.total_seconds()

    @property
    def are_left(self) -> bool:
        """Whether there is time for another try."""
        return monotonic() < self._until

    def pause_after(self, error: BaseException) -> float:
        """Return the pause before the next try, in seconds. Raises the error, translated, if there is no next try."""
        if not is_conflict(error):
            raise error
        if not self.are_left:
            raise DatabaseUnavailable("another transaction keeps writing the same documents") from error
        return random.uniform(0.01, 0.1)


def _commit_surely(tries: _Tries) -> Operation[None]:
    """Commit. If the reply is lost, commit again: a second commit does not repeat the writes."""
    while True:
        try:
            yield Call("session", "commit_transaction")
        except DatabaseError as error:
            if not _has_label(error, "UnknownTransactionCommitResult") or not tries.are_left:
                raise
        else:
            return


def is_conflict(error: BaseException) -> bool:
    """Whether the transaction conflicted with another write, or the server aborted it.

    Such a transaction has written nothing, so it can be tried again.
    """
    return _has_label(error, "TransientTransactionError")


def conflict_reason(error: BaseException) -> str:
    """Return the driver's message about a conflict, in one line."""
    return first_line(error)


def _has_label(error: BaseException | None, label: str) -> bool:
    seen: set[int] = set()  # the error of a handler can be its own cause
    while error is not None and id(error) not in seen:
        if isinstance(error, PyMongoError) and error.has_error_label(label):
            return True
        seen.add(id(error))
        error = error.__cause__
    return False


# --- returning -------------------------------------------------------------------------------------------

# Stores what handlers return after their transactions have committed, or says that it is lost.

#: The most tasks that one call finds.
BATCH = 500
WORKER_GONE = "the worker died or stopped before its handler had returned"
UNANSWERED = "the handler did not learn that its transaction had committed: the answer was lost"


def store_return(task_id: str, run_id: str, returns: Any) -> Operation[bool]:
    """Store the value that a handler has returned.

    Return False if it comes too late: it is told to be lost, or the run is gone.
    """
    stored = yield tasks("update_one", finish.returned(task_id, run_id), finish.store_return(run_id, returns))
    return bool(stored.matched_count)


def lose_return(task_id: str, run_id: str, reason: str) -> Operation[bool]:
    """Say why the value of a run is not stored, and return True, if the run owes one."""
    lost = yield tasks("update_one", finish.owing_return(task_id, run_id), finish.lose_return(run_id, reason))
    return bool(lost.matched_count)


@dataclass(frozen=True, slots=True)
class OwedReturns:
    """Tasks whose handlers owe values, and the workers in which these handlers go on."""

    task_ids: Sequence[str] = ()
    #: The incarnations, and the worker_id of each.
    workers: dict[str, str] = field(default_factory=dict)
    #: The runs that owe values: each with its task and the incarnation of its worker.
    runs: Mapping[str, tuple[str, str]] = field(default_factory=dict)


def owed_returns() -> Operation[OwedReturns]:
    """Return the tasks that owe values, the oldest first, at most `BATCH`."""
    matched = {"owed_since": {"$exists": True}, filters.OWES_VALUE: {"$exists": True}}
    view = {f"task_state.worker_states.{name}": 1 for name in ("worker_id", "run_id", "returns_owed_by")}
    found = yield tasks("find", matched, view, sort=[("owed_since", 1)], limit=BATCH, hint=OWED_INDEX)
    owing = [
        (document["_id"], run)
        for document in found
        for run in runs_in(document)
        if isinstance(run.get("returns_owed_by"), str)
    ]
    return OwedReturns(
        [document["_id"] for document in found if isinstance(document["_id"], str)],
        {run["returns_owed_by"]: str(run.get("worker_id")) for _, run in owing},
        {str(run.get("run_id")): (task_id, run["returns_owed_by"]) for task_id, run in owing},
    )


def lose_returns_of(owed_returns: OwedReturns, incarnations: Iterable[str]) -> Operation[None]:
    """Say that the values are lost that handlers in these workers owed."""
    gone = list(incarnations)
    if gone and owed_returns.task_ids:
        matched = finish.owed_returns(owed_returns.task_ids, gone)
        yield tasks("update_many", matched, finish.lose_returns(gone, WORKER_GONE), hint="_id_")


def gone(owed_returns: OwedReturns, signs_of_life: Sequence[Mapping[str, Any]]) -> tuple[set[str], set[str]]:
    """Return the incarnations that have ended, and those that are silent: each of these may be alive.

    After the database was away, all workers are silent until they have sent a heartbeat again. `signs_of_life` are
    those of the workers in `owed_returns`, from `workers.signs_of_life`.
    """
    found = {row["_id"]: row for row in signs_of_life}
    ended: set[str] = set()
    silent: set[str] = set()
    for incarnation, worker_id in owed_returns.workers.items():
        row = found.get(worker_id)
        if row is None:
            silent.add(incarnation)  # a worker whose document was removed registers again
        elif row.get("incarnation") != incarnation or row["is_stopped"]:
            ended.add(incarnation)
        elif not row["is_live"]:
            silent.add(incarnation)
    return ended, silent
