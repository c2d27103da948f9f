"""The worker with its app and its features: opens the connections, builds the parts and connects their signals."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from mtask.app.app import App
from mtask.app.context import Context
from mtask.app.hooks import Hook
from mtask.app.middleware import RunCall, watch_finish
from mtask.errors import HandlerError
from mtask.features.breaker.worker import Breakers
from mtask.features.callbacks.rules import DELIVERY
from mtask.features.controls.fair_turns import Turns
from mtask.features.controls.keep import Retention
from mtask.features.controls.worker import Controls
from mtask.features.encryption.worker import Keys
from mtask.features.flows.worker import FlowPart
from mtask.features.limits.worker import Limits
from mtask.features.metrics.worker import Recorder
from mtask.features.registry.worker import HandlerRegistrar
from mtask.features.rollout.worker import Rollout
from mtask.features.schedules.worker import Scheduler
from mtask.kernel.driver import connect
from mtask.kernel.driver.stores import SyncStore
from mtask.kernel.worker.discovery.buffer import PreemptionQueue
from mtask.kernel.worker.discovery.fetch import Batches
from mtask.kernel.worker.discovery.fetch_loop import Scans
from mtask.kernel.worker.discovery.fleet import Ranks
from mtask.kernel.worker.discovery.inbox import Inbox, Questions
from mtask.kernel.worker.discovery.quarantine import Losses, Quarantine
from mtask.kernel.worker.discovery.reaper import TaskJanitor
from mtask.kernel.worker.discovery.relays import Settler
from mtask.kernel.worker.discovery.rereads import Lookups
from mtask.kernel.worker.discovery.stream import Hearing, Looks, StreamLoop
from mtask.kernel.worker.process import runtime
from mtask.kernel.worker.process import worker as process
from mtask.kernel.worker.process.registration import Registrar
from mtask.kernel.worker.process.state import Scope
from mtask.kernel.worker.process.worker import Connections
from mtask.kernel.worker.running.accept import Adoption
from mtask.kernel.worker.running.call import Caller, HandlerStores, RunOperations, Surroundings
from mtask.kernel.worker.running.claim import Recovery, Sender
from mtask.kernel.worker.running.claim_loop import Claimer, Overflow
from mtask.kernel.worker.running.finisher import Finisher
from mtask.kernel.worker.running.leases import Pinger
from mtask.kernel.worker.running.runner import Runner
from mtask.kernel.worker.running.slots import Pace, Slots
from mtask.kernel.worker.running.transactions import RunTransactions
from mtask.parts import relays
from mtask.parts.codec import codec_of
from mtask.parts.outcomes import successes as judged_by
from mtask.parts.worker import PARTS, Features, WorkerOptions, extended

if TYPE_CHECKING:
    from mtask.features.isolation.pool import ExecutorRoom, Executors
    from mtask.features.logs.worker import LogKeeper

#: The least number of due tasks that the queue of a worker has room for. Tests tune it.
QUEUE_CAPACITY = 2_000


@asynccontextmanager
async def connections(options: WorkerOptions, app_name: str) -> AsyncIterator[Connections]:
    """Open the connections of a worker's event loop, and close them at the end of the block."""
    uri, database = options.uri, options.database
    store = connect.async_store(uri, database, app_name)
    stream = connect.async_store(uri, database, app_name, **connect.QUIET)
    store.codec = codec = codec_of(options.encryption, uri)
    handlers = HandlerStores(uri, database, app_name, codec)
    try:
        yield Connections(store, stream, handlers)
    finally:
        await handlers.close()
        if not codec.is_plain:
            await runtime.to_thread(codec.close)
        await stream.close()
        await store.close()


