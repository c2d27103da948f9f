"""The caller: calls a run's handler, on the event loop or in a thread, inside the app's middleware."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Generator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from time import monotonic
from typing import Any, Protocol

from mtask.errors import DatabaseUnavailable, InvalidParams
from mtask.kernel.document.handlers import Around, Entered, Handler, leave, watch
from mtask.kernel.driver import connect
from mtask.kernel.driver.codec import Codec
from mtask.kernel.driver.operation import Operation, T
from mtask.kernel.driver.stores import AsyncStore, SyncStore
from mtask.kernel.operations.relays import Relay
from mtask.kernel.statements.finish import Outcome
from mtask.kernel.worker.process import runtime
from mtask.kernel.worker.process.log import fields, logger
from mtask.kernel.worker.running.outcomes import ended
from mtask.kernel.worker.running.run import EndReason, HeldRun
from mtask.logs import RUN

_LEFT_OPEN = (
    "the handler returned without leaving the block of context.transaction(): nothing of it is written. "
    "Use `async with`, or `with` in a sync handler"
)


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


class Execution(Protocol):
    """Where some handlers run instead of the worker's process."""

    async def call(self, run: HeldRun, called: Called) -> None:
        """Run the handler. Store what came of it in `called`."""

    def end(self, run: HeldRun, reason: EndReason) -> None:
        """End the handler, by force if it does not end by itself."""


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What an app has around the calls of its handlers."""

    #: Makes the context of a run, which its handler gets.
    context: Callable[[HeldRun], Any]
    #: Makes what middleware gets of the context.
    call: Callable[[Any], Any]
    middleware: Sequence[Any] = ()  #: what runs around each call
    #: Observes, in the worker, the calls of handlers that run in executors. There the middleware runs, too.
    isolated: Around[Any] | None = None


class Caller:
    """Calls handlers with their arguments and context."""

    def __init__(
        self,
        surroundings: Surroundings,
        leave_transaction: Callable[[HeldRun], Awaitable[None]],
        executions: Sequence[Callable[[Handler], Execution | None]] = (),
        keeper: object | None = None,
    ) -> None:
        """`leave_transaction` aborts the transaction that a handler has left open.

        `executions` tell of a handler where it runs, if not in this process. There the middleware runs, too.
        `keeper` keeps the lines that handlers log.
        """
        self._around = surroundings
        self._leave_transaction = leave_transaction
        self._executions = executions
        self._keeper = keeper
        self._threads = Threads("mtask-handler")

    def close(self) -> None:
        """End each thread after its current call."""
        self._threads.close()

    async def call(self, run: HeldRun, called: Called) -> None:
        """Call the run's handler. Store its result or its exception in `called`."""
        if run.not_before:  # the gate lets it begin only then
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
        execution = self.execution_of(run)
        marks = run.marked()
        marks.keeper = self._keeper
        if execution is not None:
            await self._call_elsewhere(execution, run, called)
            return
        # The asyncio task of the run has a context of its own. The threads of handlers get a copy.
        RUN.set(marks)
        middleware = self._around.middleware
        needs_context = run.handler.context_parameter is not None or middleware
        context = self._around.context(run) if needs_context else None
        if not middleware:
            await self._call(run, context, called)
        else:
            entered = Entered()
            try:
                await entered.enter(middleware, self._around.call(context))
            except BaseException as error:
                called.raised = error
            else:
                await self._call(run, context, called)
            await entered.leave(called.returned, called.raised)
        if run.is_in_transaction:
            await self._end_transaction(run, called)

    async def _end_transaction(self, run: HeldRun, called: Called) -> None:
        """Abort the transaction that a handler has left open: its writes are lost, so a handler that returned fails.

        A sync handler whose run was ended may still be in the block, in its thread.
        """
        if called.thread is not None and not called.thread.is_over:
            return
        if called.raised is None:
            called.raised = RuntimeError(_LEFT_OPEN)
        try:
            await asyncio.shield(asyncio.ensure_future(self._leave_transaction(run)))
        except asyncio.CancelledError as error:  # the run was ended meanwhile
            called.raised = error

    def execution_of(self, run: HeldRun) -> Execution | None:
        """Return where the handler of this run belongs; None: in this process."""
        for execution_of in self._executions:
            if (found := execution_of(run.handler)) is not None:
                return found
        return None

    async def _call_elsewhere(self, execution: Execution, run: HeldRun, called: Called) -> None:
        observe = self._around.isolated
        if observe is None:
            await execution.call(run, called)
            return
        call = self._around.call(self._around.context(run))
        begun = watch((observe,), call)  # a tracer that fails disturbs no run
        await execution.call(run, called)
        leave(begun, called.returned, called.raised)

    async def _call(self, run: HeldRun, context: Any, called: Called) -> None:
        handler = run.handler
        try:
            try:
                arguments = handler.arguments_of(run.params, run.version)
            except InvalidParams:
                run.is_misfit = True
                raise
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
            if runtime.is_forked:
                runtime.end_forked(None if isinstance(error, StopIteration) else error)  # that is a coroutine's end
            raise
        if runtime.is_forked:
            runtime.end_forked(None)
        return yielded


