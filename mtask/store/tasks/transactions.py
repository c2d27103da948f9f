"""The handler's transaction: the handler's writes and the run's SUCCESS commit together, or not at all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from uuid import UUID

from pymongo.errors import PyMongoError
from pymongo.read_concern import ReadConcern
from pymongo.read_preferences import ReadPreference
from pymongo.write_concern import WriteConcern

from mtask.errors import DatabaseError, LeaseLost
from mtask.store.driver.operation import Call, Operation
from mtask.store.driver.translate import first_line
from mtask.store.driver.types import AsyncSession, SyncSession
from mtask.store.statements.outcome import Outcome
from mtask.store.tasks import claims

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
