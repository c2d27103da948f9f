"""The ledger: the tasks that this worker claims, holds and runs.

For each task, the ledger also knows the time of this worker's latest news about it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from time import monotonic
from typing import Any, Generic, ParamSpec

from mtask.kernel.document.status import WorkerStatus
from mtask.kernel.driver.stores import AsyncStore
from mtask.kernel.statements.filters import Filter, claimable_now, in_time
from mtask.kernel.worker.process.counts import Meter
from mtask.kernel.worker.process.time import ServerClock, Tempo
from mtask.kernel.worker.running.run import HeldRun

#: The ledger forgets claims that are older than `_RECENT`, in seconds. It never forgets the newest `_MIN_CLAIMED`
#: claims.
_RECENT, _MIN_CLAIMED = 60.0, 4000
#: The ledger forgets events of the stream that are older than `_NEWS`, in seconds. It forgets none while it knows at
#: most `_MIN_HEARD` tasks. No read takes longer than `_NEWS`, so each read can be compared with the events that came
#: during the read.
_NEWS, _MIN_HEARD = 20.0, 2000


class Ledger:
    """The knowledge about tasks that all parts of a worker share. The ledger decides nothing and wakes no part."""

    def __init__(self) -> None:
        #: The ids of the tasks whose claim is under way.
        self.claiming: set[str] = set()
        #: The runs whose handlers are under way, by run_id.
        self.running: dict[str, HeldRun] = {}
        #: The names of tasks that wait in this worker's queues and for which this worker has no handler.
        self.unserved_names: set[str] = set()
        #: Those of the fields `OWING` that tasks of this database are known to have.
        self.owing: set[str] = set()
        #: Whether other live workers serve a queue of this worker, as far as it knows.
        self.has_peers = True
        self._held: dict[str, HeldRun] = {}
        #: The time of this worker's last claim of each task (monotonic seconds), the oldest claim first.
        self._claimed: OrderedDict[str, float] = OrderedDict()
        #: The time of the last event that the stream brought for each task (monotonic seconds).
        self._heard: dict[str, float] = {}
        self._heard_limit = _MIN_HEARD

    @property
    def runs(self) -> list[HeldRun]:
        """The runs whose handlers are under way."""
        return list(self.running.values())

    @property
    def held(self) -> Collection[HeldRun]:
        """The runs that this worker holds. Some may not have started yet."""
        return self._held.values()

    def held_run(self, task_id: str) -> HeldRun | None:
        """Return the run of this task that this worker holds, or None. The run may not have started yet."""
        return self._held.get(task_id)

    def hold(self, run: HeldRun) -> None:
        """Add a claimed run."""
        self._held[run.task_id] = run
        self.owing |= run.owes

    def forget(self, run: HeldRun) -> None:
        """Remove this run. If the ledger holds a newer run of the same task, the newer run stays."""
        if self._held.get(run.task_id) is run:
            del self._held[run.task_id]

    def claimed(self, task_id: str, now: float) -> None:
        """Note that this worker claimed the task at `now` (monotonic seconds)."""
        self._claimed[task_id] = now
        self._claimed.move_to_end(task_id)

    def was_claimed(self, task_id: str) -> bool:
        """Whether this worker claimed the task recently."""
        return task_id in self._claimed

    def forget_old_claims(self, now: float) -> None:
        """Forget claims that are more than a minute old, if the ledger holds many claims."""
        while len(self._claimed) > _MIN_CLAIMED:
            task_id, when = self._claimed.popitem(last=False)
            if when > now - _RECENT:
                self._claimed[task_id] = when
                self._claimed.move_to_end(task_id, last=False)
                return

    def heard(self, task_id: str) -> None:
        """Note that the stream brought an event of the task."""
        now = monotonic()
        self._heard[task_id] = now
        if len(self._heard) > self._heard_limit:
            self._heard = {heard: when for heard, when in self._heard.items() if when > now - _NEWS}
            self._heard_limit = max(_MIN_HEARD, 2 * len(self._heard))

    def is_old_news(self, task_id: str, sent: float) -> bool:
        """Whether a read was sent before the task's last event, or before this worker's last claim of the task.

        `sent`: the time at which the read was sent (monotonic seconds).
        """
        return self._claimed.get(task_id, 0.0) > sent or self._heard.get(task_id, 0.0) > sent

    def is_beyond(self, task_id: str, sent: float) -> bool:
        """Whether a read that was sent at `sent` says nothing new about a task: it is old news, or claimed here."""
        # A claim that is under way is newer than the read.
        return task_id in self.claiming or task_id in self._held or self.is_old_news(task_id, sent)


# --- signals ---------------------------------------------------------------------------------------------

# Signals: named wake-ups. By a signal, one part of a worker wakes parts that it does not know.
#
# `mtask.parts.assembly` connects each signal to its listeners. A signal calls its listeners at once, in the order in
# which they were connected. All signals are sent in the event loop.

P = ParamSpec("P")


class Signal(Generic[P]):
    """One named wake-up."""

    __slots__ = ("_listeners", "send")

    #: Calls the listeners. With only one listener, it is that listener: some signals are sent for each task.
    send: Callable[P, object]

    def __init__(self) -> None:
        self._listeners: list[Callable[P, object]] = []
        self.send = self._send

    def connect(self, *listeners: Callable[P, object]) -> None:
        """Add listeners: they are called each time the signal is sent."""
        self._listeners += listeners
        self.send = self._listeners[0] if len(self._listeners) == 1 else self._send

    def _send(self, *args: P.args, **kwargs: P.kwargs) -> None:
        for listener in self._listeners:
            listener(*args, **kwargs)


class Barrier:
    """Waits until several parts have ended the work that was under way when the wait began."""

    __slots__ = ("_waits",)

    def __init__(self) -> None:
        self._waits: list[Callable[[], Awaitable[None]]] = []

    def connect(self, *waits: Callable[[], Awaitable[None]]) -> None:
        """Add functions. Each function waits for the work of one part."""
        self._waits += waits

    async def wait(self) -> None:
        """Wait for the work of each part, one part after the other."""
        for wait in self._waits:
            await wait()


class Signals:
    """All signals of a worker."""

    def __init__(self) -> None:
        #: A task was put into the preemption queue, and the task may be due.
        self.task_queued: Signal[[]] = Signal()
        #: A slot is free: a handler has ended and, if it ran in a thread, the thread, too.
        self.slot_freed: Signal[[]] = Signal()
        #: The claim of the given tasks is over.
        self.claim_landed: Signal[[Iterable[str]]] = Signal()
        #: Slots may be free.
        self.room_made: Signal[[]] = Signal()
        #: There is room for more tasks than the preemption queue may hold soon.
        self.tasks_wanted: Signal[[]] = Signal()
        #: A run has left its slot. It is sent for each run, so it does no more than wake the claimer.
        self.slot_left: Signal[[]] = Signal()
        #: What this worker knows about the given tasks may be wrong, so the tasks must be read again.
        self.tasks_doubtful: Signal[[Iterable[Any]]] = Signal()
        #: A document in `places` calls this worker: its id, and its `call`.
        self.called: Signal[[str, Any]] = Signal()
        #: The gate may soon let more tasks pass than this worker knows, so a scan for due tasks is needed.
        self.gate_drained: Signal[[]] = Signal()
        #: A queue or task name was resumed, so a scan for all waiting tasks is needed.
        self.controls_resumed: Signal[[]] = Signal()
        #: Controls of this worker's queues, names or tenants have changed.
        self.controls_changed: Signal[[]] = Signal()
        #: Waits for the claims and removals that began before a control changed. They must end before the worker
        #: confirms the change.
        self.under_way = Barrier()
        #: The worker stops, and its change stream reports no more.
        self.stream_stopped: Signal[[]] = Signal()
        #: The collections were dropped and have been created again.
        self.collections_made: Signal[[]] = Signal()
        #: A heartbeat should be sent at once.
        self.heartbeat_wanted: Signal[[]] = Signal()
        #: A heartbeat was answered with the worker's document; None: the document is gone.
        self.heartbeat_answered: Signal[[dict[str, Any] | None]] = Signal()
        #: The thread that pings has ended by itself: the leases of all runs will lapse.
        self.pinger_ended: Signal[[]] = Signal()


# --- scope -----------------------------------------------------------------------------------------------

# The scope: the objects that every part of a worker needs.


@dataclass(slots=True)
class Vitals:
    """The state of this worker that heartbeats report. The event loop sets it, and the pinger's thread reads it."""

    concurrency: int
    status: WorkerStatus = WorkerStatus.READY
    #: How often this worker has appealed to the others.
    appeal_cnt: int = 0
    #: What returns the fields that features add to each heartbeat. Any thread may call it.
    beats: Sequence[Callable[[], Mapping[str, Any]]] = ()


