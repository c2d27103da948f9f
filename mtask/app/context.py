"""The context of a handler: it describes the run, and opens a transaction for writes that happen exactly once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, Unpack, overload

from mtask.arguments.publish import AddedArguments, Call, TaskRef
from mtask.errors import HandlerError, LeaseLost
from mtask.features.flows.handler import Adding, Child, Family, FamilyRun, HandlerOperations, Results
from mtask.kernel.document.handlers import name_of
from mtask.kernel.document.identity import is_text
from mtask.kernel.document.task import Task
from mtask.kernel.document.values import Trace
from mtask.kernel.driver.operation import Operation
from mtask.kernel.operations.publish import Published

if TYPE_CHECKING:
    from mtask.kernel.driver.types import AsyncSession, SyncSession


#: The length to which a progress message is cut, in characters.
MAX_MESSAGE = 500


class ActiveRun(FamilyRun, Protocol):
    """The part of a worker's held run that a context uses."""

    @property
    def task_id(self) -> str:
        """The task's `_id`."""

    @property
    def attempt(self) -> int:
        """The number of this try at the task. The first try has number 1."""

    @property
    def is_cancelled(self) -> bool:
        """Whether the worker has asked the handler to end."""

    @property
    def ended_because(self) -> str | None:
        """The reason for which the worker ended the run."""

    @property
    def ended_as(self) -> str | None:
        """What becomes of a run that the worker ended."""

    @property
    def trace(self) -> Trace | None:
        """The span of the run."""

    def follow(self, trace: Trace, *, is_stored: bool) -> None:
        """Note the span of the run."""

    def set_result(self, result: Any) -> None:
        """Keep what the handler returns, for the commit of its transaction."""

    def report(self, progress: Mapping[str, Any]) -> None:
        """Keep this progress until the worker writes it."""


Value = TypeVar("Value")
RunT = TypeVar("RunT", bound=ActiveRun)
_RunT = TypeVar("_RunT", bound=ActiveRun, contravariant=True)


class Transactions(Protocol[_RunT]):
    """The worker's functions that begin and end a handler's transaction."""

    async def begin(self, run: _RunT) -> AsyncSession:
        """Renew the lease, suspend pings and start a transaction; raise LeaseLost."""

    async def end(self, run: _RunT, session: AsyncSession, error: BaseException | None) -> None:
        """Write the SUCCESS and commit the transaction. If `error` is given, abort the transaction instead.

        Raises LeaseLost or TransactionConflict.
        """

    def begin_sync(self, run: _RunT) -> SyncSession:
        """Do the same as `begin`, for a sync handler in its thread."""

    def end_sync(self, run: _RunT, session: SyncSession, error: BaseException | None) -> None:
        """Do the same as `end`, for a sync handler in its thread."""


