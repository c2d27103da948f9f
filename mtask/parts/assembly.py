"""The assembly: opens a worker's connections, builds the worker's parts, and connects the signals between the parts."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mtask.app.app import App
from mtask.app.hooks import Hook
from mtask.app.successes import Successes
from mtask.features.controls.keep import Retention
from mtask.features.controls.worker import Controls
from mtask.features.encryption.cipher import Sealer
from mtask.features.encryption.worker import Keys
from mtask.features.flows.worker import FlowJanitor
from mtask.features.limits.worker import Limits
from mtask.features.metrics.worker import Recorder
from mtask.features.schedules.worker import Scheduler
from mtask.kernel.driver import connect
from mtask.kernel.driver.stores import AsyncStore, SyncStore
from mtask.kernel.worker.discovery.buffer import PreemptionQueue
from mtask.kernel.worker.discovery.fetch import Batches
from mtask.kernel.worker.discovery.fetch_loop import Scans
from mtask.kernel.worker.discovery.fleet import Ranks
from mtask.kernel.worker.discovery.inbox import Inbox
from mtask.kernel.worker.discovery.overflow import Overflow
from mtask.kernel.worker.discovery.quarantine import Quarantine
from mtask.kernel.worker.discovery.questions import Questions
from mtask.kernel.worker.discovery.reaper import TaskJanitor
from mtask.kernel.worker.discovery.relays import Settler
from mtask.kernel.worker.discovery.rereads import Lookups
from mtask.kernel.worker.discovery.stream import Hearing, Looks, StreamLoop
from mtask.kernel.worker.process import aside
from mtask.kernel.worker.process.options import WorkerOptions
from mtask.kernel.worker.process.registration import Registrar
from mtask.kernel.worker.process.state import Scope
from mtask.kernel.worker.running.accept import Adoption
from mtask.kernel.worker.running.call import Caller, HandlerStores, Observers, RunOperations
from mtask.kernel.worker.running.claim import Recovery, Sender
from mtask.kernel.worker.running.claim_loop import Claimer
from mtask.kernel.worker.running.finisher import Finisher
from mtask.kernel.worker.running.leases import Pinger
from mtask.kernel.worker.running.runner import Runner
from mtask.kernel.worker.running.slots import Pace, Slots
from mtask.kernel.worker.running.transactions import RunTransactions
from mtask.parts import relays
from mtask.parts import worker as features
from mtask.parts.admission import Admission
from mtask.parts.worker import extended as extended

if TYPE_CHECKING:
    from mtask.features.isolation.pool import ExecutorRoom, Executors
    from mtask.features.logs.worker import LogKeeper

_QUEUE_CAPACITY = 2_000


@dataclass(frozen=True, slots=True)
class Connections:
    """The connections of a worker's event loop.

    The change stream and the handlers' transactions keep a connection busy for long. So each of the two has connections
    of its own.
    """

    store: AsyncStore
    stream: AsyncStore
    handlers: HandlerStores


@asynccontextmanager
async def connections(options: WorkerOptions, app_name: str) -> AsyncIterator[Connections]:
    """Open the connections of a worker's event loop, and close them at the end of the block."""
    uri, database = options.uri, options.database
    store = connect.async_store(uri, database, app_name)
    stream = connect.async_store(uri, database, app_name, **connect.QUIET)
    store.sealer = sealer = sealer_of(options)
    handlers = HandlerStores(uri, database, app_name, sealer)
    try:
        yield Connections(store, stream, handlers)
    finally:
        await handlers.close()
        if sealer is not None:
            await aside.to_thread(sealer.vault.close)
        await stream.close()
        await store.close()


def sealer_of(options: WorkerOptions) -> Sealer | None:
    """Return what encrypts and decrypts the values of tasks; None: this worker has no keys. Raises InvalidInput."""
    if options.encryption is None:
        return None
    from mtask.features.encryption.opening import sealer_for  # only a worker with encryption needs it

    return sealer_for(options.encryption, options.uri)


