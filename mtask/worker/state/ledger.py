"""The ledger: which tasks this worker is busy with, and since when its news of each is out of date."""

from __future__ import annotations

from collections import OrderedDict
from time import monotonic

from mtask.worker.state.held_run import HeldRun

#: For how long the ledger remembers that a task was claimed here, in seconds; and at least how many of them.
_RECENT, _MAX_RECENT = 60.0, 4000
#: For how long it remembers that the stream told of a task, in seconds (no read takes longer); and how many at least.
_NEWS, _MIN_HEARD = 20.0, 2000


class Ledger:
    """What the parts of a worker know of tasks together. It decides nothing, and wakes nobody."""

    def __init__(self) -> None:
        #: Tasks whose claim is under way.
        self.claiming: set[str] = set()
        #: The runs whose handlers are under way, by run_id.
        self.running: dict[str, HeldRun] = {}
        #: Names of tasks in queues served here that have no handler here.
        self.unserved_names: set[str] = set()
        self._held: dict[str, HeldRun] = {}
        #: When a task was last claimed here, monotonic seconds; the longest ago first.
        self._claimed: OrderedDict[str, float] = OrderedDict()
        #: When the stream last told of a task, monotonic seconds.
        self._heard: dict[str, float] = {}
        self._heard_limit = _MIN_HEARD

    @property
    def runs(self) -> list[HeldRun]:
        """The runs whose handlers are under way."""
        return list(self.running.values())

    def held_run(self, task_id: str) -> HeldRun | None:
        """Return the run of this task that this worker holds, started or not."""
        return self._held.get(task_id)

    def hold(self, run: HeldRun) -> None:
        """Enter a run that was claimed."""
        self._held[run.task_id] = run

    def forget(self, run: HeldRun) -> None:
        """Strike out a run; a newer one of the same task stays."""
        if self._held.get(run.task_id) is run:
            del self._held[run.task_id]

    def claimed(self, task_id: str, now: float) -> None:
        """Note that a task was claimed here, at a monotonic instant (seconds)."""
        self._claimed[task_id] = now
        self._claimed.move_to_end(task_id)

    def was_claimed(self, task_id: str) -> bool:
        """Whether this worker claimed the task lately."""
        return task_id in self._claimed

    def forget_old_claims(self, now: float) -> None:
        """Forget claims of more than a minute ago where there are many."""
        while len(self._claimed) > _MAX_RECENT:
            task_id, when = self._claimed.popitem(last=False)
            if when > now - _RECENT:
                self._claimed[task_id] = when
                self._claimed.move_to_end(task_id, last=False)
                return

    def heard(self, task_id: str) -> None:
        """Note that the stream told of a task."""
        now = monotonic()
        self._heard[task_id] = now
        if len(self._heard) > self._heard_limit:
            self._heard = {heard: when for heard, when in self._heard.items() if when > now - _NEWS}
            self._heard_limit = max(_MIN_HEARD, 2 * len(self._heard))

    def is_old_news(self, task_id: str, sent: float) -> bool:
        """Whether a read that was sent then (monotonic seconds) is older than a claim here or news from the stream."""
        return max(self._claimed.get(task_id, 0.0), self._heard.get(task_id, 0.0)) > sent
