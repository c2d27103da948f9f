"""The worker: puts discovery, claimer, runner, finisher and pinger together, and takes them down in order."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from time import monotonic
from typing import Any

from mtask.app.app import App
from mtask.errors import HandlerError, InvalidInput, MtaskError, WorkerIdInUse
from mtask.model.identity import check_text
from mtask.model.status import WorkerStatus
from mtask.store import workers
from mtask.store.driver import connect
from mtask.store.driver.stores import AsyncStore, SyncStore
from mtask.store.layout import setup
from mtask.worker.admission.controls import Controls
from mtask.worker.admission.limits import Limits
from mtask.worker.admission.quarantine import Quarantine
from mtask.worker.claiming.claimer import Claimer
from mtask.worker.discovery.inbox import Hints
from mtask.worker.discovery.scans import Discovery
from mtask.worker.leases.held_run import EndReason
from mtask.worker.leases.host import automatic_worker_id
from mtask.worker.leases.pinger import Pinger
from mtask.worker.leases.registrar import Registrar
from mtask.worker.log import fields, logger
from mtask.worker.running.finisher import Finisher
from mtask.worker.running.handler_stores import HandlerStores
from mtask.worker.running.outcomes import ended
from mtask.worker.running.runner import Runner
from mtask.worker.running.transactions import RunTransactions
from mtask.worker.state.clock import ServerClock
from mtask.worker.state.endurance import enduring
from mtask.worker.state.queue import PreemptionQueue
from mtask.worker.state.tempo import Tempo
from mtask.worker.upkeep.retention import Upkeep
from mtask.worker.upkeep.scheduler import Scheduler

HEARTBEAT_INTERVAL = timedelta(seconds=10)
HEARTBEAT_TIMEOUT = timedelta(seconds=30)
_QUEUE_CAPACITY = 2_000
_MAX_UNWRITTEN = 2_000
#: What a cancelled async handler gets to clean up, in seconds, before its run is handed back all the same.
_CANCEL_GRACE = 2.0
_LAST_WRITES = 5.0
#: How long a second signal waits for an orderly end, in seconds.
_AT_ONCE = 3.0
_CONCURRENCIES = range(10_001)


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """How a worker process is run."""

    uri: str = field(repr=False)  # it may hold a password
    database: str
    queues: Sequence[str] | None = None  #: None: those that the app's handlers name, and "default"
    concurrency: int = 100
    scheduler: bool = True  #: make the firings of schedules, beside whoever else does
    worker_id: str | None = None
    shutdown_timeout: timedelta = timedelta(seconds=30)
    #: Called in the last resort, when a stop cannot end in order: a handler that blocks for good.
    hard_exit: Callable[[int], None] | None = None
    heartbeat_interval: timedelta = HEARTBEAT_INTERVAL
    heartbeat_timeout: timedelta = HEARTBEAT_TIMEOUT
    on_status: Callable[[WorkerStatus], None] | None = field(default=None, compare=False)


class Worker:
    """One worker process's engine. `run` it in an event loop; `stop` it from any thread."""

    def __init__(self, app: App, options: WorkerOptions) -> None:
        """Check the options; raise InvalidInput or HandlerError. Nothing is connected yet."""
        self._handlers = dict(app.handlers)
        self._declared = app.schedules
        if not self._handlers:
            raise HandlerError("(none)", "the app has no handlers: register some with @app.task")
        self._options = options
        given = list(app.queues if options.queues is None else options.queues)
        self.queues = list(dict.fromkeys(check_text("queue", queue) for queue in given))
        if not self.queues:
            raise InvalidInput("name at least one queue to serve.", field="queues")
        self.worker_id = check_text(
            "worker_id", automatic_worker_id() if options.worker_id is None else options.worker_id
        )
        if options.concurrency not in _CONCURRENCIES:
            raise InvalidInput(
                f"concurrency {options.concurrency}: use 0 to {_CONCURRENCIES[-1]}.", field="concurrency"
            )
        self.status = WorkerStatus.READY
        self._stop_requests = 0
        self._stop_reason = ""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping = asyncio.Event()
        self._at_once = asyncio.Event()
        self._controls: Controls
        self._limits: Limits
        self._upkeep: Upkeep
        self._claimer: Claimer
        self._runner: Runner
        self._finisher: Finisher
        self._registrar: Registrar
        self._failure: MtaskError | None = None
        self._hints: Hints
        self._discovery: Discovery
        self._pinger: Pinger
        self._scheduler: Scheduler | None = None

    # --- from outside -------------------------------------------------------------------------------------

    def stop(self, reason: str = "asked to stop") -> None:
        """Stop gracefully; called again, at once. From any thread, and from signal handlers."""
        self._stop_requests += 1
        if self._stop_requests == 1:
            self._stop_reason = reason
        self._arm_last_resort()
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._take_stop)

    def _take_stop(self) -> None:
        if self._stop_requests > 1:
            self._at_once.set()
        self._stopping.set()

    # --- life ---------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Work until stopped.

        Raises DatabaseError in its kinds where the database cannot be used at the start, and WorkerIdInUse, also
        later, where another process took the id over from one that was out of touch.
        """
        self._loop = asyncio.get_running_loop()
        if self._stop_requests:
            self._take_stop()
        name = f"mtask-worker:{self.worker_id}"
        database, uri = self._options.database, self._options.uri
        store = connect.async_store(uri, database, name)
        stream_store = connect.async_store(uri, database, name, **connect.QUIET)
        ping_store = connect.sync_store(uri, database, name, **connect.QUIET)
        handler_stores = HandlerStores(uri, database, name)
        try:
            sent = monotonic()
            server_time = await store.run(setup.ensure())
            clock = ServerClock(server_time, sent, monotonic())
            self._registrar = Registrar(
                store,
                self.worker_id,
                self.queues,
                sorted(self._handlers),
                self._options.concurrency,
                self._options.heartbeat_timeout,
            )
            sent = monotonic()
            await self._registrar.register()
            tempo = Tempo(monotonic() - sent)
            self._controls = Controls(store, clock, self.queues, sorted(self._handlers))
            self._heard(self._registrar.document, was_silent=False)
            await self._controls.begin()
            self._build(store, stream_store, ping_store, handler_stores, clock, tempo)
            await self._serve()
            if self._failure is not None:
                raise self._failure
        finally:
            await handler_stores.close()
            await stream_store.close()
            await store.close()
            pinger = getattr(self, "_pinger", None)
            if pinger is not None:
                await asyncio.to_thread(pinger.stop)
            await asyncio.to_thread(ping_store.close)

    def _build(
        self,
        store: AsyncStore,
        stream_store: AsyncStore,
        ping_store: SyncStore,
        handler_stores: HandlerStores,
        clock: ServerClock,
        tempo: Tempo,
    ) -> None:
        queue = PreemptionQueue(max(_QUEUE_CAPACITY, 4 * self._options.concurrency))
        self._pinger = Pinger(
            ping_store,
            self._registrar.registration,
            self._options.heartbeat_interval,
            tempo,
            self._heartbeat,
            self._registered_from_thread,
        )
        self._upkeep = Upkeep(store, self._controls)
        self._limits = Limits(store, self._controls, clock, self._look_again, lambda: self._discovery.scan_soon())
        self._finisher = Finisher(store, self._pinger, tempo, self._limits.over)
        transactions = RunTransactions(handler_stores, self._pinger)
        quarantine = Quarantine(store, self.worker_id)
        names = sorted(self._handlers)
        self._hints = Hints(
            store, self.worker_id, self.queues, names, queue, clock, self._pinger, quarantine, self._controls
        )
        self._runner = Runner(
            store, self._pinger, self._finisher, transactions, self.worker_id, self._slot_freed, self._limits.over
        )
        self._claimer = Claimer(
            store,
            queue,
            self._handlers,
            self.worker_id,
            self._options.concurrency,
            controls=self._controls,
            limits=self._limits,
            hints=self._hints,
            quarantine=quarantine,
            runner=self._runner,
            tempo=tempo,
            is_backed_up=lambda: self._finisher.pending > _MAX_UNWRITTEN,
            on_landed=self._refill,
        )
        queue.is_limited = self._limits.is_limited
        self._hints.connect(self._claimer, self._runner)
        self._discovery = Discovery(
            store,
            stream_store,
            self.worker_id,
            self.queues,
            names,
            hints=self._hints,
            queue=queue,
            clock=clock,
            runner=self._runner,
            controls=self._controls,
            limits=self._limits,
            quarantine=quarantine,
            on_control=self._pinger.beat_now,
            on_schedules=self._wake_scheduler,
            on_dropped=self._declare_again,
        )
        if self._options.scheduler:
            self._scheduler = Scheduler(store, self._declared)

    def _wake_scheduler(self) -> None:
        if self._scheduler is not None:
            self._scheduler.wake()

    def _controls_changed(self) -> None:
        self._limits.changed()
        self._discovery.ask_full_scan()
        self._upkeep.wake()

    async def _until_landed(self) -> None:
        await self._claimer.until_landed()
        await self._upkeep.until_landed()

    def _look_again(self, task_ids: Iterable[str]) -> None:
        self._hints.look_again(task_ids)

    def _declare_again(self) -> None:
        if self._scheduler is not None:
            self._scheduler.declare_again()

    def _refill(self) -> None:
        self._discovery.refill()

    def _slot_freed(self) -> None:
        self._claimer.free_slot()
        self._discovery.refill()

    async def _serve(self) -> None:
        self._pinger.start()
        logger.info(
            "worker started",
            extra=fields(worker=self.worker_id, queues=",".join(self.queues), names=",".join(sorted(self._handlers))),
        )
        try:
            # Whoever pauses a queue waits for every worker that lives: so one that stops goes on answering to the end.
            async with asyncio.TaskGroup() as to_the_end:
                to_the_end.create_task(enduring(self._go_by_controls))
                to_the_end.create_task(enduring(self._confirm_controls))
                to_the_end.create_task(enduring(self._limits.run_giving_back))
                try:
                    await self._work()
                    await self._finish_runs()
                finally:
                    self._controls.stop()
                    self._limits.stop()
        finally:
            # Its thread stays, for the last resort: the rest of the stop may hang on the database, too.
            await asyncio.to_thread(self._pinger.rest)
            self._runner.close()
            self._set_status(WorkerStatus.STOPPED)
            await self._registrar.leave(self._heartbeat())
        logger.info("worker stopped", extra=fields(worker=self.worker_id, finished=self._finisher.finished_cnt))

    async def _go_by_controls(self) -> None:
        await self._controls.run(self._discovery.ask_full_scan, self._controls_changed)

    async def _confirm_controls(self) -> None:
        await self._controls.run_confirming(self._until_landed, self._pinger.beat_now)

    async def _work(self) -> None:
        """Find, claim and run tasks until stopped; what runs then goes on."""
        async with asyncio.TaskGroup() as group:
            group.create_task(enduring(self._discovery.run_stream))
            group.create_task(enduring(self._discovery.run_scans))
            group.create_task(enduring(self._hints.run_looks))
            group.create_task(enduring(self._hints.run_due_looks))
            group.create_task(enduring(self._claimer.run))
            group.create_task(enduring(self._limits.run))
            group.create_task(enduring(self._upkeep.run))
            group.create_task(self._announce_running())
            if self._scheduler is not None:
                group.create_task(enduring(self._scheduler.run))
            await self._stopping.wait()
            self._set_status(WorkerStatus.STOPPING)
            logger.info("worker stopping", extra=fields(worker=self.worker_id, reason=self._stop_reason))
            self._pinger.beat_now()
            self._claimer.stop()
            self._limits.stop_trying()
            self._upkeep.stop()
            if self._scheduler is not None:
                self._scheduler.stop()
            self._controls.poll()
            await self._discovery.stop()

    async def _announce_running(self) -> None:
        ready = asyncio.create_task(self._discovery.is_ready.wait())
        stopping = asyncio.create_task(self._stopping.wait())
        await asyncio.wait((ready, stopping), return_when=asyncio.FIRST_COMPLETED)
        for waiter in (ready, stopping):
            waiter.cancel()
        if not self._stopping.is_set():
            self._set_status(WorkerStatus.RUNNING)
            self._pinger.beat_now()

    def _set_status(self, status: WorkerStatus) -> None:
        self.status = status
        if self._options.on_status is not None:
            self._options.on_status(status)

    async def _finish_runs(self) -> None:
        """Give the runs their time, hand back the rest, and see that every ending is written."""
        finished = asyncio.create_task(self._runner.wait_empty(self._options.shutdown_timeout.total_seconds()))
        at_once = asyncio.create_task(self._at_once.wait())
        await asyncio.wait((finished, at_once), return_when=asyncio.FIRST_COMPLETED)
        at_once.cancel()
        finished.cancel()
        await asyncio.gather(finished, return_exceptions=True)
        for run in self._runner.runs:
            run.end(EndReason.WORKER_STOP)
        await self._runner.wait_empty(_CANCEL_GRACE)
        for run in self._runner.runs:
            # It did not end though it was told: this process will, right after, and the run with it.
            if not run.is_finishing:
                self._finisher.submit(run, ended(run, EndReason.WORKER_STOP))
        try:
            async with asyncio.timeout(_LAST_WRITES):
                await self._finisher.drain()
        except TimeoutError:
            logger.error("some endings were not written: their leases will lapse")

    def _arm_last_resort(self) -> None:
        """See to it, from the pinger's thread, that a stop ends even if a handler blocks the event loop for good."""
        pinger = getattr(self, "_pinger", None)
        if self._options.hard_exit is None or pinger is None:
            return
        orderly = self._options.shutdown_timeout.total_seconds() + _CANCEL_GRACE + _LAST_WRITES + 1.0
        pinger.call_at(monotonic() + (orderly if self._stop_requests == 1 else _AT_ONCE), self._exit_hard)

    def _exit_hard(self) -> None:
        logger.error("the stop cannot end in order: handing runs back and exiting")
        runs = [run for run in self._pinger.held() if not run.is_finishing]
        try:
            if runs:
                self._pinger.hand_back([ended(run, EndReason.WORKER_STOP) for run in runs])
        except MtaskError as error:
            logger.error("runs left to lapse", extra=fields(runs=len(runs), reason=str(error)))
        finally:
            if self._options.hard_exit is not None:
                self._options.hard_exit(0)

    @property
    def has_stuck_threads(self) -> bool:
        """Whether threads of plain handlers remain that did not end when told."""
        return self._runner.has_stuck_threads or bool(self._runner.runs)

    # --- registry -----------------------------------------------------------------------------------------

    def _taken_over(self, error: WorkerIdInUse) -> None:
        self._failure = error
        self.stop("worker_id taken over")

    def _heartbeat(self) -> workers.Heartbeat:
        return workers.Heartbeat(
            status=self.status,
            running_cnt=len(self._runner.runs),
            concurrency=self._claimer.concurrency,
            unserved_names=sorted(self._hints.unserved_names),
            controls_seen=self._controls.seen,
        )

    def _registered_from_thread(self, document: dict[str, Any] | None) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._take_registered, document)

    def _take_registered(self, document: dict[str, Any] | None) -> None:
        """Do as our document in the registry says; None: our place in it is gone."""
        if document is not None:
            self._heard(document, was_silent=document.get("was_silent") is True)
            control = document.get("control")
            self._take_control(control if isinstance(control, dict) else {})
        elif not self._stopping.is_set():
            self._controls.is_gone()
            self._registrar.register_again(self._registered_again, self._taken_over)

    def _registered_again(self, document: dict[str, Any]) -> None:
        self._heard(document, was_silent=True)

    def _heard(self, document: dict[str, Any], *, was_silent: bool) -> None:
        self._controls.heard(document["heartbeat_expire_time"], at=document["heartbeat_time"], was_silent=was_silent)

    def _take_control(self, control: dict[str, Any]) -> None:
        """Do what the registry asks."""
        if self._stopping.is_set():
            return
        # Anybody may have written it, in any language: what is no clear order is none.
        if control.get("stop") is True:
            self.stop("stopped remotely")
        wanted = control.get("concurrency")
        concurrency = self._options.concurrency
        if isinstance(wanted, int | float) and not isinstance(wanted, bool) and wanted in _CONCURRENCIES:
            concurrency = int(wanted)
        if concurrency != self._claimer.concurrency:
            logger.info("concurrency changed", extra=fields(concurrency=concurrency))
            self._claimer.set_concurrency(concurrency)
            self._pinger.beat_now()
