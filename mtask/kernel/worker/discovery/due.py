"""Due lookups: a list of the tasks that this worker will read from the database when they become due.

Most of these tasks run on other workers, and finish long before their leases would lapse.
"""

from __future__ import annotations

import heapq


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
