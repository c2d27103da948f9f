"""The worker: starts, serves and stops. `mtask.parts.assembly` adds its app and its features, and builds its parts."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Coroutine, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass
from functools import partial
from time import monotonic
from typing import Any, TypeVar

from mtask.database import setup
from mtask.errors import MtaskError, WorkerError, WorkerIdInUse
from mtask.kernel.document.status import WorkerStatus
from mtask.kernel.driver import connect
from mtask.kernel.driver.stores import AsyncStore, SyncStore
from mtask.kernel.worker.discovery.fetch_loop import Scans
from mtask.kernel.worker.discovery.relays import Settler
from mtask.kernel.worker.discovery.rereads import Lookups
from mtask.kernel.worker.discovery.stream import StreamLoop
from mtask.kernel.worker.process import health, runtime
from mtask.kernel.worker.process.counts import Tally
from mtask.kernel.worker.process.health import INTERVAL, HealthFile, Pulse, Witness
from mtask.kernel.worker.process.log import fields, logger, told
from mtask.kernel.worker.process.options import CONCURRENCIES, ProcessOptions
from mtask.kernel.worker.process.part import Hooks, Service
from mtask.kernel.worker.process.registration import Registrar, heartbeat, registration
from mtask.kernel.worker.process.state import Scope, Validity, Vitals
from mtask.kernel.worker.process.systemd import ServiceWitness
from mtask.kernel.worker.process.time import ServerClock, Tempo, enduring, wake_or_wait
from mtask.kernel.worker.running.call import HandlerStores
from mtask.kernel.worker.running.claim_loop import Claimer
from mtask.kernel.worker.running.finisher import Finisher
from mtask.kernel.worker.running.leases import Pinger
from mtask.kernel.worker.running.outcomes import ended
from mtask.kernel.worker.running.run import EndReason
from mtask.kernel.worker.running.runner import Runner
from mtask.kernel.worker.running.slots import Slots

Document = dict[str, Any]
T = TypeVar("T")

#: The time that a cancelled async handler has to clean up, in seconds. After this time the run is handed back, even if
#: the handler continues.
_CANCEL_GRACE = 2.0
#: The time limit for writing the last outcomes during a stop, in seconds.
_LAST_WRITES = 5.0
#: With `burst`: the time between two looks whether something is due, in seconds.
_BURST_PAUSE = 0.1
#: The time limit for an orderly end of the process after a second stop request, in seconds.
_AT_ONCE = 3.0


@dataclass(frozen=True, slots=True)
class Connections:
    """The connections of a worker's event loop.

    The change stream and the handlers' transactions keep a connection busy for long. So each of the two has connections
    of its own.
    """

    store: AsyncStore
    stream: AsyncStore
    handlers: HandlerStores


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of a registered worker that are started and stopped here."""

    scope: Scope
    registrar: Registrar
    pinger: Pinger
    settlers: Sequence[Settler]
    finisher: Finisher
    runner: Runner
    lookups: Lookups
    scans: Scans
    stream: StreamLoop
    slots: Slots
    claimer: Claimer
    hooks: Hooks


