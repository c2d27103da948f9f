"""What executors report of their runs: progress, lines of logs, transactions and ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import AbstractContextManager
from typing import Any

from mtask.errors import LeaseLost, MtaskError, RunCanceled
from mtask.features.isolation.executor import Executor
from mtask.features.isolation.messages import Message, follow, outcome_in, reason_in
from mtask.features.logs.worker import LogKeeper
from mtask.kernel.document.status import RunStatus
from mtask.kernel.driver.stores import AsyncStore
from mtask.kernel.operations import sessions
from mtask.kernel.worker.process import aside
from mtask.kernel.worker.process.log import fields, logger, told
from mtask.kernel.worker.running.call import Called
from mtask.kernel.worker.running.leases import Pinger
from mtask.kernel.worker.running.outcomes import RaisedElsewhere
from mtask.kernel.worker.running.run import SILENT, HeldRun


def take_done(run: HeldRun, done: Message, called: Called) -> None:
    """Store what an executor says of a run that is over."""
    reason = reason_in(done)
    if reason is not None:  # the executor has learned it first, by a ping of its own before a transaction
        run.end(reason)
    if done["progress"] is not None:
        run.report(done["progress"])
    if run.trace is None:
        follow(run, done["trace"])
    if done["is_committed"]:
        called.returned, called.lost = done["late"], done["lost"]
        return
    raised = done["raised"]
    outcome = outcome_in(done["outcome"])
    if raised == "LeaseLost":
        called.raised = LeaseLost(run.task_id, run.run_id)
    elif raised == "RunCanceled":
        called.raised = RunCanceled(run.task_id, run.run_id)
    elif raised is not None:
        called.raised = RaisedElsewhere(outcome, done["error_type"])
    called.judged = outcome, done["size"]


class Reports:
    """Takes what runs report from executors, and settles the transactions of executors that died."""

    def __init__(
        self,
        pinger: Pinger,
        store: AsyncStore,
        keeper: LogKeeper | None,
        is_in: Callable[[HeldRun, Executor], bool],
    ) -> None:
        """`keeper` keeps the lines that handlers log. `is_in` tells whether a run is still in this executor."""
        self._pinger = pinger
        self._store = store
        self._keeper = keeper
        self._is_in = is_in
        #: What keeps the pinger from a run while its transaction is under way. The key is the run_id.
        self._suspensions: dict[str, AbstractContextManager[None]] = {}
        self._jobs: set[asyncio.Task[None]] = set()

    def take(self, executor: Executor, run: HeldRun, message: Message) -> None:
        """Take one report."""
        match message["kind"]:
            case "progress":
                run.report(message["progress"])
                self._pinger.expedite(run)
            case "begun":
                if run.on_begin is not None:
                    run.on_begin()
            case "log":
                self._keep(run, message)
            case "pause":
                self._begin_job(self._pause(executor, run))
            case "renewed":
                run.trusted_until = max(run.trusted_until, message["until"])
            case "committed":
                self._committed(run, goes_on=message["goes_on"], owes_value=message["owes_value"])
            case "resume":
                self.resume(run)

    def _keep(self, run: HeldRun, message: Message) -> None:
        """Keep lines that a handler has logged in its executor."""
        if self._keeper is None:
            return
        log = self._keeper.log_of(run.marked())
        if message["lost"]:
            log.skip(message["lost"])
        for line in message["lines"]:
            log.add(line)

    async def _pause(self, executor: Executor, run: HeldRun) -> None:
        """Send no ping for this run until `resume`, and tell the executor when none is under way any more."""
        suspension = self._pinger.suspended(run)
        await aside.to_thread(suspension.__enter__)
        if not self._is_in(run, executor) or run.run_id in self._suspensions:
            suspension.__exit__(None, None, None)
            return
        self._suspensions[run.run_id] = suspension
        executor.answer({"kind": "paused", "run_id": run.run_id, "until": run.trusted_until})

    def resume(self, run: HeldRun) -> None:
        """Let the pinger extend the lease of this run again, if it was told to stop."""
        suspension = self._suspensions.pop(run.run_id, None)
        if suspension is not None:
            suspension.__exit__(None, None, None)

    def _committed(self, run: HeldRun, *, goes_on: bool, owes_value: bool) -> None:
        run.goes_on, run.owes_value = goes_on, owes_value
        run.succeeded_in_transaction = True
        self._pinger.release(run)

    async def settle(self, run: HeldRun) -> None:
        """Settle the transaction in which an executor died: it is aborted now, or it had been committed.

        No ping is sent meanwhile. If the database does not answer, the fence of the finish decides: a run that has
        committed is no longer RUNNING.
        """
        if run.run_id not in self._suspensions or run.succeeded_in_transaction:
            return
        try:
            status = await self._store.run(sessions.end_of_run(run.task_id, run.run_id))
        except MtaskError as error:
            logger.warning(
                "transaction of a dead executor not ended",
                extra=fields(task=run.task_id, run=run.run_id, reason=told(error)),
            )
            return
        if status == RunStatus.SUCCESS and run.end_reason not in SILENT:
            # Whether the task goes on is in its document: settling a task that does not go on does nothing.
            # The same holds for a value that it does not owe.
            self._committed(run, goes_on=True, owes_value=True)

    def _begin_job(self, job: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(job)
        self._jobs.add(task)
        task.add_done_callback(self._jobs.discard)

    async def wait(self) -> None:
        """Wait for the reports that are being worked off."""
        await asyncio.gather(*self._jobs, return_exceptions=True)