class Served:
    """The queues and task names that this worker serves, and what of them is paused now."""

    def __init__(self, queues: Sequence[str], names: Sequence[str]) -> None:
        self._queues = list(queues)
        self._names = list(names)
        self.paused_queues: frozenset[str] = frozenset()
        self.paused_names: frozenset[str] = frozenset()
        self.paused_tenants: frozenset[str] = frozenset()
        #: The queues whose tenants take turns.
        self.fair_queues: frozenset[str] = frozenset()
        #: Whether tasks may have to wait at the gate: some queue of this worker has a limit, or a tenant has one.
        self.is_limited = False

    @property
    def queues(self) -> list[str]:
        """The queues that this worker serves and that are not paused."""
        return [queue for queue in self._queues if queue not in self.paused_queues]

    @property
    def names(self) -> Sequence[str]:
        """The task names that this worker handles and that are not paused."""
        # The claimer asks at each of its looks. An app may have hundreds of names, and seldom is one of them paused.
        return [name for name in self._names if name not in self.paused_names] if self.paused_names else self._names

    def is_paused(self, queue: str | None, name: str, tenant: str | None = None) -> bool:
        """Whether a task must not be claimed now because its queue, its name or its tenant is paused."""
        return name in self.paused_names or queue in self.paused_queues or tenant in self.paused_tenants

    def is_fair(self, queue: str | None) -> bool:
        """Whether the tenants of this queue take turns."""
        return queue in self.fair_queues

    def guard(self, valid_until: datetime | None) -> Filter:
        """Return the guard of a claim: nothing of it is paused, and `valid_until` has not passed."""
        return claimable_now(self.paused_queues, self.paused_names, valid_until, self.paused_tenants)


