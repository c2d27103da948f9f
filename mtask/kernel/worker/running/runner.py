"""The runner: takes a run from its claim to its outcome, step by step. If necessary, it ends the run early."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from math import inf
from time import monotonic

from mtask.errors import DatabaseError, LeaseLost, MtaskError, RunCanceled
from mtask.kernel.document.status import RunStatus
from mtask.kernel.operations import encode
from mtask.kernel.statements.finish import Outcome
from mtask.kernel.worker.process.log import fields, logger, told
from mtask.kernel.worker.process.state import Scope
from mtask.kernel.worker.process.time import Backoff
from mtask.kernel.worker.running.call import Called, Caller
from mtask.kernel.worker.running.finisher import Finisher
from mtask.kernel.worker.running.leases import Pinger
from mtask.kernel.worker.running.outcomes import Successes, ended, refusal
from mtask.kernel.worker.running.run import SILENT, EndReason, HeldRun
from mtask.kernel.worker.running.transactions import LateReturns, late_value
from mtask.logs import RUN

#: The time that a cancelled handler gets to end, in seconds. After this time the outcome of its run is written, even if
#: the handler continues.
_CANCEL_GRACE = 2.0
#: The pauses between tries to load what it takes to encode an outcome, in seconds.
_PAUSE, _MAX_PAUSE = 0.1, 2.0


class Runner:
    """Runs handlers while the worker holds the leases of their runs."""

    def __init__(
        self,
        scope: Scope,
        pinger: Pinger,
        finisher: Finisher,
        caller: Caller,
        successes: Successes,
        on_misfit: Callable[[HeldRun, Outcome], Awaitable[Outcome]] | None = None,
    ) -> None:
        """`on_misfit` decides what becomes of a run whose params do not fit. None: it is what the outcome says."""
        self._scope = scope
        self._codec = scope.store.codec
        self._ledger = scope.ledger
        self._pinger = pinger
        self._finisher = finisher
        self._caller = caller
        self._successes = successes
        self._on_misfit = on_misfit
        self._returns = LateReturns(scope.store)
        self._busy_threads = 0
        # Python 3.11 makes a call of the system each time it is asked for the loop.
        self._loop = asyncio.get_running_loop()
        self._empty = asyncio.Event()
        self._empty.set()

    @property
    def has_stuck_threads(self) -> bool:
        """Whether a sync handler continues in its thread although its run has ended."""
        return self._busy_threads > 0

    # --- the steps of a run ---------------------------------------------------------------------------------

    def hold(self, runs: Sequence[HeldRun]) -> None:
        """Hold the leases of runs that were claimed. The caller must call `start` or `hand_back` for each next."""
        for run in runs:
            self._ledger.hold(run)
        self._pinger.hold_all(runs)

    def start(self, run: HeldRun) -> None:
        """Start the handler of a run that is already held."""
        self._ledger.running[run.run_id] = run
        self._empty.clear()
        if self._caller.execution_of(run) is None:
            run.begins()  # an executor begins its run itself, as the run may wait for the executor
        run.loop = loop = self._loop
        run.asyncio_task = loop.create_task(self._live(run))  # the ledger keeps the run, and so the asyncio task
        run.on_end = self._on_end
        if run.end_reason is not None:
            # The run was ended before `on_end` was set. `_on_end` is called in the next turn of the loop, because the
            # asyncio task must have begun before it is cancelled.
            loop.call_soon(self._on_end, run, run.end_reason)

    async def _live(self, run: HeldRun) -> None:
        """Take a run to its end: call the handler, make the outcome, submit it to the finisher and free the slot."""
        called, timer = Called(), self._timer_of(run)
        await self._caller.call(run, called)
        run.note_end()
        if timer is not None:
            timer.cancel()
        try:
            outcome, size = self._judged(run, called)
            RUN.set(None)  # what begins from here on is the worker's work, and not the run's
            if outcome is not None:
                if outcome.is_misfit and self._on_misfit is not None:
                    outcome = await self._on_misfit(run, outcome)
                stored = outcome if self._codec.is_plain else await self._encoded(run, outcome)
                if not run.is_finishing:
                    self._finisher.submit(run, outcome, size, stored)  # keeps the lease until the outcome is written
            elif run.is_finishing:
                pass  # the run was handed back already
            elif run.succeeded_in_transaction:
                await self._finish_committed(run, called)
            else:
                self._release(run)
        except BaseException:
            self._pinger.release(run)
            logger.exception("run could not be concluded", extra=fields(task=run.task_id, run=run.run_id))
        finally:
            # The traceback of the exception refers to this frame. Only the cycle collector would free such a cycle.
            called.raised = None
            self._leave(run, called)

    async def _encoded(self, run: HeldRun, outcome: Outcome) -> Outcome:
        """Encode what the outcome stores. If that cannot be done now, try again as long as the lease lasts."""
        pauses = Backoff(_PAUSE, _MAX_PAUSE)
        while True:
            try:
                return await self._scope.store.run(encode.outcome(run.task, outcome))
            except DatabaseError as error:
                logger.warning("outcome not encoded yet", extra=fields(task=run.task_id, reason=told(error)))
                if not run.is_lease_valid or run.is_finishing:
                    return refusal(run, self._codec.refusal)
                await asyncio.sleep(pauses.next())
            except MtaskError as error:
                return refusal(run, f"{self._codec.refusal}: {error}")

    @staticmethod
    def _timer_of(run: HeldRun) -> asyncio.TimerHandle | None:
        """Start a timer that ends the run when its run_timeout_ms is over. Return None if the run has no such limit."""
        if run.deadline == inf:
            return None
        loop = asyncio.get_running_loop()
        return loop.call_later(max(0.0, run.deadline - monotonic()), run.end, EndReason.RUN_TIMEOUT)

    def _judged(self, run: HeldRun, called: Called) -> tuple[Outcome | None, int]:
        """Return the outcome to write, and the size of its value in bytes.

        The outcome is None if there is nothing to write.
        """
        if run.is_finishing or run.succeeded_in_transaction:
            return None, 0  # the run was handed back already, or its transaction wrote its SUCCESS
        reason = run.end_reason
        if reason in SILENT or (reason is None and _is(called.raised, LeaseLost)):
            return None, 0  # the run belongs to another worker, or no longer exists
        if reason is EndReason.WORKER_STOP and called.raised is None:
            reason = None  # the handler returned in time
        if reason is None and monotonic() > run.deadline:
            reason = EndReason.RUN_TIMEOUT  # the loop was blocked, and the timer has not fired
        if reason is None and _is(called.raised, RunCanceled):
            reason = EndReason.CANCELED  # the handler has learned of it before the pinger
        if reason is not None:
            return ended(run, reason), 0
        if called.judged is not None:
            return called.judged
        return self._successes.concluded(run, called.returned, called.raised)

    async def _finish_committed(self, run: HeldRun, called: Called) -> None:
        """Conclude a run whose transaction has written the SUCCESS.

        First store the value that the handler returned after the commit: those whom the end concerns read it.
        """
        run.is_finishing = True
        self._release(run, is_closed=True)
        self._scope.meter.ended(run, RunStatus.SUCCESS)
        self._finisher.heard(run)
        value, lost = late_value(run, called, self._successes)
        if value is not None or run.owes_value:
            await self._returns.store(run, value, lost)
        self._finisher.tell_of_end(run, goes_on=run.goes_on)

    def _release(self, run: HeldRun, *, is_closed: bool | None = None) -> None:
        """Release a run that has no outcome to write.

        `is_closed`: whether the task's document shows the run as closed, or the document is gone. If it is None, the
        run's `end_reason` decides.
        """
        self._pinger.release(run)
        run.leave_gate(is_closed=run.end_reason is EndReason.REMOVED if is_closed is None else is_closed)

    def _leave(self, run: HeldRun, called: Called) -> None:
        """Free the run's slot, now or when its thread ends."""
        del self._ledger.running[run.run_id]
        self._ledger.forget(run)
        if run.marks is not None and run.marks.log is not None:
            run.marks.log.end()
        if not self._ledger.running:
            self._empty.set()
        run.asyncio_task = None
        if called.thread is None or called.thread.is_over:
            self._scope.signals.slot_freed.send()
            return
        # Nobody can end a thread. So the slot stays taken until the thread ends by itself.
        logger.warning("sync handler goes on after its run ended", extra=fields(task=run.task_id, run=run.run_id))
        self._busy_threads += 1
        called.thread.when_over(self._thread_ended)

    def _thread_ended(self) -> None:
        self._busy_threads -= 1
        self._scope.signals.slot_freed.send()

    def hand_back(self, run: HeldRun) -> None:
        """Hand back a run that was not started."""
        self._ledger.forget(run)
        if run.is_lease_valid:
            self._finisher.submit(run, ended(run, run.end_reason or EndReason.NO_SLOT))
        else:
            self._release(run)

    # --- runs that end early, and the stop ------------------------------------------------------------------

    async def wait_empty(self, timeout: float | None) -> bool:
        """Wait until no handler is under way. Return False if a handler is still under way after `timeout` seconds."""
        try:
            async with asyncio.timeout(timeout):
                await self._empty.wait()
        except TimeoutError:
            return False
        return True

    def close(self) -> None:
        """End each thread of sync handlers after its current call."""
        self._caller.close()

    def _on_end(self, run: HeldRun, reason: EndReason) -> None:
        """Cancel the asyncio task of a run that was ended before its handler ended. Call this in the event loop.

        A sync handler cannot be cancelled: it must read `is_cancelled` itself.
        """
        task = run.asyncio_task
        if task is None or task.done() or run.is_finishing or run.succeeded_in_transaction:
            return
        execution = self._caller.execution_of(run)
        if execution is not None:
            execution.end(run, reason)
        elif run.handler.is_async or reason in SILENT or reason is EndReason.RUN_TIMEOUT:
            # The run does not wait for a sync handler that is out of time or has lost its lease.
            logger.info("run ended", extra=fields(task=run.task_id, run=run.run_id, reason=reason.value))
            task.cancel()
            if reason is EndReason.RUN_TIMEOUT:
                asyncio.get_running_loop().call_later(_CANCEL_GRACE, self._give_up, run)

    def _give_up(self, run: HeldRun) -> None:
        """Write the outcome of a run whose handler continues although it was cancelled. The slot stays taken."""
        if run.run_id in self._ledger.running and not run.is_finishing and not run.is_over:
            run.note_end()
            self._finisher.submit(run, ended(run, EndReason.RUN_TIMEOUT))


def _is(error: BaseException | None, kind: type[BaseException]) -> bool:
    """Whether an exception is of this kind. `isinstance` would ask it, and code of the app may raise then."""
    return issubclass(type(error), kind)
