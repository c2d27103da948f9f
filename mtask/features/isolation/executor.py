"""An executor as its worker sees it: a child process that runs one handler after another, one at a time."""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
from collections.abc import Callable, Coroutine
from contextlib import AbstractContextManager, suppress
from enum import Enum, auto
from time import monotonic
from typing import Any, Protocol

from mtask.errors import LeaseLost, MtaskError, RunCanceled
from mtask.features.isolation.messages import Channel, Message, follow, outcome_in, reason_in, run_message
from mtask.features.isolation.processes import DeathWatch, cause_of_death, kill_group, reap_group, resident_bytes
from mtask.features.logs.worker import LogKeeper
from mtask.kernel.document.status import RunStatus
from mtask.kernel.driver.stores import AsyncStore
from mtask.kernel.operations import sessions
from mtask.kernel.worker.process import runtime
from mtask.kernel.worker.process.log import fields, logger, told
from mtask.kernel.worker.running.call import Called
from mtask.kernel.worker.running.leases import Pinger
from mtask.kernel.worker.running.outcomes import ExecutorDied, RaisedElsewhere
from mtask.kernel.worker.running.run import SILENT, EndReason, HeldRun

#: The time between SIGTERM and SIGKILL for a handler that is to end, in seconds.
GRACE = 1.0
#: The pause between two tries to reap what an executor has left behind, in seconds, and the most tries.
_REAP_PAUSE, _REAP_TRIES = 0.1, 50
#: An idle executor is replaced if this part of the memory that it had left at its start is gone. Else the next run
#: would be killed for what earlier runs have kept.
_KEPT_SHARE = 0.5


class State(Enum):
    """What an executor does."""

    STARTING = auto()
    IDLE = auto()
    BUSY = auto()
    LEAVING = auto()  #: it gets no more runs, and ends
    DEAD = auto()


class Owner(Protocol):
    """What an executor tells the pool of executors."""

    def became_ready(self, executor: Executor) -> None:
        """The executor has started, and is idle."""

    def died(self, executor: Executor, cause: str) -> None:
        """The process has ended, and nothing of it is left. The future of its run, if any, is done already."""

    def reported(self, executor: Executor, run: HeldRun, message: Message) -> None:
        """Its run reports something while the handler is under way."""