def ping_store(options: WorkerOptions, app_name: str) -> SyncStore:
    """Open the connection of the pinger's thread."""
    return connect.sync_store(options.uri, options.database, app_name, **connect.QUIET)


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of a registered worker, in the order in which they are built."""

    scope: Scope
    registrar: Registrar
    pinger: Pinger
    controls: Controls
    limits: Limits
    quarantine: Quarantine
    settlers: Sequence[Settler]
    finisher: Finisher
    executors: Executors | None
    keeper: LogKeeper | None
    runner: Runner
    queue: PreemptionQueue
    questions: Questions
    ranks: Ranks
    inbox: Inbox
    lookups: Lookups
    scans: Scans
    stream: StreamLoop
    slots: Slots
    adoption: Adoption
    recovery: Recovery
    sender: Sender
    overflow: Overflow
    claimer: Claimer
    retention: Retention
    recorder: Recorder
    scheduler: Scheduler | None


@dataclass(frozen=True, slots=True)
class Assembly:
    """The objects from which the parts of a worker are built."""

    app: App
    options: WorkerOptions
    scope: Scope
    connections: Connections
    pings: SyncStore
    registrar: Registrar
    values: Mapping[Hook, Any]  #: the value that each start hook of the app has given

    def build(self) -> Parts:
        """Build the parts and connect their signals. Call this in the worker's event loop."""
        scope, around = self.scope, self.app.around
        pinger = Pinger(scope, self.pings, self.registrar.registration, self.options.heartbeat_interval)
        controls = Controls(scope)
        limits = Limits(scope, controls)
        quarantine = Quarantine(scope.store, scope.worker_id)
        keys = Keys(scope)
        admission = Admission(controls, limits, quarantine, keys)
        settlers = [Settler(scope.store, relay) for relay in relays.RELAYS]
        finisher = Finisher(scope, pinger, limits, settlers, around.finish)
        successes = Successes(self.app.handlers)
        transactions = RunTransactions(
            self.connections.handlers, pinger, successes, self.registrar.registration.incarnation
        )
        operations = RunOperations(self.connections.handlers, self.app.handlers)
        keeper = self._keeper()
        executors = self._executors(pinger, keeper)
        caller = Caller(
            scope.worker_id,
            transactions,
            pinger.expedite,
            around.run,
            self.values,
            operations,
            executors,
            Observers(self.app.tracer, keeper),
        )
        runner = Runner(scope, pinger, limits, finisher, caller, successes)
        room = self._room(executors)
        capacity = max(_QUEUE_CAPACITY, 4 * self.options.concurrency)
        queue = PreemptionQueue(
            capacity,
            is_limited=limits.is_limited,
            limited=limits.windows,
            is_fair=controls.is_fair,
            isolated=room,
        )
        questions = Questions(scope.ledger, quarantine)
        ranks = Ranks(scope, queue)
        inbox = Inbox(scope, queue, admission, questions, ranks)
        lookups = Lookups(scope, admission, questions, inbox, pinger)
        janitor = TaskJanitor(scope, quarantine, questions, inbox)
        batches = Batches(scope, queue, admission, inbox, ranks)
        flows = FlowJanitor(scope, self.registrar.registration.incarnation)
        scans = Scans(scope, queue, controls, batches, lookups, ranks, janitor, flows, features.parts(scope))
        looks = Looks(scope, self.connections.stream, controls, scans, batches, lookups)
        hearing = Hearing(scope, ranks, batches)
        stream = StreamLoop(scope, self.connections.stream, inbox, questions, controls, scans, looks, hearing)
        pace = Pace()
        slots = Slots(scope, runner, pace)
        adoption = Adoption(scope, self.app.handlers, admission, questions, runner, slots)
        recovery = Recovery(scope, adoption)
        sender = Sender(scope, admission, lookups, adoption, recovery, pace)
        overflow = Overflow(scope, queue, lookups, hearing)
        claimer = Claimer(scope, queue, admission, slots, sender, finisher, overflow, ranks)
        retention = Retention(scope.store, controls)
        recorder = Recorder(scope, self.registrar.registration)
        app = self.app
        scheduler = Scheduler(scope.store, app.schedules, scope.meter, app.tracer) if self.options.scheduler else None
        parts = Parts(
            scope,
            self.registrar,
            pinger,
            controls,
            limits,
            quarantine,
            settlers,
            finisher,
            executors,
            keeper,
            runner,
            queue,
            questions,
            ranks,
            inbox,
            lookups,
            scans,
            stream,
            slots,
            adoption,
            recovery,
            sender,
            overflow,
            claimer,
            retention,
            recorder,
            scheduler,
        )
        _connect(parts)
        return parts

    def _keeper(self) -> LogKeeper | None:
        logs = self.options.logs
        if not logs.keep:
            return None
        from mtask.features.logs.worker import LogKeeper  # only a worker with --keep-logs needs it

        return LogKeeper(self.connections.store, self.scope.worker_id, logs)

    def _room(self, executors: Executors | None) -> ExecutorRoom | None:
        if executors is None:
            return None
        from mtask.features.isolation.pool import ExecutorRoom

        executors.on_idle = self.scope.signals.room_made.send
        return ExecutorRoom(self.scope.ledger, self.app.handlers, executors)

    def _executors(self, pinger: Pinger, keeper: LogKeeper | None) -> Executors | None:
        options = self.options.checked_executors(self.app)
        if options is None:
            return None
        # Only a worker with isolated handlers needs these.
        from mtask.features.isolation.messages import Origin
        from mtask.features.isolation.pool import Executors

        logs = self.options.logs
        given = self.options
        origin = Origin(
            given.uri,
            given.database,
            self.scope.worker_id,
            self.registrar.registration.incarnation,
            logs.log_format,
            logs.keep,
            encryption=given.encryption,
        )
        return Executors(options, origin, pinger, self.connections.store, keeper)


def _connect(parts: Parts) -> None:
    """Connect each signal to the parts that react to it.

    `Worker.run` connects the others, which the pinger sends: `heartbeat_answered` and `pinger_ended`.
    """
    signals = parts.scope.signals
    signals.task_queued.connect(parts.claimer.wake)
    signals.slot_freed.connect(parts.slots.free)
    signals.claim_landed.connect(parts.questions.landed)
    signals.slot_left.connect(parts.claimer.wake)
    signals.room_made.connect(parts.claimer.wake, parts.scans.refill)
    signals.queue_checked.connect(parts.scans.refill)
    signals.tasks_doubtful.connect(parts.questions.suspect_all)
    signals.permits_freed.connect(parts.scans.ask_for_permits)
    signals.controls_resumed.connect(parts.scans.ask_full)
    signals.controls_changed.connect(
        parts.limits.limits_changed, parts.queue.sort_anew, parts.scans.ask_full, parts.retention.wake
    )
    signals.permits_called.connect(parts.limits.called)
    signals.under_way.connect(parts.claimer.until_landed, parts.retention.until_landed)
    signals.heartbeat_wanted.connect(parts.pinger.beat_now)
    if parts.scheduler is not None:
        signals.schedules_changed.connect(parts.scheduler.wake)
        signals.collections_made.connect(parts.scheduler.declare_again)
