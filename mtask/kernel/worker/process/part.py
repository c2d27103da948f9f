"""The seam between a worker and the features: a part of a feature overrides the hooks that it needs.

`mtask.parts.worker` lists the parts, and collects what they override. Two hooks are no methods of `Part`. A `Relay`
tells others of the ends of tasks: clients need it, too. The `Chaining` of `Successes` lets a task go on as another
one: executors need it, too. The statements have no hooks: each process must send the same ones, whatever it has loaded.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Protocol

from mtask.kernel.document.handlers import Handler
from mtask.kernel.document.status import RunStatus
from mtask.kernel.document.task import StoredTask
from mtask.kernel.driver.operation import Operation
from mtask.kernel.operations.find_due import Scan
from mtask.kernel.statements.filters import Filter
from mtask.kernel.statements.finish import Outcome
from mtask.kernel.worker.discovery.ready import Entry, Parking
from mtask.kernel.worker.running.call import Execution
from mtask.kernel.worker.running.run import Admitted, HeldRun

_Work = Callable[[], Coroutine[Any, Any, None]]


@dataclass(frozen=True, slots=True)
class Service:
    """A loop of a feature that runs beside the worker's own loops, with its begin and its end."""

    run: _Work | None = None
    #: Ends `run`. The services are stopped in reverse order, and so are their last works done.
    stop: Callable[[], object] | None = None
    #: What is done before the first claim. An error ends the worker.
    begin: _Work | None = None
    #: What is left to do when all runs have ended.
    drain: _Work | None = None
    #: Whether it goes on until all runs of a stopping worker have ended.
    lasts: bool = False


class Part:
    """What a feature does in a worker.

    A part that nobody uses costs a look at these attributes, which it keeps up to date itself.
    """

    #: What each claim and each scan leaves out, beside what `guard` tells.
    always: Sequence[Filter] = ()
    #: Whether `guard` has nothing to tell now, and `skips` only of tasks with the field `field`.
    is_idle = False
    field = ""
    #: Whether `ended` is to hear of successes, too.
    hears_successes = False

    def watches(self) -> Mapping[str, Callable[[], object]]:
        """Return what the changes of a collection wake. It is woken, too, when a change may have gone unheard."""
        return {}

    def guard(self) -> list[Filter]:
        """Return what each claim and each scan leaves out now."""
        return []

    def skips(self, document: Mapping[str, Any]) -> bool:
        """Whether this worker must leave a task alone now. `document`: what a hint or a read tells of the task."""
        return False

    def execution(self, handler: Handler) -> Execution | None:
        """Return where this handler runs; None: as far as this part knows, in the worker's process."""
        return None

    def ended(self, run: HeldRun, outcome: Outcome | None) -> None:
        """Hear how a run has ended, before its end is written. None: its transaction has written a SUCCESS."""

    async def upkeep(self, count: int, *, is_full: bool) -> None:
        """Do what a dead process has left undone. Raises DatabaseUnavailable.

        `count` is the number of regular scans before this one. `is_full`: it also looks for what is seldom there.
        """

    def services(self) -> Sequence[Service]:
        """Return what goes on beside the worker's own loops."""
        return ()

    def beat(self) -> Mapping[str, Any]:
        """Return fields of the worker's document that each heartbeat updates. Any thread may call this."""
        return {}


@dataclass(frozen=True, slots=True)
class Hooks:
    """The hooks that the parts of a worker override, in the order of the parts. What none overrides costs nothing."""

    watches: Mapping[str, Sequence[Callable[[], object]]]
    guarding: Sequence[Part]
    skipping: Sequence[Part]
    executions: Sequence[Callable[[Handler], Execution | None]]
    hearing: Sequence[Part]
    upkeeps: Sequence[Callable[..., Coroutine[Any, Any, None]]]
    services: Sequence[Service]
    beats: Sequence[Callable[[], Mapping[str, Any]]]

    def wake(self, collection: str) -> None:
        """Wake what watches this collection: it has changed, or may have changed."""
        for wake in self.watches.get(collection, ()):
            wake()

    def guard(self) -> list[Filter]:
        """Return what each claim and each scan leaves out now."""
        found = [left_out for part in self.guarding for left_out in part.always]
        return found + [left_out for part in self.guarding if not part.is_idle for left_out in part.guard()]

    def skips(self, document: Mapping[str, Any]) -> bool:
        """Whether this worker must leave a task alone now. It is called for each task."""
        for part in self.skipping:  # noqa: SIM110 a generator for each task costs more
            if (not part.is_idle or part.field in document) and part.skips(document):
                return True
        return False

    def ended(self, run: HeldRun, outcome: Outcome | None) -> None:
        """Tell the parts that hear of it how a run has ended."""
        is_success = outcome is None or outcome.status is RunStatus.SUCCESS
        for part in self.hearing:
            if part.hears_successes or not is_success:
                part.ended(run, outcome)


