"""Transactions: a handler's own writes and its SUCCESS, or a firing and its tasks, commit together or not at all."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from time import monotonic
from typing import Any, TypeVar

from pymongo.errors import PyMongoError
from pymongo.read_concern import ReadConcern
from pymongo.read_preferences import ReadPreference
from pymongo.write_concern import WriteConcern

from mtask.errors import DatabaseError, LeaseLost
from mtask.store import claims
from mtask.store.driver import AsyncStore, SyncStore
from mtask.store.operation import Call, Operation
from mtask.store.pipelines import Outcome
from mtask.store.translate import first_line
from mtask.store.types import AsyncSession, SyncSession

T = TypeVar("T")
#: How long a commit is sent again.
_TIMEOUT = timedelta(seconds=30)
_OPTIONS: dict[str, Any] = {
    "read_concern": ReadConcern("snapshot"),
    "write_concern": WriteConcern(w="majority", j=True),
    "read_preference": ReadPreference.PRIMARY,
}


def begin(store: SyncStore) -> SyncSession:
    """Start a transaction on a new session."""
    session = store.client.start_session()
    session.start_transaction(**_OPTIONS)
    return session


async def begin_async(store: AsyncStore) -> AsyncSession:
    """Start a transaction on a new session."""
    session = store.client.start_session()
    await session.start_transaction(**_OPTIONS)
    return session


async def carry_out(store: AsyncStore, operation: Operation[T], timeout: timedelta = _TIMEOUT) -> T:
    """Run an operation in a transaction of its own and return its result; raise what it raises, and it left no trace.

    A commit whose reply was lost is sent again, which repeats nothing.
    """
    session = await begin_async(store)
    try:
        result = await store.run(operation, session)
        end = monotonic() + timeout.total_seconds()
        await store.run(_commit(lambda: monotonic() < end), session)
    finally:
        with suppress(Exception):  # what cannot be aborted ends by itself on the server
            await session.end_session()
    return result


def commit(outcome: Outcome, is_lease_valid: Callable[[], bool]) -> Operation[None]:
    """Write the SUCCESS and commit, to be run in the session; raise LeaseLost, and nothing may be committed.

    A commit whose reply was lost is sent again, which repeats nothing, as long as the lease may be trusted.
    """
    if not is_lease_valid() or not (yield from claims.finish_in_transaction(outcome)):
        raise LeaseLost(outcome.task_id, outcome.run_id)
    yield from _commit(is_lease_valid)


def _commit(may_go_on: Callable[[], bool]) -> Operation[None]:
    while True:
        try:
            yield Call("session", "commit_transaction")
        except DatabaseError as error:
            if not _has_label(error, "UnknownTransactionCommitResult") or not may_go_on():
                raise
        else:
            return


def is_conflict(error: BaseException) -> bool:
    """Whether the transaction met another write, or the server left it: it left no trace, try again."""
    return _has_label(error, "TransientTransactionError")


def conflict_reason(error: BaseException) -> str:
    """Return what the driver says of a conflict, in one line."""
    return first_line(error)


def _has_label(error: BaseException | None, label: str) -> bool:
    seen: set[int] = set()  # a handler's error may be its own cause
    while error is not None and id(error) not in seen:
        if isinstance(error, PyMongoError) and error.has_error_label(label):
            return True
        seen.add(id(error))
        error = error.__cause__
    return False
