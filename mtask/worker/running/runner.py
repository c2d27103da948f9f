"""The runner: runs a handler under a held lease, ends it when it must end, and says how it ended."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from math import inf
from time import monotonic
from typing import Any

from mtask.app.context import Context, Transactions
from mtask.errors import (
    LeaseLost,
    MtaskError,
)
from mtask.model.status import RunStatus
from mtask.store.driver.stores import AsyncStore
from mtask.store.statements.outcome import Outcome
from mtask.store.tasks import claims
from mtask.worker.leases.held_run import SILENT, EndReason, HeldRun
from mtask.worker.leases.pinger import Pinger
from mtask.worker.log import fields, logger
from mtask.worker.running.finisher import Finisher, refusal
from mtask.worker.running.outcomes import checked, ended, failed
from mtask.worker.running.threads import ThreadCall, Threads

#: What a handler that was cancelled gets before its run's end is recorded without it, in seconds.
_CANCEL_GRACE = 2.0


class Runner:
    """Runs handlers.

    `on_slot_free` is called once for each run, when it has really ended; `on_over` with task and run_id where it
    ends without the finisher, and whether it is closed in its document.
    """

    def __init__(
        self,
        store: AsyncStore,
        pinger: Pinger,
        finisher: Finisher,
        contexts: Transactions[HeldRun],
        worker_id: str,
        on_slot_free: Callable[[], None],
        on_over: Callable[..., None],
    ) -> None:
        self._store = store
        self._pinger = pinger
        self._finisher = finisher
        self._contexts = contexts
        self._worker_id = worker_id
        self._on_slot_free = on_slot_free
        self._on_over = on_over
        self._threads = Threads("mtask-handler")
        self._runs: dict[str, HeldRun] = {}
        self._by_task: dict[str, HeldRun] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._busy_threads = 0
        self._empty = asyncio.Event()
        self._empty.set()

    @property
    def runs(self) -> list[HeldRun]:
        """The runs whose handlers are under way."""
        return list(self._runs.values())

    def held_run(self, task_id: str) -> HeldRun | None:
        """Return the run of this task that is under way here."""
        return self._by_task.get(task_id)

    @property
    def has_stuck_threads(self) -> bool:
        """Whether a plain handler still runs in its thread, although its run has ended."""
        return self._busy_threads > 0

    def hold(self, run: HeldRun) -> None:
        """Hold the lease from now on; `start` or `hand_back` follows."""
        self._by_task[run.task_id] = run
        self._pinger.hold(run)

    def hand_back(self, run: HeldRun) -> None:
        """Give a run back that was not started."""
        self._forget(run)
        if run.is_lease_valid:
            self._finisher.submit(run, ended(run, run.end_reason or EndReason.NO_SLOT))
        else:
            self._pinger.release(run)
            self._on_over(run.task_id, run.run_id, is_closed=run.end_reason is EndReason.REMOVED)

    def start(self, run: HeldRun) -> None:
        """Run the handler of a run that is held."""
        self._runs[run.run_id] = run
        self._empty.clear()
        run.begins()
        loop = asyncio.get_running_loop()
        run.loop = loop
        run.asyncio_task = task = loop.create_task(self._execute(run))
        run.on_end = self._on_end
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        if run.end_reason is not None:  # it ended before it could be told; the task must have begun to be ended
            loop.call_soon(self._on_end, run, run.end_reason)

    async def wait_empty(self, timeout: float | None) -> bool:
        """Wait until no handler is under way; return whether that came about in `timeout` seconds."""
        try:
            async with asyncio.timeout(timeout):
                await self._empty.wait()
        except TimeoutError:
            return False
        return True

    def close(self) -> None:
        """Let the threads go."""
        self._threads.close()

    def _on_end(self, run: HeldRun, reason: EndReason) -> None:
        """Act on an end from outside, in the loop: async handlers are cancelled, plain ones have been told."""
        task = run.asyncio_task
        if task is None or task.done() or run.is_finishing or run.succeeded_in_transaction:
            return
        if run.handler.is_async or reason in SILENT or reason is EndReason.RUN_TIMEOUT:
            # A plain handler that is out of time, or without its lease, is no longer waited for.
            logger.info("run ended", extra=fields(task=run.task_id, run=run.run_id, reason=reason.value))
            task.cancel()
            if reason is EndReason.RUN_TIMEOUT:
                asyncio.get_running_loop().call_later(_CANCEL_GRACE, self._give_up, run)

    def _give_up(self, run: HeldRun) -> None:
        """Record the end of a run whose handler goes on although it was cancelled: its slot stays taken."""
        if run.run_id in self._runs and not run.is_finishing and not run.is_over:
            self._finisher.submit(run, ended(run, EndReason.RUN_TIMEOUT))

    async def _execute(self, run: HeldRun) -> None:
        timer = None
        if run.deadline != inf:
            loop = asyncio.get_running_loop()
            timer = loop.call_later(max(0.0, run.deadline - monotonic()), run.end, EndReason.RUN_TIMEOUT)
        thread: ThreadCall | None = None
        returned: Any = None
        raised: BaseException | None = None
        try:
            arguments = run.handler.bind(run.task.params)
            if run.handler.context_parameter is not None:
                arguments[run.handler.context_parameter] = Context(
                    run, self._worker_id, self._contexts, self._pinger.expedite
                )
            if run.handler.is_async:
                returned = await run.handler.function(**arguments)
            else:
                thread = self._threads.start(partial(run.handler.function, **arguments))
                await thread.future
                returned, raised = thread.take()
        except BaseException as error:  # sys.exit and the like must not take the worker along
            raised = error
        finally:
            if timer is not None:
                timer.cancel()
        try:
            await self._conclude(run, returned, raised)
        except BaseException:
            logger.exception("run could not be concluded", extra=fields(task=run.task_id, run=run.run_id))
            self._pinger.release(run)
        finally:
            raised = None  # its traceback holds this frame: what is done would wait until Python looks for cycles
            self._leave(run, thread)

    def _leave(self, run: HeldRun, thread: ThreadCall | None) -> None:
        del self._runs[run.run_id]
        self._forget(run)
        if not self._runs:
            self._empty.set()
        run.asyncio_task = None
        if thread is None or thread.is_over:
            self._on_slot_free()
            return
        # The thread cannot be ended: its slot stays taken until it ends by itself.
        logger.warning("plain handler goes on after its run ended", extra=fields(task=run.task_id, run=run.run_id))
        self._busy_threads += 1
        thread.when_over(self._thread_ended)

    def _forget(self, run: HeldRun) -> None:
        if self._by_task.get(run.task_id) is run:
            del self._by_task[run.task_id]

    def _thread_ended(self) -> None:
        self._busy_threads -= 1
        self._on_slot_free()

    async def _conclude(self, run: HeldRun, returned: Any, raised: BaseException | None) -> None:
        if run.is_finishing:
            return  # handed back already
        if run.succeeded_in_transaction:
            run.is_finishing = True
            self._pinger.release(run)
            self._on_over(run.task_id, run.run_id, is_closed=True)
            await self._add_returns(run, returned, raised)
            return
        reason = run.end_reason
        if reason in SILENT or (reason is None and isinstance(raised, LeaseLost)):
            self._pinger.release(run)
            self._on_over(run.task_id, run.run_id, is_closed=reason is EndReason.REMOVED)
            return
        if reason is EndReason.WORKER_STOP and raised is None:
            reason = None  # it came to its end in time after all
        if reason is None and monotonic() > run.deadline:
            reason = EndReason.RUN_TIMEOUT  # the loop was blocked, and could not end it
        if reason is not None:
            self._finisher.submit(run, ended(run, reason))
        elif raised is not None:
            self._finisher.submit(run, failed(run, raised))
        else:
            value, size, refused = checked(returned)
            outcome = refusal(run, refused) if refused else Outcome(run.task_id, run.run_id, RunStatus.SUCCESS, value)
            self._finisher.submit(run, outcome, size)

    async def _add_returns(self, run: HeldRun, returned: Any, raised: BaseException | None) -> None:
        if raised is not None:
            logger.error(
                "handler failed after its transaction had committed: the task stays SUCCESS",
                extra=fields(task=run.task_id, run=run.run_id),
                exc_info=raised,
            )
            return
        value, _, refused = checked(returned)
        if refused:
            logger.error(refused, extra=fields(task=run.task_id, run=run.run_id))
        elif value is not None:
            try:
                await self._store.run(claims.set_returns(run.task_id, run.run_id, value))
            except MtaskError as error:
                logger.error("returns not stored", extra=fields(task=run.task_id, run=run.run_id, reason=str(error)))
