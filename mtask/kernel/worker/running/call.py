"""The caller: calls a run's handler, on the event loop or in a thread, inside the app's middleware."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Generator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from time import monotonic
from typing import Any, Protocol

from mtask.app.context import Context, Transactions
from mtask.app.middleware import Entered, RunCall
from mtask.app.tracing import Tracer
from mtask.features.flows.handler import HandlerOperations
from mtask.kernel.document.handlers import Handler, leave, watch
from mtask.kernel.statements.finish import Outcome
from mtask.kernel.worker.process.log import fields, logger
from mtask.kernel.worker.process.runtime import end_if_forked
from mtask.kernel.worker.running.outcomes import ended
from mtask.kernel.worker.running.run import EndReason, HeldRun
from mtask.kernel.worker.running.threads import ThreadCall, Threads
from mtask.logs import RUN


@dataclass(slots=True)
class Called:
    """The result of a handler's call."""

    returned: Any = None
    raised: BaseException | None = None
    #: The call of a sync handler in its thread. The call may continue after the run has ended.
    thread: ThreadCall | None = None
    #: The outcome and the size of its value in bytes, if an executor has made them already.
    judged: tuple[Outcome, int] | None = None
    #: Why what came after a transaction's commit cannot be stored, if an executor has found that out already.
    lost: str | None = None


class Isolation(Protocol):
    """The executors: processes in which some handlers run."""

    def isolates(self, handler: Handler) -> bool:
        """Whether this handler runs in an executor."""

    async def call(self, run: HeldRun, called: Called) -> None:
        """Run the handler. Store what came of it in `called`."""

    def end(self, run: HeldRun, reason: EndReason) -> None:
        """End the handler, by force if it does not end by itself."""


@dataclass(frozen=True, slots=True)
class Observers:
    """What observes the calls of handlers beside the middleware."""

    tracer: Tracer | None = None
    #: What keeps the lines that handlers log.
    keeper: object | None = None


class Caller:
    """Calls handlers with their arguments and context."""

    def __init__(
        self,
        worker_id: str,
        transactions: Transactions[HeldRun],
        on_progress: Callable[[HeldRun], None],
        middleware: Sequence[Any],
        values: Mapping[Callable[..., Any], Any],
        operations: HandlerOperations,
        isolation: Isolation | None = None,
        observers: Observers | None = None,
    ) -> None:
        """`middleware` runs around each call. `values` holds the value of each of the app's hooks.

        `isolation`: the executors, if some handlers run in them. There the middleware runs, too. `observers`: the
        tracer observes the calls of these handlers from here.
        """
        self._worker_id = worker_id
        self._transactions = transactions
        self._on_progress = on_progress
        self._middleware = middleware
        self._values = values
        self._operations = operations
        self._isolation = isolation
        self._observers = observers or Observers()
        self._threads = Threads("mtask-handler")

    def close(self) -> None:
        """End each thread after its current call."""
        self._threads.close()

    async def call(self, run: HeldRun, called: Called) -> None:
        """Call the run's handler. Store its result or its exception in `called`."""
        if run.not_before:  # the limit on its starts has room for it only then
            try:
                await asyncio.sleep(max(0.0, run.not_before - monotonic()))
            except BaseException as error:  # the run was ended meanwhile
                called.raised = error
                return
        if monotonic() > run.begin_by:
            logger.warning(
                "run handed back: it could not begin in time", extra=fields(task=run.task_id, run=run.run_id)
            )
            called.judged = ended(run, EndReason.LATE), 0
            return
        isolation = self.isolation_of(run)
        marks = run.marked()
        marks.keeper = self._observers.keeper
        if isolation is not None:
            await self._call_isolated(isolation, run, called)
            return
        # The asyncio task of the run has a context of its own. The threads of handlers get a copy.
        RUN.set(marks)
        needs_context = run.handler.context_parameter is not None or self._middleware
        context = self._context(run) if needs_context else None
        if not self._middleware or context is None:
            await self._call(run, context, called)
            return
        entered = Entered()
        try:
            await entered.enter(self._middleware, RunCall(context))
        except BaseException as error:
            called.raised = error
        else:
            await self._call(run, context, called)
        await entered.leave(called.returned, called.raised)

    def isolation_of(self, run: HeldRun) -> Isolation | None:
        """Return the executors if the handler of this run belongs there, else None."""
        is_isolated = self._isolation is not None and self._isolation.isolates(run.handler)
        return self._isolation if is_isolated else None

    async def _call_isolated(self, isolation: Isolation, run: HeldRun, called: Called) -> None:
        tracer = self._observers.tracer
        if tracer is None:
            await isolation.call(run, called)
            return
        begun = watch((tracer.isolated,), RunCall(self._context(run)))  # a tracer that fails disturbs no run
        await isolation.call(run, called)
        leave(begun, called.returned, called.raised)

    def _context(self, run: HeldRun) -> Context:
        return Context(run, self._worker_id, self._transactions, self._on_progress, self._values, self._operations)

    async def _call(self, run: HeldRun, context: Context | None, called: Called) -> None:
        handler = run.handler
        try:
            arguments = handler.bind(run.params)
            if handler.context_parameter is not None:
                arguments[handler.context_parameter] = context
            if handler.is_async:
                coroutine = handler.function(**arguments)
                called.returned = await Beginning(coroutine, run.on_begin)
            else:
                function: Callable[[], Any] = partial(handler.function, **arguments)
                if run.on_begin is not None:
                    function = _begun(run.on_begin, function)
                called.thread = self._threads.start(function)
                await called.thread.future
                called.returned, called.raised = called.thread.take()
        except BaseException as error:  # a SystemExit that a handler raises must not end the worker
            called.raised = error


class Beginning(Generator[Any, Any, Any]):
    """Awaits a coroutine, and tells when its first step is over.

    The system may take the processor away between any two lines. So what is told before the first line of the handler
    may be too early. A process that the coroutine has forked ends after the step: the event loop is its parent's.
    """

    def __init__(self, coroutine: Coroutine[Any, Any, Any], on_begin: Callable[[], object] | None) -> None:
        self._coroutine = coroutine
        self._on_begin = on_begin

    __await__ = Generator.__iter__

    def send(self, value: Any) -> Any:
        """Run the next step."""
        try:
            return self._step(self._coroutine.send, value)
        finally:
            if self._on_begin is not None:
                self._on_begin()
                self._on_begin = None

    def throw(self, *error: Any) -> Any:
        """Raise an exception in the coroutine."""
        return self._step(self._coroutine.throw, *error)

    def _step(self, step: Callable[..., Any], *given: Any) -> Any:
        try:
            yielded = step(*given)
        except BaseException as error:
            end_if_forked(None if isinstance(error, StopIteration) else error)  # that is the end of a coroutine
            raise
        end_if_forked()
        return yielded


def _begun(on_begin: Callable[[], object], function: Callable[[], Any]) -> Callable[[], Any]:
    """Return a function that tells that it begins."""

    def begin() -> Any:
        on_begin()
        return function()

    return begin