def _begun(on_begin: Callable[[], object], function: Callable[[], Any]) -> Callable[[], Any]:
    """Return a function that tells that it begins."""

    def begin() -> Any:
        on_begin()
        return function()

    return begin


# --- handler operations ----------------------------------------------------------------------------------

# Handler operations: run what handlers ask of the database, on the connections for handlers.

_STOPPED = "the worker has stopped"


class RunOperations:
    """Runs the operations of this worker's handlers."""

    def __init__(
        self, stores: HandlerStores, handlers: Mapping[str, Handler], relays: Sequence[Relay], known: Any = None
    ) -> None:
        """`relays` settle what ends because of what a handler does.

        `known` tells what handlers of other apps declare; None: nothing is known of them.
        """
        self._stores = stores
        self.handlers = handlers
        self.relays = relays
        self.known = known

    async def run(self, operation: Operation[T]) -> T:
        """Run an operation for an async handler; raise a subclass of DatabaseError."""
        store = self._stores.for_async()
        if store is None:
            raise DatabaseUnavailable(_STOPPED)
        return await store.run(operation)

    def run_sync(self, operation: Operation[T]) -> T:
        """Run an operation for a sync handler, in its thread; raise a subclass of DatabaseError."""
        store = self._stores.for_sync()
        if store is None:
            raise DatabaseUnavailable(_STOPPED)
        return store.run(operation)


# --- handler stores --------------------------------------------------------------------------------------

# Handler stores: the database connections for the transactions of handlers. The worker itself uses others.


class HandlerStores:
    """Two stores, one for async and one for sync handlers. The first transaction of each kind opens its store.

    The statements in a handler's transaction may take long. They use a connection pool of their own, so they take no
    connection away from claims, pings and finishes. The worker's time limits do not apply to these statements.
    """

    def __init__(self, uri: str, database: str, app_name: str, codec: Codec) -> None:
        """`codec`: that of what handlers publish and read."""
        self._uri = uri
        self._database = database
        self._app_name = app_name
        self._codec = codec
        self._lock = threading.Lock()
        self._async: AsyncStore | None = None
        self._sync: SyncStore | None = None
        self._is_closed = False

    def for_async(self) -> AsyncStore | None:
        """Return the store of async handlers; None after `close`. Call this in the event loop."""
        if self._async is None and not self._is_closed:
            self._async = connect.async_store(self._uri, self._database, self._app_name)
            self._async.codec = self._codec
        return self._async

    def for_sync(self) -> SyncStore | None:
        """Return the store of sync handlers; None after `close`. Any thread may call this."""
        with self._lock:
            if self._sync is None and not self._is_closed:
                self._sync = connect.sync_store(self._uri, self._database, self._app_name)
                self._sync.codec = self._codec
            return self._sync

    async def close(self) -> None:
        """Close the open stores. No store is opened after that, because a sync handler may outlive its worker."""
        with self._lock:
            self._is_closed = True
            made_async, self._async = self._async, None
            made_sync, self._sync = self._sync, None
        if made_async is not None:
            await made_async.close()
        if made_sync is not None:
            await runtime.to_thread(made_sync.close)