class Executor:
    """One child process, and the run that is in it."""

    def __init__(
        self, process: subprocess.Popen[bytes], connected: socket.socket, owner: Owner, max_memory_mib: int | None
    ) -> None:
        self.pid = process.pid
        self.state = State.STARTING
        self.run: HeldRun | None = None
        self.run_cnt = 0
        #: Why it could not start, if it says so.
        self.why_unready: str | None = None
        self.was_ready = False
        #: Whether the worker has told it to end.
        self.is_dismissed = False
        self._process = process
        self._owner = owner
        self._max_memory_mib = max_memory_mib
        self._done: asyncio.Future[Message] | None = None
        #: What to say of the death of the process, if the worker has killed it.
        self._cause: str | None = None
        self._killing: asyncio.TimerHandle | None = None
        self._told_until = 0.0
        self._looked_at = 0.0
        self._fresh_mib = 0.0
        self.ended = asyncio.Event()
        self._channel = Channel(connected, self._take, self._fell_silent)
        self._channel.open()
        self._watch = DeathWatch(process, self._died)

    @property
    def is_taken(self) -> bool:
        """Whether a run has got this executor, and it lives."""
        return self.state is State.BUSY

    def hello(self, message: Message) -> None:
        """Send what the process needs to start."""
        self._channel.send({"kind": "hello", **message})

    async def execute(self, run: HeldRun) -> Message:
        """Run a handler to its end; return the message `done`. Raises ExecutorDied if the process dies first."""
        self.state, self.run = State.BUSY, run
        self.run_cnt += 1
        self._told_until = run.trusted_until
        self._done = asyncio.get_running_loop().create_future()
        self._channel.send(run_message(run))
        try:
            return await self._done
        finally:
            self._done = self.run = None
            if self._killing is not None:
                self._killing.cancel()
                self._killing = None
            if self.state is State.BUSY:
                self.state = State.IDLE

    def answer(self, message: Message) -> None:
        """Send an answer to a report of the run."""
        self._channel.send(message)

    # --- ends -----------------------------------------------------------------------------------------------

    def end_run(self, reason: EndReason) -> None:
        """Tell the handler to end, and kill the process if it does not.

        Processes that the handler has started get SIGTERM at once. The executor itself ignores SIGTERM: for it, the
        message counts, since the message names the run.
        """
        run = self.run
        if run is None or self.state is State.DEAD:
            return
        self._channel.send({"kind": "end", "run_id": run.run_id, "reason": reason.name})
        kill_group(self.pid, signal.SIGTERM)
        if self._killing is None:
            self._killing = asyncio.get_running_loop().call_later(GRACE, self._outstayed, run, reason)

    def _outstayed(self, run: HeldRun, reason: EndReason) -> None:
        self._killing = None
        logger.warning(
            "handler did not end, its executor is killed",
            extra=fields(task=run.task_id, run=run.run_id, executor=self.pid, reason=reason.value),
        )
        self.kill("killed because its run was over")

    def kill(self, cause: str | None = None) -> None:
        """Kill the process and all that it has started. `cause`: what to say of its death."""
        if self.state is not State.DEAD:
            self.state = State.LEAVING
            self._cause = self._cause or cause
            kill_group(self.pid, signal.SIGKILL)

    def leave(self) -> None:
        """Let the process call the stop hooks of the app, and end. It must be idle."""
        self.state, self.is_dismissed = State.LEAVING, True
        self._channel.send({"kind": "stop"})

    # --- what is looked at from time to time ----------------------------------------------------------------

    def look(self) -> None:
        """Check the memory of a busy executor, and tell it how long the lease holds."""
        run = self.run
        if run is None or self.state is not State.BUSY:
            return
        if self._max_memory_mib is not None and self._resident_mib() > self._max_memory_mib:
            self.kill(f"ended above its {self._max_memory_mib} MiB of memory")
        elif run.trusted_until != self._told_until:
            self._told_until = run.trusted_until
            self._channel.send({"kind": "lease", "run_id": run.run_id, "until": self._told_until})

    def is_worn(self, max_runs: int | None, interval: float) -> bool:
        """Whether an idle executor is to be replaced. Its memory is read at most once in each interval (seconds)."""
        if max_runs is not None and self.run_cnt >= max_runs:
            return True
        if self._max_memory_mib is None or monotonic() - self._looked_at < interval:
            return False
        fresh = self._fresh_mib
        return self._resident_mib() > fresh + _KEPT_SHARE * (self._max_memory_mib - fresh)

    def _resident_mib(self) -> float:
        self._looked_at = monotonic()
        return resident_bytes(self.pid) / 2**20

    # --- what comes from the process ------------------------------------------------------------------------

    def _take(self, message: Message) -> None:
        kind = message.get("kind")
        if kind == "ready":
            if self.state is State.STARTING:
                self.state, self.was_ready = State.IDLE, True
                self._fresh_mib = self._resident_mib() if self._max_memory_mib is not None else 0.0
                self._owner.became_ready(self)
        elif kind == "unready":
            self.why_unready = str(message.get("reason"))
        elif self.run is not None and message.get("run_id") == self.run.run_id:
            if kind == "done":
                if self._done is not None and not self._done.done():
                    self._done.set_result(message)
            else:
                self._owner.reported(self, self.run, message)

    def _fell_silent(self) -> None:
        """The process has closed its socket, or sent something unreadable: it can do no more work."""
        if self.state not in (State.DEAD, State.LEAVING):
            asyncio.get_running_loop().call_later(GRACE, self.kill, "killed because it closed its connection")

    def _died(self) -> None:
        # What has arrived counts: the process may have died right after its run was done.
        self._channel.drain()
        self.state = State.DEAD
        # The process is not reaped yet, so its number cannot belong to another one.
        kill_group(self.pid, signal.SIGKILL)
        code = self._process.wait()
        self._reap(_REAP_TRIES)
        self._channel.close()
        cause = self._cause or cause_of_death(code)
        if self._done is not None and not self._done.done():
            self._done.set_exception(ExecutorDied(cause))
        self.ended.set()
        self._owner.died(self, cause)

    def _reap(self, tries: int) -> None:
        """Reap what the handlers have left behind, if it has become the worker's: it may take a moment to die."""
        if reap_group(self.pid) and tries > 1:
            asyncio.get_running_loop().call_later(_REAP_PAUSE, self._reap, tries - 1)

    async def wait_ended(self, seconds: float) -> None:
        """Wait for the end of the process, but at most for this time."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.ended.wait()


# --- rate ------------------------------------------------------------------------------------------------

# How long runs take in executors. This decides how many runs may wait for an executor.

#: As many runs may wait for an executor as the executors run within this time, in seconds. So executors do not wait for
#: a claim, and runs wait little for an executor.
_AHEAD = 0.3
#: The most runs that wait, as a multiple of the number of executors.
_MAX_TIMES = 50
#: The weight of the newest run in the moving average of the durations of runs, if the run was longer than the average,
#: and if it was shorter. After long runs, the average must come down soon: executors would wait for claims meanwhile.
_LONGER, _SHORTER = 0.2, 0.5


class Rate:
    """The number of runs that the executors can end per second, by the durations of the latest runs.

    Counting the ends would not do: executors that wait for slow claims end few runs, and then too few are claimed.
    """

    def __init__(self) -> None:
        #: The moving average of the durations of runs, in seconds. None: not known.
        self._seconds: float | None = None

    def took(self, seconds: float) -> None:
        """Note that a run has taken this time in its executor."""
        if self._seconds is None:
            self._seconds = seconds
        else:
            weight = _LONGER if seconds > self._seconds else _SHORTER
            self._seconds += weight * (seconds - self._seconds)

    def forget(self) -> None:
        """Reset the average: a run has waited too long."""
        self._seconds = None

    def ahead(self, executors: int) -> int:
        """Return the number of runs that may wait for one of so many executors."""
        if self._seconds is None:
            return 0
        most = _MAX_TIMES * executors
        return most if self._seconds <= _AHEAD / _MAX_TIMES else min(most, int(executors * _AHEAD / self._seconds))


# --- reports ---------------------------------------------------------------------------------------------

# What executors report of their runs: progress, lines of logs, transactions and ends.


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
        await runtime.to_thread(suspension.__enter__)
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
