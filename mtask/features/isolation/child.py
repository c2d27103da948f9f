"""The process of an executor: `python -m mtask.features.isolation.child APP SOCKET PARENT`.

It imports the app, calls the start hooks, and then runs one handler after another as its worker asks. It claims
nothing, pings nothing and writes no outcome: only the transactions of handlers use the database.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import socket
import sys
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from functools import partial
from time import monotonic
from typing import Any

from mtask.app.app import App, load_app
from mtask.app.context import Context
from mtask.app.hooks import Started
from mtask.app.middleware import RunCall
from mtask.arguments.publish import Declarations, TaskSpec
from mtask.errors import LeaseLost, MtaskError, RunCanceled
from mtask.features.isolation.messages import (
    Channel,
    Message,
    follow,
    outcome_document,
    reason_in,
    task_in,
    trace_message,
)
from mtask.features.isolation.processes import be_killed_first, end_with_parent
from mtask.features.logs.worker import Line, RunLogHandler, line_of
from mtask.kernel.driver.errors import scrubbed
from mtask.kernel.operations.claim import facts_of
from mtask.kernel.worker.process.log import fields, log_to_stderr, logger, told
from mtask.kernel.worker.process.runtime import exit_now, handle_ends, run_job
from mtask.kernel.worker.running import leases
from mtask.kernel.worker.running.call import Called, Caller, HandlerStores, RunOperations, Surroundings
from mtask.kernel.worker.running.outcomes import MAX_REASON, Successes, name_of
from mtask.kernel.worker.running.run import EndReason, HeldRun
from mtask.kernel.worker.running.transactions import RunTransactions, late_value
from mtask.logs import RUN, RunMarks, first_of
from mtask.parts.codec import codec_in
from mtask.parts.declarations import declarations
from mtask.parts.outcomes import successes
from mtask.parts.relays import RELAYS

#: The number of new objects between two garbage collections, as in a worker.
_GC_THRESHOLD = 10_000
#: The time after the end of the lease after which an executor exits by itself, in seconds. A worker that is not frozen
#: has killed it by then.
_FROZEN = 3.0


class Child:
    """What one executor does, in its event loop."""

    def __init__(self, app_path: str, connected: socket.socket) -> None:
        self._app_path = app_path
        self._channel = Channel(connected, self._take, exit_now)
        self._over = asyncio.Event()
        self._jobs: set[asyncio.Task[None]] = set()
        self._run: HeldRun | None = None
        #: The lines that handlers log, if the worker keeps them.
        self._lines: RunLines | None = None
        #: The timer that looks whether the lease of the run is over.
        self._watching: asyncio.TimerHandle
        self._app: App
        self._started: Started
        self._leases: RemoteLeases
        self._stores: HandlerStores
        self._caller: Caller
        self._successes: Successes
        self._known: Declarations

    async def live(self) -> None:
        """Work until the worker says stop."""
        self._channel.open()
        await self._over.wait()

    def _take(self, message: Message) -> None:
        """Take a message of the worker."""
        match message["kind"]:
            case "hello":
                self._begin(self._prepare(message))
            case "run":
                self._begin(self._live_or_exit(message))
            case "stop":
                self._begin(self._stop())
            case "paused":
                self._leases.paused(message["run_id"], message["until"])
            case kind:
                run = self._run
                if run is None or run.run_id != message["run_id"]:
                    return  # the run is over already
                if kind == "lease":
                    run.trusted_until = max(run.trusted_until, message["until"])
                elif kind == "end":
                    run.end(reason_in(message) or EndReason.WORKER_STOP)

    def _begin(self, job: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(job)
        self._jobs.add(task)
        task.add_done_callback(self._jobs.discard)
        return task

    async def _prepare(self, hello: Message) -> None:
        """Import the app, call the start hooks, and tell the worker."""
        try:
            log_to_stderr(hello["log_level"], hello["own_log_level"], hello["log_format"])
            if hello["keep_logs"]:
                self._lines = RunLines(self._channel.send, hello["keep_logs"])
            self._app = app = load_app(self._app_path)
            app.complete()
            self._started = app.hooks.begin()
            await self._started.start()
        except BaseException as error:
            reason = scrubbed(first_of(f"{type(error).__name__}: {error}", MAX_REASON))
            self._channel.send({"kind": "unready", "reason": reason})
            exit_now(1)
        worker_id = hello["worker_id"]
        self._leases = RemoteLeases(self._channel.send, worker_id)
        codec = codec_in(hello.get("codec"), hello["uri"])
        self._stores = stores = HandlerStores(hello["uri"], hello["database"], f"mtask-worker:{worker_id}", codec)
        self._known = declarations()
        self._successes = successes(app.handlers, self._known)
        leases = self._leases
        transactions = RunTransactions(stores, leases, self._successes, hello["incarnation"])
        operations = RunOperations(stores, app.handlers, RELAYS, self._known)
        context = partial(
            Context,
            worker_id=worker_id,
            transactions=transactions,
            on_progress=leases.expedite,
            values=self._started.values,
            operations=operations,
        )
        self._caller = Caller(Surroundings(context, RunCall, app.around.run), transactions.leave, keeper=self._lines)
        gc.collect()
        gc.freeze()
        self._channel.send({"kind": "ready"})

    # --- a run ----------------------------------------------------------------------------------------------

    async def _live_or_exit(self, message: Message) -> None:
        try:
            await self._live(message)
        except BaseException:  # else the run would be RUNNING for as long as the worker lives
            logger.exception("the executor exits: it cannot tell what came of a run")
            exit_now(1)

    async def _live(self, message: Message) -> None:
        """Run a handler, and tell the worker what came of it."""
        task = task_in(message)
        own = next(entry for entry in reversed(task.runs) if entry.run_id == message["run_id"])
        run = HeldRun(facts_of(task, own), task, self._app.handlers[task.name], 0.0)
        run.trusted_until = message["until"]
        run.loop, run.asyncio_task = asyncio.get_running_loop(), asyncio.current_task()
        run.on_end = _ended
        follow(run, message["trace"])
        if message["tells_begin"]:
            loop, begun = run.loop, {"kind": "begun", "run_id": run.run_id}
            run.on_begin = lambda: loop.call_soon_threadsafe(self._channel.send, begun)
        self._run = run
        self._watch(run)
        if self._lines is not None:
            self._lines.begin(run.run_id)
        called = Called()
        await self._caller.call(run, called)
        await self._look_up(run, called)
        try:
            self._tell(run, called)
        finally:
            RUN.set(None)
            self._run = run.asyncio_task = None
            self._watching.cancel()  # else the timer would keep the run and its params until the end of the lease
            called.raised = None

    async def _look_up(self, run: HeldRun, called: Called) -> None:
        """Find out what the handler of the next task declares, if the run goes on as a task of another app."""
        try:
            name = None if called.raised else self._successes.next_name(run, called.returned)
            if name is None or name in self._app.handlers or not self._known.lacking([TaskSpec(name)]):
                return
            if (store := self._stores.for_async()) is not None:
                await store.run(self._known.learn([name]))
        except MtaskError as error:
            logger.warning("next task published without what its handler declares", extra=fields(reason=told(error)))

    def _watch(self, run: HeldRun) -> None:
        """Exit if the lease is over and the worker does not end the handler: it is frozen, and another has the task."""
        left = run.trusted_until + _FROZEN - monotonic()
        if left > 0:
            self._watching = asyncio.get_running_loop().call_later(left, self._watch, run)
            return
        if run.succeeded_in_transaction:
            return
        logger.error("the lease is over and the worker is silent: the executor exits", extra=fields(task=run.task_id))
        exit_now(1)

    def _tell(self, run: HeldRun, called: Called) -> None:
        """Tell the worker that the handler is over. What was raised stays here: the worker gets an outcome."""
        raised = called.raised
        done: Message = {
            "kind": "done",
            "run_id": run.run_id,
            "reason": None if run.end_reason is None else run.end_reason.name,
            "progress": None if run.progress is None else dict(run.progress),
            "is_committed": run.succeeded_in_transaction,
            "trace": trace_message(run),
        }
        if run.succeeded_in_transaction:
            done["late"], done["lost"] = late_value(run, called, self._successes)
        else:
            is_known = issubclass(type(raised), LeaseLost | RunCanceled)  # `isinstance` would ask what was raised
            done["raised"] = None if raised is None else name_of(raised) if is_known else "other"
            done["error_type"] = None if raised is None else name_of(raised, is_qualified=True)
            outcome, size = self._successes.concluded(run, called.returned, raised)
            done["outcome"], done["size"] = outcome_document(outcome), size
        if self._lines is not None:
            self._lines.send()
        self._channel.send(done)

    async def _stop(self) -> None:
        await self._started.stop()
        await self._stores.close()
        self._caller.close()
        self._over.set()


def _ended(run: HeldRun, reason: EndReason) -> None:
    """Cancel an async handler that is to end. A sync handler reads `is_cancelled`, or the worker kills this process."""
    task = run.asyncio_task
    if run.handler.is_async and task is not None and not run.succeeded_in_transaction:
        task.cancel()


async def _main(app_path: str, descriptor: int) -> None:
    await Child(app_path, socket.socket(fileno=descriptor)).live()


def run() -> None:
    """Run an executor until its worker lets it end."""
    app_path, descriptor, parent = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    end_with_parent(parent)
    be_killed_first()
    os.set_inheritable(descriptor, False)  # a command of a handler must not hold the socket
    # Signals are for the processes that handlers have started. To this process, the worker sends a message.
    # A function and not SIG_IGN: the processes that handlers start do not inherit it.
    handle_ends(lambda *_: None)
    gc.set_threshold(_GC_THRESHOLD, *gc.get_threshold()[1:])
    with asyncio.Runner() as runner:
        run_job(runner.get_loop(), _main(app_path, descriptor))
    exit_now(0)


# --- lines -----------------------------------------------------------------------------------------------

# The lines that handlers log in an executor: it sends them to its worker, which keeps them.

#: The time for which lines gather for one message, in seconds.
_GATHER = 0.05


class RunLines:
    """Gathers the lines of the run in this executor. Any thread may add lines; the event loop sends them."""

    def __init__(self, send: Callable[[Message], None], most: int) -> None:
        """`most`: the most lines that wait to be sent. The worker would keep no more of them."""
        self._send = send
        self._loop = asyncio.get_running_loop()
        self._lock = threading.RLock()
        self._lines: deque[Line] = deque(maxlen=most)
        self._lost = 0
        self._run_id = ""
        logging.getLogger().addHandler(RunLogHandler(self))

    def begin(self, run_id: str) -> None:
        """Take the lines of this run from now on."""
        with self._lock:
            self._run_id = run_id
            self._lines.clear()
            self._lost = 0

    def take(self, marks: RunMarks, record: logging.LogRecord) -> None:
        """Take a line of a run."""
        line = line_of(record)
        with self._lock:
            if marks.run_id != self._run_id:  # something that an earlier run has left behind goes on
                return
            is_first = not self._lines
            self._lost += len(self._lines) == self._lines.maxlen
            self._lines.append(line)
        if is_first:
            with suppress(RuntimeError):  # the loop has closed
                self._loop.call_soon_threadsafe(self._loop.call_later, _GATHER, self.send)

    def send(self) -> None:
        """Send the lines that wait. Call this in the event loop."""
        with self._lock:
            lines, lost, self._lost = list(self._lines), self._lost, 0
            self._lines.clear()
        if lines:
            self._send({"kind": "log", "run_id": self._run_id, "lines": lines, "lost": lost})


# --- leases ----------------------------------------------------------------------------------------------

# The leases of an executor's runs. The worker holds them; here it is asked to pause pings, and told of progress.

#: The least time between two messages of progress, in seconds.
_BETWEEN_PROGRESS = 0.1


class RemoteLeases:
    """Stands for the worker's pinger: it does in messages what the pinger does in the worker's process.

    Threads of handlers call its methods, except where they say otherwise.
    """

    def __init__(self, send: Callable[[Message], None], worker_id: str) -> None:
        """`send` sends a message to the worker. Create this in the event loop; `send` is called there."""
        self._loop = asyncio.get_running_loop()
        self._send_in_loop = send
        self._worker_id = worker_id
        self._paused: dict[str, Future[float]] = {}
        self._next_progress: asyncio.TimerHandle | None = None
        self._is_progress_due = False

    def paused(self, run_id: str, until: float) -> None:
        """Take the worker's answer: it sends no ping of this run now. Call this in the event loop."""
        waiting = self._paused.get(run_id)
        if waiting is not None and not waiting.done():
            waiting.set_result(until)

    @contextmanager
    def suspended(self, run: HeldRun) -> Iterator[None]:
        """Let the worker send no ping for this run inside the `with` block. See `Pinger.suspended`."""
        waiting: Future[float] = Future()
        self._paused[run.run_id] = waiting
        try:
            self._send("pause", run)
            run.trusted_until = max(run.trusted_until, waiting.result())
        finally:
            del self._paused[run.run_id]
        run.suspended += 1
        try:
            yield
        finally:
            run.suspended -= 1
            self._send("resume", run)

    def apply(self, runs: Sequence[HeldRun], documents: list[dict[str, Any]], sent: float | None) -> None:
        """Apply the document that a renewal has read, and tell the worker how long the lease holds."""
        leases.apply(runs, documents, sent, self._worker_id)
        for run in runs:
            self._send("renewed", run, until=run.trusted_until)

    def release(self, run: HeldRun) -> None:
        """Tell the worker that the transaction has committed: the run needs its lease no more."""
        self._send("committed", run, goes_on=run.goes_on, owes_value=run.owes_value)

    def expedite(self, run: HeldRun) -> None:
        """Tell the worker of the run's progress: at once, but not more than ten times a second."""
        if not self._is_progress_due:
            self._is_progress_due = True
            self._loop.call_soon_threadsafe(self._tell_progress, run)

    def _tell_progress(self, run: HeldRun) -> None:
        if self._next_progress is not None:
            return  # the timer calls this again
        self._is_progress_due = False
        progress = run.progress
        if progress is not None:
            run.was_written(progress)
            self._send_in_loop({"kind": "progress", "run_id": run.run_id, "progress": dict(progress)})
            self._next_progress = self._loop.call_later(_BETWEEN_PROGRESS, self._may_tell_again, run)

    def _may_tell_again(self, run: HeldRun) -> None:
        self._next_progress = None
        if self._is_progress_due:
            self._tell_progress(run)

    def _send(self, kind: str, run: HeldRun, **more: Any) -> None:
        message = {"kind": kind, "run_id": run.run_id, **more}
        self._loop.call_soon_threadsafe(self._send_in_loop, message)


if __name__ == "__main__":
    run()
