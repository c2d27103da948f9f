"""The executors of a worker: starts them when handlers need them, gives each run one, and replaces those that end."""

from __future__ import annotations

import asyncio
import socket
import subprocess
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from math import inf
from time import monotonic

from mtask.features.isolation.executor import GRACE, Executor, Rate, Reports, State, take_done
from mtask.features.isolation.messages import Message, Origin
from mtask.features.isolation.options import ExecutorOptions
from mtask.features.isolation.processes import Guard, start
from mtask.features.logs.worker import LogKeeper
from mtask.kernel.document.handlers import Handler
from mtask.kernel.driver.stores import AsyncStore
from mtask.kernel.worker.process import runtime
from mtask.kernel.worker.process.log import fields, logger
from mtask.kernel.worker.process.part import Part, Service
from mtask.kernel.worker.process.state import Ledger
from mtask.kernel.worker.process.time import Backoff
from mtask.kernel.worker.running.call import Called
from mtask.kernel.worker.running.leases import Pinger
from mtask.kernel.worker.running.outcomes import ExecutorDied
from mtask.kernel.worker.running.run import EndReason, HeldRun
from mtask.kernel.worker.running.slots import Line

#: The time between two looks at the memory and the leases of busy executors, in seconds.
_LOOK = 0.05
#: While runs wait for executors, the runs that end within this time, in seconds, are finished together, but at most
#: `_GROUP` of them. So one finish and one claim serve several runs.
_GATHER, _GROUP = 0.1, 50
#: The longest time for which a run waits while all executors work, in seconds. After this time the run is handed back:
#: the handlers take longer than those before. Tests tune it.
PATIENCE = 1.0
#: The time in which an executor must have started, in seconds. Importing an app may take long on a busy machine.
_START_LIMIT = 120.0
#: The pause before another executor is started after one could not start, in seconds.
_PAUSE, _MAX_PAUSE = 0.5, 10.0
#: The time that the executors have for the stop hooks of the app, in seconds.
_STOP_LIMIT = 3.0