@dataclass(frozen=True, slots=True)
class Parts(process.Parts):
    """The parts of a registered worker."""

    quarantine: Quarantine
    questions: Questions
    queue: PreemptionQueue
    ranks: Ranks
    inbox: Inbox
    adoption: Adoption
    recovery: Recovery
    sender: Sender
    overflow: Overflow
    features: Features


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
        losses = Losses()
        keeper = self._keeper()
        executors = self._executors(pinger, keeper)
        app = self.app
        # Nobody may publish the tasks of mtask itself.
        registered = [handler for handler in app if handler.name != DELIVERY]
        registrar = HandlerRegistrar(scope, self.registrar.registration, registered, app.version)
        features = Features(
            controls,
            Retention(scope, controls),
            Keys(scope),
            Breakers(scope, controls, app.handlers),
            limits,
            FlowPart(scope, self.registrar.registration.incarnation, relays.RELAYS),
            [make(scope) for make in PARTS],
            Scheduler(scope.store, app.schedules, scope.meter, app.tracer) if self.options.scheduler else None,
            keeper,
            Recorder(scope, self.registrar.registration),
            registrar,
            Rollout(scope, app.handlers, quarantine, hands_on=self.options.hands_on),
            executors,
        )
        hooks = features.hooks()
        settlers = [Settler(scope.store, relays.RELAYS[place:]) for place in range(len(relays.RELAYS))]
        successes = judged_by(app.handlers, registrar.known)
        watch = partial(watch_finish, around.finish, scope.worker_id) if around.finish else None
        finisher = Finisher(scope, pinger, settlers, successes, watch, hooks.ended)
        transactions = RunTransactions(
            self.connections.handlers, pinger, successes, self.registrar.registration.incarnation
        )
        context = partial(
            Context,
            worker_id=scope.worker_id,
            transactions=transactions,
            on_progress=pinger.expedite,
            values=self.values,
            operations=RunOperations(self.connections.handlers, app.handlers, relays.RELAYS, registrar.known),
        )
        isolated = None if app.tracer is None else app.tracer.isolated
        caller = Caller(
            Surroundings(context, RunCall, around.run, isolated), transactions.leave, hooks.executions, keeper
        )
        runner = Runner(scope, pinger, finisher, caller, successes, features.rollout.judge)
        room = self._room(executors)
        capacity = max(QUEUE_CAPACITY, 4 * self.options.concurrency)
        queue = PreemptionQueue(
            capacity,
            parking=limits.parking,
            needs_gate=limits.needs,
            served=scope.served,
            turns=Turns,
            isolated=room,
        )
        questions = Questions(scope.ledger, quarantine)
        ranks = Ranks(scope, queue)
        inbox = Inbox(scope, queue, quarantine, losses, questions, ranks, hooks)
        lookups = Lookups(scope, quarantine, questions, inbox, pinger, hooks)
        janitor = TaskJanitor(scope, quarantine, questions, inbox)
        batches = Batches(scope, queue, quarantine, limits, inbox, ranks, hooks)
        scans = Scans(scope, queue, batches, lookups, ranks, janitor, hooks)
        looks = Looks(scope, self.connections.stream, scans, batches, lookups, hooks)
        hearing = Hearing(scope, ranks, batches)
        stream = StreamLoop(scope, self.connections.stream, inbox, questions, scans, looks, hearing, hooks)
        pace = Pace()
        slots = Slots(scope, runner, pace)
        adoption = Adoption(scope, app.handlers, quarantine, questions, runner, slots)
        recovery = Recovery(scope, adoption)
        sender = Sender(scope, quarantine, losses, limits, lookups, adoption, recovery, pace, hooks)
        overflow = Overflow(scope, queue, lookups, hearing)
        claimer = Claimer(scope, queue, quarantine, limits, slots, sender, finisher, overflow, ranks)
        parts = Parts(
            scope,
            self.registrar,
            pinger,
            settlers,
            finisher,
            runner,
            lookups,
            scans,
            stream,
            slots,
            claimer,
            hooks,
            quarantine,
            questions,
            queue,
            ranks,
            inbox,
            adoption,
            recovery,
            sender,
            overflow,
            features,
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
            codec=None if given.encryption is None else given.encryption.document(),
        )
        return Executors(options, origin, pinger, self.connections.store, keeper)


def _connect(parts: Parts) -> None:
    """Connect each signal to the parts that react to it.

    `Worker.run` connects the others, which the pinger sends: `heartbeat_answered` and `pinger_ended`.
    """
    signals, features = parts.scope.signals, parts.features
    signals.task_queued.connect(parts.claimer.wake)
    signals.slot_freed.connect(parts.slots.free)
    signals.claim_landed.connect(parts.questions.landed)
    signals.slot_left.connect(parts.claimer.wake)
    signals.room_made.connect(parts.claimer.room_made)
    signals.tasks_wanted.connect(parts.scans.refill)
    signals.tasks_doubtful.connect(parts.questions.suspect_all)
    signals.gate_drained.connect(parts.scans.ask_for_gate)
    signals.controls_resumed.connect(parts.scans.ask_full)
    signals.controls_changed.connect(
        features.limits.limits_changed, parts.queue.sort_anew, parts.scans.ask_full, features.retention.wake
    )
    signals.controls_changed.connect(features.breakers.changed)
    signals.stream_stopped.connect(features.controls.poll)
    signals.called.connect(features.limits.called)
    signals.under_way.connect(parts.claimer.until_landed, features.retention.until_landed)
    signals.heartbeat_wanted.connect(parts.pinger.beat_now)
    if features.scheduler is not None:
        signals.collections_made.connect(features.scheduler.declare_again)


class Worker(process.Worker):
    """The worker of one process, with its app and its features."""

    _options: WorkerOptions

    def __init__(self, app: App, options: WorkerOptions) -> None:
        """Check the app and the options; raise HandlerError or InvalidInput. No connection is opened yet."""
        app, options = extended(app, options)
        if not app.handlers:
            raise HandlerError("(none)", "the app has no handlers: register some with @app.task")
        app.complete()
        app.schedules  # noqa: B018  raises if a schedule is invalid
        options.checked_executors(app)
        options.logs.check()
        super().__init__(options, list(app.handlers), app.queues)
        self._app = app
        self._hooks = app.hooks.begin()

    @property
    def parts(self) -> Parts:
        """The worker's parts; raises RuntimeError if the worker is not registered yet."""
        return cast(Parts, super().parts)

    def _connected(self, app_name: str) -> AbstractAsyncContextManager[Connections]:
        return connections(self._options, app_name)

    def _built(self, scope: Scope, opened: Connections, pings: SyncStore, registrar: Registrar) -> Parts:
        return Assembly(self._app, self._options, scope, opened, pings, registrar, self._hooks.values).build()

    async def _start_handlers(self) -> None:
        if not all(self._options.executors.isolates(handler) for handler in self._app):  # else executors start the app
            await self._hooks.start()

    async def _stop_handlers(self) -> None:
        await self._hooks.stop()