class Worker(ABC):
    """The worker of one process. Call `run` in an event loop. `stop` may be called from any thread."""

    def __init__(self, options: ProcessOptions, names: Sequence[str], queues: Sequence[str]) -> None:
        """Check the options; raise InvalidInput. `names` and `queues` are those of the handlers."""
        self._options = options
        self._names = sorted(names)
        self.queues = options.checked_queues(queues)
        self.worker_id = options.checked_worker_id()
        if options.health_file is not None:
            health.check(options.health_file)
        self._vitals = Vitals(options.checked_concurrency())
        self._parts: Parts | None = None
        self._pulse: Pulse | None = None
        self._failure: MtaskError | None = None
        self._stop_requests = 0
        self._stop_reason = ""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping = asyncio.Event()
        self._at_once = asyncio.Event()

    @property
    def status(self) -> WorkerStatus:
        """The status of the worker."""
        return self._vitals.status

    @property
    def parts(self) -> Parts:
        """The worker's parts; raises RuntimeError if the worker is not registered yet."""
        if self._parts is None:
            raise RuntimeError("the worker is not registered yet")
        return self._parts

    @property
    def tally(self) -> Tally:
        """What this worker has counted since its start. Any thread may read it."""
        return Tally() if self._parts is None else self._parts.scope.meter.tally

    def slots(self) -> dict[str, int]:
        """Return the number of this worker's slots by state. Any thread may call this."""
        busy = 0 if self._parts is None else self._parts.slots.running_cnt
        return {"busy": busy, "free": max(0, self._vitals.concurrency - busy)}

    @abstractmethod
    def _connected(self, app_name: str) -> AbstractAsyncContextManager[Connections]:
        """Open the connections of the event loop, and close them at the end of the block."""

    @abstractmethod
    def _built(self, scope: Scope, opened: Connections, pings: SyncStore, registrar: Registrar) -> Parts:
        """Build the parts of the registered worker, and connect their signals."""

    @abstractmethod
    async def _start_handlers(self) -> None:
        """Make ready what the handlers of this process need. Raises HandlerError."""

    @abstractmethod
    async def _stop_handlers(self) -> None:
        """Undo `_start_handlers`, when all runs have ended."""

    # --- stop ---------------------------------------------------------------------------------------------

    def stop(self, reason: str = "asked to stop") -> None:
        """Stop gracefully; at the second call, stop at once. Any thread and any signal handler may call this."""
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

    def _pinger_ended(self) -> None:
        """Hand all runs back while their leases last, and end with an error: so a supervisor starts another."""
        why = "the thread that keeps the leases has ended"
        self._failure = WorkerError(f"{why}: start the worker again, the log may say why.")
        self.stop(why)
        self.stop(why)

    # --- run ----------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Work until `stop`. If it comes before the worker is registered, leave nothing registered.

        Raises DatabaseError if the database cannot be used at the start. Raises HandlerError if a start hook of the app
        fails. Raises WorkerIdInUse if another process has the worker_id at the start. Raises it also if another process
        takes the worker_id over while this process cannot reach the database. Raises WorkerError if the pinger's thread
        has ended by itself.
        """
        self._loop = asyncio.get_running_loop()
        if self._stop_requests:
            self._take_stop()
        name = f"mtask-worker:{self.worker_id}"
        async with AsyncExitStack() as closing:
            pings = connect.sync_store(self._options.uri, self._options.database, name, **connect.QUIET)
            closing.push_async_callback(runtime.to_thread, pings.close)
            # The pinger's thread ends only after the other connections are closed. If closing them hangs, the thread
            # ends the process.
            closing.push_async_callback(self._stop_pinger)
            opened = await closing.enter_async_context(self._connected(name))
            registered = await self._register(opened.store)
            if registered is None:
                logger.info(
                    "worker stopped before its start", extra=fields(worker=self.worker_id, reason=self._stop_reason)
                )
                return
            scope, registrar, document = registered
            self._parts = parts = self._built(scope, opened, pings, registrar)
            scope.vitals.beats = parts.hooks.beats
            scope.signals.heartbeat_answered.connect(self._take_registered)
            scope.signals.pinger_ended.connect(self._pinger_ended)
            _heard(scope.validity, document, was_silent=False)
            for service in parts.hooks.services:
                if service.begin is not None:
                    await service.begin()
            await self._serve(parts)
            if self._failure is not None:
                raise self._failure

    async def _register(self, store: AsyncStore) -> tuple[Scope, Registrar, Document] | None:
        """Set the database up and register the worker; return the worker's scope, registrar and document.

        Return None if the worker is to stop: then it is not registered, or no longer.
        """
        options, names = self._options, self._names
        sent = monotonic()
        server_time = await self._unless_stopping(store.run(setup.ensure()))
        if server_time is None:
            return None
        clock = ServerClock(server_time, sent, monotonic())
        own = registration(self.worker_id, self.queues, names, options.concurrency, options.heartbeat_timeout)
        registrar = Registrar(store, own)
        sent = monotonic()
        document = await registrar.register()
        tempo = Tempo(monotonic() - sent)
        scope = Scope(store, self.worker_id, self.queues, names, clock, tempo, self._vitals)
        if self._stop_requests:
            self._set_status(WorkerStatus.STOPPED)
            await registrar.leave(heartbeat(scope))
            return None
        return scope, registrar, document

    async def _unless_stopping(self, setting_up: Coroutine[Any, Any, T]) -> T | None:
        """Return the result, or None if `stop` comes first: a database that is away may keep the worker waiting."""
        work = asyncio.ensure_future(setting_up)
        stopping = asyncio.ensure_future(self._stopping.wait())
        try:
            await asyncio.wait((work, stopping), return_when=asyncio.FIRST_COMPLETED)
            return None if self._stopping.is_set() else await work
        finally:
            work.cancel()
            stopping.cancel()
            await asyncio.gather(work, stopping, return_exceptions=True)

    async def _stop_pinger(self) -> None:
        if self._parts is not None:
            await runtime.to_thread(self._parts.pinger.stop)

    async def _serve(self, parts: Parts) -> None:
        lasting = [service for service in parts.hooks.services if service.lasts]
        parts.pinger.start()
        self._pulse = self._started_pulse(parts)
        logger.info(
            "worker started",
            extra=fields(worker=self.worker_id, queues=",".join(self.queues), names=",".join(parts.scope.names)),
        )
        try:
            await self._start_handlers()
            async with asyncio.TaskGroup() as to_the_end:
                _start(to_the_end, lasting)
                try:
                    await self._work(parts)
                    await self._finish_runs(parts)
                finally:
                    _stop(lasting)
        finally:
            await self._end(parts)
        logger.info("worker stopped", extra=fields(worker=self.worker_id, finished=parts.finisher.finished_cnt))

    async def _end(self, parts: Parts) -> None:
        """End each part, whatever the ends of the others raise. A thread that is left would keep the process alive."""
        async with AsyncExitStack() as ends:  # the last one is called first
            if self._pulse is not None:
                ends.push_async_callback(runtime.to_thread, self._pulse.stop)
            ends.push_async_callback(self._leave, parts)
            ends.callback(parts.runner.close)
            # The pinger's thread sends nothing more, but it goes on running. If the rest of the stop hangs, the thread
            # ends the process.
            ends.push_async_callback(runtime.to_thread, parts.pinger.rest)
            ends.push_async_callback(self._stop_handlers)
            for service in parts.hooks.services:
                if service.drain is not None:
                    ends.push_async_callback(service.drain)

    async def _leave(self, parts: Parts) -> None:
        self._set_status(WorkerStatus.STOPPED)
        await parts.registrar.leave(heartbeat(parts.scope))

    def _started_pulse(self, parts: Parts) -> Pulse:
        path, service = self._options.health_file, self._options.service
        witnesses: list[Witness] = [] if path is None else [HealthFile(path)]
        interval = INTERVAL
        if service is not None:
            witnesses.append(ServiceWitness(service))
            interval = min(interval, service.interval or interval)
        pulse = Pulse(parts.scope, parts.pinger, witnesses, interval)
        pulse.start()
        return pulse

    async def _work(self, parts: Parts) -> None:
        """Find, claim and run tasks until `stop`. Some runs may still be under way when this method returns."""
        passing = [service for service in parts.hooks.services if not service.lasts]
        loops = [parts.stream.run, parts.scans.run, parts.lookups.run, parts.lookups.run_due, parts.claimer.run]
        async with asyncio.TaskGroup() as group:
            for loop in loops:
                group.create_task(enduring(loop))
            _start(group, passing)
            group.create_task(self._announce_running(parts))
            if self._options.burst:
                group.create_task(enduring(partial(self._stop_when_done, parts)))
            await self._stopping.wait()
            self._set_status(WorkerStatus.STOPPING)
            logger.info("worker stopping", extra=fields(worker=self.worker_id, reason=self._stop_reason))
            parts.pinger.beat_now()
            parts.claimer.stop()
            _stop(passing)
            parts.lookups.stop()
            parts.scans.stop()
            parts.stream.stop()

    async def _announce_running(self, parts: Parts) -> None:
        ready = asyncio.create_task(parts.scans.is_ready.wait())
        stopping = asyncio.create_task(self._stopping.wait())
        await asyncio.wait((ready, stopping), return_when=asyncio.FIRST_COMPLETED)
        for waiter in (ready, stopping):
            waiter.cancel()
        if not self._stopping.is_set():
            self._set_status(WorkerStatus.RUNNING)
            parts.pinger.beat_now()

    async def _stop_when_done(self, parts: Parts) -> None:
        """Stop once this worker holds nothing, and nothing is due that it may take."""
        while not self._stopping.is_set():
            if parts.scans.is_ready.is_set() and await self._is_done(parts):
                self.stop("nothing is due")
            await wake_or_wait(self._stopping, _BURST_PAUSE)

    async def _is_done(self, parts: Parts) -> bool:
        if _is_busy(parts):
            return False
        for settler in parts.settlers:  # the ends of its runs may make others due
            await settler.drain()
        tally = parts.scope.meter.tally
        revision = tally.revision
        try:
            is_due = await parts.scans.is_any_due()
        except MtaskError as error:
            logger.warning("cannot look for due tasks, will look again", extra=fields(reason=told(error)))
            return False
        # A run that began or ended during the read may have made others due.
        return not (is_due or _is_busy(parts)) and tally.revision == revision

    def _set_status(self, status: WorkerStatus) -> None:
        self._vitals.status = status
        if self._pulse is not None:
            self._pulse.beat_soon()
        if self._options.on_status is not None:
            self._options.on_status(status)

    async def _finish_runs(self, parts: Parts) -> None:
        """Wait at most shutdown_timeout for the runs to end, hand back the unfinished runs, and write all outcomes."""
        finished = asyncio.create_task(parts.runner.wait_empty(self._options.shutdown_timeout.total_seconds()))
        at_once = asyncio.create_task(self._at_once.wait())
        await asyncio.wait((finished, at_once), return_when=asyncio.FIRST_COMPLETED)
        at_once.cancel()
        finished.cancel()
        await asyncio.gather(finished, return_exceptions=True)
        ledger = parts.scope.ledger
        for run in ledger.runs:
            run.end(EndReason.WORKER_STOP)
        await parts.runner.wait_empty(_CANCEL_GRACE)
        for run in ledger.runs:
            # The handler of this run was asked to end but continues. The process will exit soon, so the run is handed
            # back.
            if not run.is_finishing:
                parts.finisher.submit(run, ended(run, EndReason.WORKER_STOP))
        try:
            async with asyncio.timeout(_LAST_WRITES):
                await parts.finisher.drain()
                for settler in parts.settlers:
                    await settler.drain()
        except TimeoutError:
            logger.error("some outcomes were not written: their leases will lapse")

    def _arm_last_resort(self) -> None:
        """Let the pinger's thread end the process if the stop takes too long. A handler may block the event loop."""
        if self._options.hard_exit is None or self._parts is None:
            return
        orderly = self._options.shutdown_timeout.total_seconds() + _CANCEL_GRACE + _LAST_WRITES + 1.0
        self._parts.pinger.call_at(monotonic() + (orderly if self._stop_requests == 1 else _AT_ONCE), self._exit_hard)

    def _exit_hard(self) -> None:
        logger.error("the stop cannot end in order: handing runs back and exiting")
        pinger = self.parts.pinger
        runs = [run for run in pinger.held() if not run.is_finishing]
        try:
            if runs:
                pinger.hand_back([ended(run, EndReason.WORKER_STOP) for run in runs])
        except MtaskError as error:
            logger.error("runs left to lapse", extra=fields(runs=len(runs), reason=told(error)))
        finally:
            if self._options.hard_exit is not None:
                self._options.hard_exit(0)

    @property
    def has_stuck_threads(self) -> bool:
        """Whether sync handlers still run in their threads, although they were asked to end."""
        parts = self._parts
        return parts is not None and (parts.runner.has_stuck_threads or bool(parts.scope.ledger.running))

    # --- registration and orders --------------------------------------------------------------------------

    def _take_registered(self, document: Document | None) -> None:
        """Apply the worker's document that the reply to a heartbeat holds; None: the document is gone."""
        validity = self.parts.scope.validity
        if document is not None:
            _heard(validity, document, was_silent=document.get("was_silent") is True)
            control = document.get("control")
            self._take_order(control if isinstance(control, dict) else {})
        elif not self._stopping.is_set():
            validity.lost()
            self.parts.registrar.register_again(self._registered_again, self._taken_over)

    def _registered_again(self, document: Document) -> None:
        _heard(self.parts.scope.validity, document, was_silent=True)

    def _taken_over(self, error: WorkerIdInUse) -> None:
        self._failure = error
        self.stop("worker_id taken over")

    def _take_order(self, order: Document) -> None:
        """Carry out the order that a client has written into this worker's document."""
        if self._stopping.is_set():
            return
        # Clients in other programming languages may write orders, too. So an order may be unclear, and is then ignored.
        if order.get("stop") is True:
            self.stop("stopped remotely")
        wanted = order.get("concurrency")
        concurrency = self._options.concurrency
        if isinstance(wanted, int | float) and not isinstance(wanted, bool) and wanted in CONCURRENCIES:
            concurrency = int(wanted)
        if concurrency != self._vitals.concurrency:
            logger.info("concurrency changed", extra=fields(concurrency=concurrency))
            self.parts.slots.set_concurrency(concurrency)
            self.parts.pinger.beat_now()


def _is_busy(parts: Parts) -> bool:
    """Whether this worker holds a run, may have claimed one, or has an end to write."""
    return bool(parts.scope.ledger.held) or not parts.claimer.is_at_rest or parts.finisher.pending > 0


def _heard(validity: Validity, document: Document, *, was_silent: bool) -> None:
    validity.heard(document["heartbeat_expire_time"], at=document["heartbeat_time"], was_silent=was_silent)


def _start(group: asyncio.TaskGroup, services: Iterable[Service]) -> None:
    for service in services:
        if service.run is not None:
            group.create_task(enduring(service.run))


def _stop(services: Sequence[Service]) -> None:
    for service in reversed(services):
        if service.stop is not None:
            service.stop()