class Executors(Part):
    """Runs isolated handlers in child processes. Use it in the worker's event loop.

    An executor is started when a run finds none idle, until there are as many as the options say. The others wait.
    """

    def __init__(
        self,
        options: ExecutorOptions,
        origin: Origin,
        pinger: Pinger,
        store: AsyncStore,
        keeper: LogKeeper | None = None,
    ) -> None:
        """`keeper` keeps the lines that handlers log."""
        self._options = options
        self._origin = origin
        self._reports = Reports(pinger, store, keeper, lambda run, executor: self._by_run.get(run.run_id) is executor)
        self._all: set[Executor] = set()
        self._idle: list[Executor] = []
        #: The runs that wait for an executor.
        self._waiting: Line[_Wait] = Line()
        self._by_run: dict[str, Executor | _Wait] = {}
        # Linux kills an executor when the thread that started it ends: this thread lasts as long as the executors.
        self._spawner = ThreadPoolExecutor(1, thread_name_prefix="mtask-spawner")
        self._spawning: set[asyncio.Task[None]] = set()
        self._pauses = Backoff(_PAUSE, _MAX_PAUSE)
        self._not_before = -inf
        self._retry: asyncio.TimerHandle | None = None
        self._guard = Guard()
        self._looking: asyncio.TimerHandle | None = None
        self._rate = Rate()
        #: Set when the runs that have ended meanwhile are finished together, and the number of these runs.
        self._gathered: asyncio.Event | None = None
        self._gathered_cnt = 0
        self._gathering: asyncio.TimerHandle | None = None
        self._is_stopping = False
        #: Called when an executor waits for a run.
        self.on_idle: Callable[[], object] | None = None

    @property
    def size(self) -> int:
        """The most executors at once."""
        return self._options.size

    @property
    def width(self) -> int:
        """The number of runs to hold: those in executors, and a few that wait for an executor."""
        return self.size + self._rate.ahead(self.size)

    @property
    def idle_cnt(self) -> int:
        """The number of executors that could begin a run at once."""
        return len(self._idle)

    def prepare(self) -> None:
        """Start an executor if none is there or about to be: a task that may not wait for one is ready."""
        if not (self._idle or self._spawning or any(one.state is State.STARTING for one in self._all)):
            self._spawn(spare=1)

    def execution(self, handler: Handler) -> Executors | None:
        """Run this handler here if it is isolated."""
        return self if self._options.isolates(handler) else None

    def services(self) -> Sequence[Service]:
        """End the executors at the end of the worker."""
        return (Service(drain=self.stop),)

    @property
    def pids(self) -> dict[int, str]:
        """The process id of each executor, and the task in it or what it does."""
        return {one.pid: one.run.task_id if one.run is not None else one.state.name.lower() for one in self._all}

    # --- runs -----------------------------------------------------------------------------------------------

    async def call(self, run: HeldRun, called: Called) -> None:
        """Run the handler of this run in an executor, as soon as one is idle. Store what came of it in `called`."""
        try:
            executor = await self._acquire(run)
        except BaseException as error:
            called.raised = error
            return
        run.begins()
        timer = self._timer_of(run)
        self._look_soon()
        began = monotonic()
        try:
            done = await executor.execute(run)
        except ExecutorDied as died:
            await self._reports.settle(run)
            called.raised = died
        except BaseException as error:
            executor.kill()
            called.raised = error
        else:
            self._rate.took(monotonic() - began)
            take_done(run, done, called)
        finally:
            if timer is not None:
                timer.cancel()
            self._by_run.pop(run.run_id, None)
            self._reports.resume(run)
            self._release(executor)
        if self._waiting and called.judged is not None:
            await self._gather()

    def _timer_of(self, run: HeldRun) -> asyncio.TimerHandle | None:
        if run.deadline == inf:
            return None
        return asyncio.get_running_loop().call_later(max(0.0, run.deadline - monotonic()), self._time_out, run)

    def _time_out(self, run: HeldRun) -> None:
        run.end(EndReason.RUN_TIMEOUT)
        if run.succeeded_in_transaction:  # its SUCCESS stays, but its handler has had its time
            self.end(run, EndReason.RUN_TIMEOUT)

    async def _gather(self) -> None:
        """Wait until the runs that have ended meanwhile are finished together."""
        if self._gathered is None:
            self._gathered = asyncio.Event()
            self._gathering = asyncio.get_running_loop().call_later(_GATHER, self._finish_gathered)
        gathered = self._gathered
        self._gathered_cnt += 1
        if self._gathered_cnt >= _GROUP:
            self._finish_gathered()
        await gathered.wait()

    def _finish_gathered(self) -> None:
        if self._gathering is not None:
            self._gathering.cancel()
        if self._gathered is not None:
            self._gathered.set()
        self._gathered = self._gathering = None
        self._gathered_cnt = 0

    def end(self, run: HeldRun, reason: EndReason) -> None:
        """End the handler of a run. If it is still under way after the grace, its executor is killed."""
        place = self._by_run.get(run.run_id)
        if isinstance(place, _Wait):
            self._waiting.take_out(lambda wait: wait is place)
            del self._by_run[run.run_id]
            place.future.cancel()
        elif place is not None:
            logger.info("run ended", extra=fields(task=run.task_id, run=run.run_id, reason=reason.value))
            place.end_run(reason)

    async def _acquire(self, run: HeldRun) -> Executor:
        """Return an executor for this run. Raises CancelledError if the run is ended before it gets one."""
        while self._may_begin(run):
            if self._idle:
                executor = self._idle.pop()
                executor.state = State.BUSY
            else:
                wait = _Wait(run, asyncio.get_running_loop().create_future())
                self._waiting.push(run, wait)
                self._by_run[run.run_id] = wait
                self._spawn()
                executor = await wait.future
            if not executor.is_taken:
                continue  # it has died since it was given to this run
            if self._may_begin(run):
                self._by_run[run.run_id] = executor
                return executor
            executor.state = State.IDLE
            self._release(executor)
        raise asyncio.CancelledError

    def _may_begin(self, run: HeldRun) -> bool:
        return not self._is_stopping and run.end_reason is None

    def _release(self, executor: Executor) -> None:
        """Give an executor whose run is over its next run, or replace it."""
        if executor.state is not State.IDLE:
            return
        if executor.is_worn(self._options.max_runs, _LOOK):
            logger.info("executor replaced", extra=fields(executor=executor.pid, runs=executor.run_cnt))
            self._dismiss(executor)
            self._spawn(spare=1)
            return
        self._give(executor)

    def _give(self, executor: Executor) -> None:
        if self._waiting:
            wait = self._waiting.pop()
            del self._by_run[wait.run.run_id]
            executor.state = State.BUSY
            wait.future.set_result(executor)
            return
        self._idle.append(executor)
        if self.on_idle is not None:
            self.on_idle()
        self._finish_gathered()  # no run waits, so none is served by holding back what has ended

    def _dismiss(self, executor: Executor) -> None:
        """Let an idle executor end, and kill it if it does not."""
        executor.leave()
        asyncio.get_running_loop().call_later(_STOP_LIMIT, executor.kill)

    def reported(self, executor: Executor, run: HeldRun, message: Message) -> None:
        """Take what a run reports while its handler is under way."""
        self._reports.take(executor, run, message)

    # --- starts and deaths ----------------------------------------------------------------------------------

    def _spawn(self, spare: int = 0) -> None:
        """Start an executor for each run that waits, and some to spare, as far as the options allow."""
        if self._is_stopping:
            return
        pause = self._not_before - monotonic()
        if pause > 0:
            if self._retry is None:
                self._retry = asyncio.get_running_loop().call_later(pause, self._try_again)
            return
        alive = [one for one in self._all if one.state is not State.LEAVING]
        coming = len(self._spawning) + sum(one.state is State.STARTING for one in alive)
        room = self._options.size - len(alive) - len(self._spawning)
        for _ in range(min(room, len(self._waiting) + spare - coming)):
            task = asyncio.get_running_loop().create_task(self._start())
            self._spawning.add(task)
            task.add_done_callback(self._spawning.discard)

    def _try_again(self) -> None:
        self._retry = None
        self._spawn()

    async def _start(self) -> None:
        try:
            job = asyncio.get_running_loop().run_in_executor(self._spawner, self._start_process)
            process, connected = await job
        except (OSError, RuntimeError) as error:  # RuntimeError: there can be no more threads
            self._could_not_start(str(error))
            return
        self._guard.add(process.pid)
        executor = Executor(process, connected, self, self._options.max_memory_mib)
        self._all.add(executor)
        if self._is_stopping:
            executor.kill()
            return
        executor.hello(self._origin.hello())
        asyncio.get_running_loop().call_later(_START_LIMIT, self._is_to_have_started, executor)

    def _start_process(self) -> tuple[subprocess.Popen[bytes], socket.socket]:
        """Start the guard, if it does not run, and an executor. This runs in the spawner's thread."""
        assert self._options.app is not None
        self._guard.start()
        return start(self._options.app)

    @staticmethod
    def _is_to_have_started(executor: Executor) -> None:
        if executor.state is State.STARTING:
            executor.why_unready = f"it took longer than {_START_LIMIT:g} s"
            executor.kill()

    def became_ready(self, executor: Executor) -> None:
        """Give a new executor its first run."""
        logger.info("executor started", extra=fields(executor=executor.pid))
        self._give(executor)

    def died(self, executor: Executor, cause: str) -> None:
        """Replace an executor that has ended."""
        self._all.discard(executor)
        self._guard.remove(executor.pid)
        if executor in self._idle:
            self._idle.remove(executor)
        if self._is_stopping:
            return
        if not executor.was_ready:
            self._could_not_start(executor.why_unready or cause)
        elif not executor.is_dismissed:
            logger.warning("executor ended, another is started", extra=fields(executor=executor.pid, cause=cause))
            if executor.run_cnt:
                self._pauses = Backoff(_PAUSE, _MAX_PAUSE)
            else:  # executors that die before they are of use must not follow each other without a pause
                self._not_before = monotonic() + self._pauses.next()
            self._spawn(spare=1)
        else:
            self._spawn()

    def _could_not_start(self, reason: str) -> None:
        """Fail the runs that wait, unless other executors work. The next one is started after a pause."""
        logger.error("executor could not start", extra=fields(reason=reason))
        self._not_before = monotonic() + self._pauses.next()
        if not any(one.was_ready for one in self._all):
            while self._waiting:
                wait = self._waiting.pop()
                del self._by_run[wait.run.run_id]
                wait.future.set_exception(ExecutorDied(f"could not start: {reason}"))
        self._spawn()

    # --- looks and the stop ---------------------------------------------------------------------------------

    def _look_soon(self) -> None:
        if self._looking is None:
            self._looking = asyncio.get_running_loop().call_later(_LOOK, self._look)

    def _look(self) -> None:
        """Look at each busy executor. While none is busy, nobody looks."""
        self._looking = None
        busy = [one for one in self._all if one.state is State.BUSY]
        for executor in busy:
            executor.look()
        if busy:
            self._lose_patience(monotonic() - PATIENCE)
            self._look_soon()

    def _lose_patience(self, began: float) -> None:
        """Hand back the runs that have waited since then, unless another executor is about to start."""
        if self._spawning or any(one.state is not State.BUSY for one in self._all):
            return
        for wait in [wait for wait in self._waiting if wait.since < began]:
            self._rate.forget()
            wait.run.end(EndReason.NO_SLOT)

    async def stop(self) -> None:
        """Let the idle executors end in order, and kill the others. No run is started after that."""
        self._is_stopping = True
        for timer in (self._looking, self._retry):
            if timer is not None:
                timer.cancel()
        while self._waiting:
            self._waiting.pop().future.cancel()
        await asyncio.gather(*self._spawning, return_exceptions=True)
        for executor in list(self._all):
            if executor.state is State.IDLE:
                executor.leave()
            elif executor.state is not State.LEAVING:
                executor.kill()
        executors = list(self._all)
        await asyncio.gather(*(executor.wait_ended(_STOP_LIMIT) for executor in executors))
        for executor in executors:
            executor.kill()
        await asyncio.gather(*(executor.wait_ended(GRACE) for executor in executors))
        await self._reports.wait()
        self._spawner.shutdown(wait=False)
        await runtime.to_thread(self._guard.stop)