class Transaction:
    """The transaction of a run. Use `async with` in an async handler, and `with` in a sync handler.

    The `with` statement provides a session for the handler's own writes. At the end of the block, the worker checks the
    lease, writes the run's SUCCESS in the same transaction, and commits. After LeaseLost or TransactionConflict,
    nothing is written: neither the handler's writes nor the SUCCESS. To write nothing, raise an exception in the block.
    A handler that ends the transaction itself gets a RuntimeError. One that returns inside of the block fails.
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
        # Without the shield, a cancellation could come between the write of the SUCCESS and the commit. The handler
        # goes on when it is known whether that has come: else its run could end as failed beside the SUCCESS.
        ending = asyncio.ensure_future(self._transactions.end(self._run, self._session, error))
        try:
            await asyncio.shield(ending)
        except asyncio.CancelledError:
            await asyncio.wait([ending])
            if not ending.cancelled():
                ending.exception()  # asyncio would log one that nobody takes
            raise

    def __enter__(self) -> SyncSession:
        self._session = self._transactions.begin_sync(self._run)
        return self._session  # type: ignore[no-any-return]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._transactions.end_sync(self._run, self._session, error)


class Context:
    """A handler's view of its run. The handler gets it through a parameter annotated `Context`."""

    __mtask_context__ = True

    def __init__(
        self,
        run: RunT,
        worker_id: str,
        transactions: Transactions[RunT],
        on_progress: Callable[[RunT], None],
        values: Mapping[Callable[..., Any], Any] | None = None,
        operations: HandlerOperations | None = None,
    ) -> None:
        self._run: ActiveRun = run
        self._family = None if operations is None else Family(run, operations)
        self._worker_id = worker_id
        self._transactions: Transactions[Any] = transactions
        self._on_progress: Callable[[Any], None] = on_progress
        self._values = {} if values is None else values
        self._task: Task | None = None

    @property
    def task(self) -> Task:
        """The task as it was at the claim of this run."""
        if self._task is None:
            self._task = self._run.task.with_own_options()
        return self._task

    @property
    def tenant(self) -> str | None:
        """Whose task it is, or None."""
        return self._run.task.tenant

    @property
    def run_id(self) -> str:
        """The run's id. Each try has another id, so systems outside of MongoDB can use it as a fencing token."""
        return self._run.run_id

    @property
    def attempt(self) -> int:
        """The number of this try at the task. The first try has number 1.

        With retry_scope "worker", only the tries by this worker are counted.
        """
        return self._run.attempt

    @property
    def worker_id(self) -> str:
        """The worker's id."""
        return self._worker_id

    @property
    def is_cancelled(self) -> bool:
        """Whether the worker has asked the handler to end.

        A worker asks for this if the task was canceled or removed, if the task's specific_worker_ids now exclude the
        worker, if the worker stops, if run_timeout is over, or if the lease is lost.

        The worker also cancels the asyncio task of an async handler. A sync handler must check this property and
        return.
        """
        return self._run.is_cancelled

    @property
    def is_lease_valid(self) -> bool:
        """Whether the lease still holds.

        The worker decides this by its own deadline, which is never later than the server's.
        """
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

        The report is stored in the run's `progress`, and readers of `client.events` see it. A report costs little: it
        is written with a ping, at most once per second, or with the outcome. If several reports wait, only the latest
        one is written. A message is cut to 500 characters.

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

    @overload
    def add_child(self, step: str, task: Call[Any], **arguments: Unpack[AddedArguments]) -> Adding[Published]: ...

    @overload
    def add_child(
        self, step: str, task: TaskRef, params: Any = None, **arguments: Unpack[AddedArguments]
    ) -> Adding[Published]: ...

    def add_child(
        self,
        step: str,
        task: TaskRef | Call[Any],
        params: Any = None,
        **arguments: Unpack[AddedArguments],
    ) -> Adding[Published]:
        """Add a task to the flow of this task. Steps that depend on this task wait for the child, too.

        Write `await context.add_child(...)` in an async handler; a sync handler does not await. `step` is the child's
        name in the flow, and its key is `flow key/step`. A later try of this task finds the child: `created` is False
        then. Without a priority of its own or of its handler, the child has this task's priority. The other arguments
        mean the same as in `Client.publish`.

        The child is added only while this run holds its lease and nobody has canceled the task. It stays if the run
        fails afterwards. Add children before `context.transaction()`.

        Raises NotInFlow, StepExists, LeaseLost, RunCanceled, and subclasses of InvalidInput.
        """
        made: Callable[..., Child] = Child  # its overloads know which of the two it is, and here nobody does
        child = made(step, task, params, **arguments)
        return self._known_family.do(_only(self._known_family.add([child])))

    def add_children(self, children: Iterable[Child]) -> Adding[list[Published]]:
        """Add many tasks to the flow of this task, in few writes: `add_children([Child("part-1", count), ...])`.

        See `add_child`. If one of the children is wrong, an error is raised before any child is added.
        """
        return self._known_family.do(self._known_family.add(children))

    def results(self) -> Results:
        """Return the results of the task's dependencies and of their children, by step. See `Results`.

        In a task as which another one went on (`Next`), it is the result of that task, by its name.
        """
        return self._known_family.results()

    @property
    def _known_family(self) -> Family:
        if self._family is None:
            raise RuntimeError("this context has no database")
        return self._family

    def set_result(self, result: Any) -> None:
        """Set what the handler returns: a value, or a Next. What it returns afterwards is ignored.

        Call this inside of `context.transaction()`. Then the value, or the next task, is part of the commit. A value
        may also be set after the commit, unless one was set before it. Raises RuntimeError if it comes too late.
        """
        self._run.set_result(result)

    def transaction(self) -> Transaction:
        """Return the transaction in which the handler's own writes and the SUCCESS commit together.

        Use the transaction once, as the handler's last step. Enter it with
        `async with context.transaction() as session`. In the block, write through `session.client[...]` and pass
        `session=session`. The block must end within the lease (worker_timeout), because the worker sends no pings
        during the block. After the block, the handler can still return a value, which is added to the run: readers
        wait for it, but it is lost if the worker dies before. To commit the value with the SUCCESS, or to go on as
        another task, call `context.set_result` in the block.

        Raises LeaseLost.
        """
        if not self._run.is_lease_valid:
            raise LeaseLost(self._run.task_id, self._run.run_id)
        return Transaction(self._run, self._transactions)


def _only(operation: Operation[list[Published]]) -> Operation[Published]:
    return (yield from operation)[0]