# --- the gate --------------------------------------------------------------------------------------------

# The gate: keeps due tasks waiting, in the memory of this worker, until they may be claimed.
#
# A worker has one gate at most.


class TakeScan(Protocol):
    """Runs a scan and puts what it finds into the inbox. Before that, it calls `note`."""

    def __call__(self, scan: Operation[Scan], /, *, note: Callable[[Scan], None] | None) -> Awaitable[Scan]:
        """Return the scan."""


class Scanner(Protocol):
    """Scans a queue in another order than by priority and age."""

    async def scan(
        self,
        take: TakeScan,
        target: ScanTarget,
        names: Sequence[str],
        horizon_ms: int,
        capacity: int,
        also: list[Filter],
        without: Collection[str],
        /,
    ) -> Scan:
        """Take tasks of the target's queue, but of no tenant in `without`. `also` holds further guards."""


@dataclass(frozen=True, slots=True)
class ScanTarget:
    """The queues that one scan covers, and the tasks that it leaves out."""

    queues: list[str]
    #: The conditions that leave tasks out.
    guards: Sequence[Filter] = ()
    #: Scans the single queue of this target. None: it is scanned as all others.
    scanner: Scanner | None = None
    #: Whether the scan is one of several, each of which brings less.
    is_apart: bool = False
    #: Whether the gate asks for more itself when few of the tasks are left that the scan brings.
    is_on_demand: bool = False
    #: Told of what the scan brings. None: nobody is to be told.
    note: Callable[[Scan], None] | None = None


class Admission(Admitted, Protocol):
    """What a gate gives for one claim: the tasks that may be claimed now."""

    @property
    def task_ids(self) -> list[str]:
        """The ids of these tasks."""

    @property
    def token(self) -> str:
        """The token of the claim. Its run_ids begin with this token."""

    @property
    def claim_by(self) -> datetime | None:
        """The time until which the tasks may be claimed, by the server's clock; None: at any time."""

    @property
    def guard(self) -> list[Filter]:
        """The conditions of the claim."""

    def hold(self, task_ids: Iterable[str]) -> None:
        """Note that the claim has won these tasks. The caller must call `release` for the run of each."""

    def time_begin(self, run: HeldRun) -> None:
        """Let the handler of a run begin when it may, and hear of its begin."""

    async def settle(self, lost: Sequence[str]) -> None:
        """Give back what the gate has given for these tasks, which the claim has lost."""


class Gate(Protocol):
    """Keeps tasks waiting. The tasks of one queue pass it in their order.

    Nobody asks it while `Served.is_limited` is false: then no task has to wait.
    """

    @property
    def parking(self) -> Parking:
        """Where ready tasks wait."""

    def needs(self, task: Entry | StoredTask, /) -> bool:
        """Whether a task may have to wait at the gate."""

    def guard_of_free(self) -> list[Filter]:
        """Return the guard of a claim without an admission. It refuses a task that needs one after all."""

    def pick(self, entries: Iterable[Entry]) -> None:
        """Note the tasks that were taken from `parking`. The caller must call `landed` for each."""

    def has_fallen_back(self, task: StoredTask, now: datetime) -> bool:
        """Whether a task that was picked has lost its place, as its document says. `now`: the server's time."""

    def landed(self, task_ids: Iterable[str]) -> None:
        """Let other tasks pass in place of those that did not."""

    async def admit(
        self,
        tasks: Sequence[StoredTask],
        token: str,
        now: datetime,
        refuse: Callable[[Sequence[StoredTask], Sequence[StoredTask]], None],
        dead: Sequence[tuple[str, str]] = (),
        /,
    ) -> Admission:
        """Ask for these tasks to pass.

        `now`: the server's time at which the tasks were read. `dead`: the tasks and the tokens of closed runs, whose
        place these tasks take. `refuse` is called at once with the tasks that wait again, and with those that another
        worker is about to claim. Raises DatabaseError.
        """

    # --- scans ----------------------------------------------------------------------------------------------

    def targets(self, queues: Sequence[str]) -> list[ScanTarget]:
        """Return the scans that cover these queues."""

    def wants_more(self, queue: str) -> bool:
        """Whether a scan should find more tasks of this queue: few wait here, and more in the database."""

    def look_for_more(self) -> None:
        """Ask for a scan soon if some queue wants more."""