@dataclass(eq=False, slots=True)
class _Wait:
    """A run that waits for an executor."""

    run: HeldRun
    future: asyncio.Future[Executor]
    since: float = field(default_factory=monotonic)


# --- room ------------------------------------------------------------------------------------------------

# The room for isolated handlers: how many of their tasks a worker claims. The others stay for other workers.

#: A claim waits until there is room for this part of the runs that may wait for an executor: one in this number.
_LEAST_SHARE = 3


class ExecutorRoom:
    """Counts the runs of isolated handlers that the worker holds or claims, against the executors."""

    def __init__(self, ledger: Ledger, handlers: Mapping[str, Handler], executors: Executors) -> None:
        self._ledger = ledger
        self._executors = executors
        self._names = frozenset(name for name, handler in handlers.items() if executors.execution(handler) is not None)
        self.is_shared = len(self._names) < len(handlers)  #: whether the worker has other handlers, too

    def isolates(self, name: str) -> bool:
        """Whether tasks of this name run in executors."""
        return name in self._names

    def count(self) -> int:
        """Return the number of tasks of isolated handlers that the worker should claim now."""
        names = self._names
        held = sum(run.name in names for run in self._ledger.held)
        claiming = sum(task_id.partition(":")[0] in names for task_id in self._ledger.claiming)
        width = self._executors.width
        room = width - held - claiming
        # One claim takes several tasks. Each run that ends wakes the claimer, which looks again then.
        return room if room * _LEAST_SHARE >= width - self._executors.size else 0

    def count_idle(self) -> int:
        """Return the number of tasks of isolated handlers that could begin at once.

        If it is 0, an executor is started, as far as the options allow. It wakes the claimer when it is ready.
        """
        waiting = sum(run.name in self._names and run.began_at is None for run in self._ledger.held)
        claiming = sum(task_id.partition(":")[0] in self._names for task_id in self._ledger.claiming)
        idle = self._executors.idle_cnt - waiting - claiming
        if idle <= 0:
            self._executors.prepare()
        return max(0, idle)