# --- threads ---------------------------------------------------------------------------------------------

# Threads for sync handlers. If several calls end at about the same time, they wake the event loop only once.

Call = Callable[[], Any]


class ThreadCall:
    """A call of a function in a thread. In the event loop, `future` tells when the call has ended."""

    __slots__ = ("_call", "_context", "_error", "_on_end", "_returned", "future", "is_over")

    def __init__(self, call: Call, future: asyncio.Future[None]) -> None:
        self._call = call
        self._context = contextvars.copy_context()
        self._on_end: Callable[[], None] | None = None
        self.future = future  #: done when the event loop knows that the call has ended
        self.is_over = False  #: whether the event loop knows that the call has ended
        self._returned: Any = None
        self._error: BaseException | None = None

    def run(self) -> None:
        """Make the call, in the thread, unless the call was cancelled. Keep any exception, even `SystemExit`."""
        if self.future.cancelled():
            return
        try:
            self._returned = self._context.run(self._call)
        except BaseException as error:
            self._error = error
        if runtime.is_forked:
            runtime.end_forked(self._error)

    def take(self) -> tuple[Any, BaseException | None]:
        """Return the result and the exception, and forget both. An exception would keep its frames in memory."""
        taken = self._returned, self._error
        self._returned = self._error = None
        return taken

    def when_over(self, callback: Callable[[], None]) -> None:
        """Call `callback` in the event loop when this call has ended."""
        self._on_end = callback

    def deliver(self) -> None:
        """Mark the call as ended, and wake the code that waits for the call. Call this in the event loop."""
        self.is_over = True
        if self.future.done():
            self.take()  # the future was cancelled, so nobody else takes the result
        else:
            self.future.set_result(None)
        if self._on_end is not None:
            self._on_end()


class Threads:
    """A pool of threads. It starts a new thread only if a call finds no idle thread."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._calls: SimpleQueue[ThreadCall | None] = SimpleQueue()
        self._ended: deque[ThreadCall] = deque()
        self._is_delivery_due = False
        self._is_closed = False
        self._is_short = False
        #: The number of calls that have not ended, as far as the event loop knows.
        self._busy = 0
        self._threads = 0

    def start(self, call: Call) -> ThreadCall:
        """Start a call in a thread. Call this in the event loop.

        Raises RuntimeError if the pool has no thread and cannot start one.
        """
        loop = asyncio.get_running_loop()
        made = ThreadCall(call, loop.create_future())
        while self._busy - len(self._ended) >= self._threads and self._add_thread(loop):
            pass
        self._busy += 1
        self._calls.put(made)
        return made

    def close(self) -> None:
        """End each thread after its current call. Calls that have not begun are dropped."""
        self._is_closed = True
        for _ in range(self._threads):
            self._calls.put(None)

    def _add_thread(self, loop: asyncio.AbstractEventLoop) -> bool:
        """Start one more thread; return whether it started. If it did not, calls wait until another thread is idle.

        Raises RuntimeError if the pool has no other thread.
        """
        name = f"{self._name}-{self._threads}"
        thread = threading.Thread(target=self._work, args=(loop,), name=name)
        try:
            thread.start()
        except RuntimeError:
            if not self._threads:
                raise
            if not self._is_short:
                logger.warning("no further thread can be started, for now", extra=fields(threads=self._threads))
            self._is_short = True
            return False
        self._is_short = False
        self._threads += 1
        return True

    def _work(self, loop: asyncio.AbstractEventLoop) -> None:
        while (call := self._calls.get()) is not None:
            if not self._is_closed:
                call.run()
            self._ended.append(call)
            del call  # an idle thread must not keep its last call in memory
            if not self._is_delivery_due:
                self._is_delivery_due = True
                with suppress(RuntimeError):  # the loop has closed: nobody waits for the call
                    loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        # The flag is cleared first, so a call that ends from now on causes another delivery.
        self._is_delivery_due = False
        while self._ended:
            self._busy -= 1
            self._ended.popleft().deliver()
