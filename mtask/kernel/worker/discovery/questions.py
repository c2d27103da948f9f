"""Questions: collects the tasks that must be read now or when they become due. `Lookups` reads these tasks."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Iterable
from typing import Any

from mtask.kernel.worker.discovery.quarantine import Quarantine
from mtask.kernel.worker.process.log import fields, logger
from mtask.kernel.worker.process.state import Ledger

#: The most due lookups that are kept. Each takes about 200 bytes.
_MAX_DUE_LOOKUPS = 10_000


class Questions:
    """The tasks that must be read, because a hint alone does not say enough about them."""

    def __init__(self, ledger: Ledger, quarantine: Quarantine) -> None:
        self._ledger = ledger
        self._quarantine = quarantine
        #: The ids of the tasks to be read now. The key is a text of the id, because an id may not be hashable.
        self.suspects: dict[str, Any] = {}
        #: The ids of the tasks whose whole documents must be examined, each with the error or the reason.
        self.doubted: list[tuple[Any, Exception | str]] = []
        #: The tasks whose run in this worker may have to end.
        self.holders: set[str] = set()
        #: The tasks to be read when they become due.
        self.due = DueLookups(_MAX_DUE_LOOKUPS)
        #: `wake` is set when a task is to be read now. `wake_due` is set when the time of the next due lookup has
        #: changed.
        self.wake, self.wake_due = asyncio.Event(), asyncio.Event()
        #: The tasks that changed while their claim was under way. The value: whether the claimed run may have to end.
        self._missed: dict[str, bool] = {}

    @property
    def is_any(self) -> bool:
        """Whether any task is to be read now."""
        return bool(self.suspects or self.holders or self.doubted)

    def suspect(self, task_id: Any) -> None:
        """Read this task soon."""
        # The key is the text of the `_id`, because the `_id` of a malformed document may not be hashable.
        self.suspects[task_id if type(task_id) is str else repr(task_id)] = task_id
        self.wake.set()

    def suspect_all(self, task_ids: Iterable[Any]) -> None:
        """Read these tasks soon, with one batched read."""
        for task_id in task_ids:
            self.suspect(task_id)

    def cannot_take(self, task_id: Any, error: Exception) -> None:
        """Ask for the examination of a task whose document has caused an unexpected error.

        Call this in the `except` block, because it logs the current exception.
        """
        if self.doubt(task_id, error):
            logger.exception("a document that cannot be taken is examined", extra=fields(task=repr(task_id)))

    def doubt(self, task_id: Any, error: Exception | str) -> bool:
        """Ask for the examination of a task's whole document. Return False if the task must not be tried now.

        `error`: the reason of the examination.
        """
        if self._quarantine.is_left_alone(task_id):
            return False
        self.doubted.append((task_id, error))
        self.wake.set()
        return True

    def ask_holder(self, task_id: str) -> None:
        """Ask whether this worker's run of the task may continue. If the task is being claimed, ask after the claim."""
        if task_id in self._ledger.claiming:
            self._missed[task_id] = True
        else:
            self.holders.add(task_id)
            self.wake.set()

    def missed(self, task_id: str) -> None:
        """Note that a hint came while its task was being claimed. The claim may be older than the hint."""
        self._missed.setdefault(task_id, False)

    def landed(self, task_ids: Iterable[str]) -> None:
        """Handle the hints that came while these tasks were being claimed. The claim has ended now."""
        if not self._missed:
            return
        for task_id in task_ids:
            concerns_holder = self._missed.pop(task_id, None)
            if concerns_holder is None:
                continue
            if self._ledger.held_run(task_id) is None:
                self.suspect(task_id)
            elif concerns_holder:
                self.ask_holder(task_id)

    def ask_when_due(self, task_id: str, when: float) -> None:
        """Ask for a read of this task at the time `when` (monotonic seconds)."""
        self.due.put(task_id, when)
        if self.due.next_time() == when:
            self.wake_due.set()


# --- due -------------------------------------------------------------------------------------------------

# Due lookups: a list of the tasks that this worker will read from the database when they become due.
#
# Most of these tasks run on other workers, and finish long before their leases would lapse.


class DueLookups:
    """A bounded list of tasks, ordered by the instant (monotonic seconds) at which each task may be due.

    The entries are hints. If an entry is lost, a scan finds its task.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        #: Whether entries beyond the capacity were dropped. Only a scan finds the tasks of the dropped entries.
        self.was_cut = False
        self._times: dict[str, float] = {}
        self._heap: list[tuple[float, str]] = []

    def __len__(self) -> int:
        return len(self._times)

    def put(self, task_id: str, when: float) -> None:
        """Add an entry: read this task at `when` (monotonic seconds). The entry replaces an earlier one of the task."""
        if self._times.get(task_id) == when:
            return
        self._times[task_id] = when
        heapq.heappush(self._heap, (when, task_id))
        if len(self._heap) > 4 * self.capacity or len(self._times) > self.capacity + self.capacity // 4:
            self._shrink()

    def discard(self, task_id: str) -> None:
        """Remove a task."""
        self._times.pop(task_id, None)

    def next_time(self) -> float | None:
        """Return the instant of the next lookup (monotonic seconds); None: no task is listed."""
        while self._heap and self._times.get(self._heap[0][1]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def take(self, now: float, limit: int) -> list[str]:
        """Remove and return at most `limit` tasks that are due at `now` (monotonic seconds), the longest due first."""
        taken: list[str] = []
        while len(taken) < limit:
            when = self.next_time()
            if when is None or when > now:
                break
            _, task_id = heapq.heappop(self._heap)
            del self._times[task_id]
            taken.append(task_id)
        return taken

    def _shrink(self) -> None:
        """Remove replaced items from the heap. Beyond the capacity, also remove the tasks that become due last."""
        self._heap = sorted((when, task_id) for task_id, when in self._times.items())
        for _, task_id in self._heap[self.capacity :]:
            del self._times[task_id]
            self.was_cut = True
        del self._heap[self.capacity :]
