"""The context: tells a handler about its run, and opens the transaction in which its writes happen exactly once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, overload

from mtask.errors import HandlerError, LeaseLost
from mtask.model.documents import StoredTask, Task
from mtask.model.identity import is_text
from mtask.model.middleware import name_of

if TYPE_CHECKING:
    from mtask.store.driver.types import AsyncSession, SyncSession


#: The most characters of a progress message that are kept.
MAX_MESSAGE = 500


class ActiveRun(Protocol):
    """The run that the worker holds, as far as a context uses it."""

    @property
    def task(self) -> StoredTask:
        """The task as it was when this run claimed it."""

    @property
    def task_id(self) -> str:
        """The task's `_id`."""

    @property
    def run_id(self) -> str:
        """The run's id."""

    @property
    def attempt(self) -> int:
        """The number of this try at the task, from 1."""

    @property
    def is_cancelled(self) -> bool:
        """Whether the handler is asked to end."""

    @property
    def is_lease_valid(self) -> bool:
        """Whether the lease may still be trusted."""

    def report(self, progress: Mapping[str, Any]) -> None:
        """Keep this progress until it is written."""


Value = TypeVar("Value")
RunT = TypeVar("RunT", bound=ActiveRun)
_RunT = TypeVar("_RunT", bound=ActiveRun, contravariant=True)


class Transactions(Protocol[_RunT]):
    """The functions of the worker that begin and end a handler's transaction."""

    async def begin(self, run: _RunT) -> AsyncSession:
        """Renew the lease, suspend pings and start a transaction; raise LeaseLost."""

    async def end(self, run: _RunT, session: AsyncSession, error: BaseException | None) -> None:
        """Write the SUCCESS and commit; with an error, abort. Raises LeaseLost or TransactionConflict."""

    def begin_sync(self, run: _RunT) -> SyncSession:
        """Do the same as `begin`, in a handler's thread."""

    def end_sync(self, run: _RunT, session: SyncSession, error: BaseException | None) -> None:
        """Do the same as `end`, in a handler's thread."""


class Transaction:
    """The transaction of a run: use `async with` in an async handler, `with` in a sync one.

    The block gets the session for the handler's own writes. The end of the block writes the run's SUCCESS in the same
    transaction, if the lease still holds, and commits both. After LeaseLost or TransactionConflict nothing is written.
    """

    def __init__(self, run: RunT, transactions: Transactions[RunT]) -> None:
        self._run = run
        self._transactions: Transactions[Any] = transactions
        self._session: Any = None

    async def __aenter__(self) -> AsyncSession:
        self._session = await self._transactions.begin(self._run)
        return self._session  # type: ignore[no-any-return]

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # A cancellation must not come between the SUCCESS and its commit.
        await asyncio.shield(self._transactions.end(self._run, self._session, error))

    def __enter__(self) -> SyncSession:
        self._session = self._transactions.begin_sync(self._run)
        return self._session  # type: ignore[no-any-return]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._transactions.end_sync(self._run, self._session, error)


class Context:
    """The run of a handler. A handler gets it through a parameter annotated `Context`."""

    __mtask_context__ = True

    def __init__(
        self,
        run: RunT,
        worker_id: str,
        transactions: Transactions[RunT],
        on_progress: Callable[[RunT], None],
        values: Mapping[Callable[..., Any], Any] | None = None,
    ) -> None:
        self._run: ActiveRun = run
        self._worker_id = worker_id
        self._transactions: Transactions[Any] = transactions
        self._on_progress: Callable[[Any], None] = on_progress
        self._values = {} if values is None else values
        self._task: Task | None = None

    @property
    def task(self) -> Task:
        """The task as it was when this run claimed it."""
        if self._task is None:
            self._task = self._run.task.with_own_options()
        return self._task

    @property
    def run_id(self) -> str:
        """The run's id. It is unique for each try, so it can serve as a fencing token in systems outside of MongoDB."""
        return self._run.run_id

    @property
    def attempt(self) -> int:
        """The number of this try at the task, from 1. With retry_scope "worker" only tries of this worker count."""
        return self._run.attempt

    @property
    def worker_id(self) -> str:
        """The worker's id."""
        return self._worker_id

    @property
    def is_cancelled(self) -> bool:
        """Whether the handler is asked to end: the task was canceled or removed, its specific_worker_ids now exclude
        this worker, the worker stops, run_timeout_ms is over, or the lease is lost.

        An async handler is also cancelled. A sync handler must check this property and return.
        """
        return self._run.is_cancelled

    @property
    def is_lease_valid(self) -> bool:
        """Whether the lease still holds, by a deadline of this process that is never later than the server's."""
        return self._run.is_lease_valid

    @overload
    def value(self, hook: Callable[[], AsyncIterator[Value] | Iterator[Value]], /) -> Value: ...

    @overload
    def value(self, hook: Callable[[], Awaitable[Value]], /) -> Value: ...

    @overload
    def value(self, hook: Callable[[], Value], /) -> Value: ...

    def value(self, hook: Callable[[], Any], /) -> Any:
        """Return the value that a hook of `@app.on_start` returned or yielded in this process; raise HandlerError."""
        try:
            return self._values[hook]
        except (KeyError, TypeError):
            raise HandlerError(name_of(hook), "it has no value here: register it with @app.on_start") from None

    def progress(self, fraction: float | None = None, message: str | None = None) -> None:
        """Report the progress of the run: a fraction from 0 to 1, a message, or both.

        The run stores the report in `progress`, and `client.events` tells of it. A report costs little: a ping carries
        it, at most once per second, or the write of the outcome does. Only the latest report is written. A message is
        cut to 500 characters.

        Raises ValueError.
        """
        if fraction is not None and (isinstance(fraction, bool) or not 0 <= fraction <= 1):
            raise ValueError(f"fraction {fraction!r}: use 0 to 1")
        if message is not None and (not isinstance(message, str) or not is_text(message)):
            raise ValueError(f"message {message!r} is not text")
        if fraction is None and message is None:
            raise ValueError("give a fraction, a message, or both")
        progress = {} if fraction is None else {"fraction": float(fraction)}
        self._run.report(progress if message is None else {**progress, "message": message[:MAX_MESSAGE]})
        self._on_progress(self._run)

    def transaction(self) -> Transaction:
        """Return the transaction in which the handler's own writes and the SUCCESS commit together.

        Use the transaction once, as the handler's last step: `async with context.transaction() as session`, then write
        with `session.client[...]` and `session=session`. The transaction must end within the lease (worker_timeout_ms),
        because no pings are sent meanwhile. The value that the handler returns afterwards is added to the run.

        Raises LeaseLost.
        """
        if not self._run.is_lease_valid:
            raise LeaseLost(self._run.task_id, self._run.run_id)
        return Transaction(self._run, self._transactions)