_LONG_AGO = datetime(2000, 1, 1, tzinfo=UTC)


class Validity:
    """Until when this worker's claims are valid: until its heartbeat expires.

    The others take a worker with an expired heartbeat for dead. It may miss news, such as a pause: the call that pauses
    a queue does not wait for it.
    """

    def __init__(self, clock: ServerClock) -> None:
        self._clock = clock
        #: Has the news read that this worker may have missed during a silence, and calls `caught_up`. None: it needs
        #: none.
        self.on_silence: Callable[[], object] | None = None
        #: The time until which this worker's claims are valid (server's clock): usually the expiry of its heartbeat.
        #: None: this worker has had no heartbeat yet.
        self.until: datetime | None = None
        #: After a silence, no claim is valid until the news is read. This value is then copied to `until`. None: no
        #: such read is needed.
        self._then: datetime | None = None
        #: The expiry of the last heartbeat that the server answered (server's clock).
        self._heard_until: datetime | None = None
        self.silence_cnt = 0

    def guard(self) -> list[Filter]:
        """Return the condition that this worker's heartbeat has not expired.

        Before the first heartbeat there is no such condition, and the list is empty.
        """
        return [] if self.until is None else [in_time(self.until)]

    def is_over(self) -> bool:
        """Whether this worker's heartbeat has expired, so that no claim of this worker would be valid now."""
        return self.until is not None and self._clock.now() >= self.until

    def heard(self, valid_until: datetime, *, at: datetime, was_silent: bool) -> None:
        """Note the answer to a heartbeat: it was stored at the time `at` and expires at `valid_until` (server's clock).

        If the previous heartbeat had expired before `at`, the news is read before this worker's next claim. The server
        reports such an expiry as `was_silent`. The reply with this report may have been lost, so this method compares
        the times, too.
        """
        was_silent |= self._heard_until is not None and at >= self._heard_until
        self._heard_until = valid_until
        if was_silent and self.on_silence is not None:
            self.silence_cnt += 1
            self.until, self._then = _LONG_AGO, valid_until
            self.on_silence()
        elif self._then is not None:
            self._then = valid_until
        else:
            self.until = valid_until

    def caught_up(self, silence_cnt: int) -> None:
        """Note that the news was read after `silence_cnt` silences. If there was another one, it is read again."""
        if self._then is not None and silence_cnt == self.silence_cnt:
            self.until, self._then = self._then, None

    def lost(self) -> None:
        """Make all claims of this worker invalid until `heard` is called. Call this when the registration is gone."""
        self.until = self._heard_until = _LONG_AGO


@dataclass(frozen=True, slots=True)
class Scope:
    """The worker's id, the queues and task names that it serves, and the state that all its parts share."""

    store: AsyncStore
    worker_id: str
    queues: Sequence[str]
    names: Sequence[str]
    clock: ServerClock
    tempo: Tempo
    vitals: Vitals
    ledger: Ledger = field(default_factory=Ledger)
    meter: Meter = field(default_factory=Meter)
    signals: Signals = field(default_factory=Signals)
    served: Served = field(init=False)
    validity: Validity = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "served", Served(self.queues, self.names))
        object.__setattr__(self, "validity", Validity(self.clock))
