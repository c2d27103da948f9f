"""Due looks: tasks to look at when they come due. Most are others' leases, finished long before they would lapse."""

from __future__ import annotations

import heapq


class DueLooks:
    """A bounded list of tasks by the instant (monotonic seconds) from which on a look may find them due.

    It holds hints of which nothing but the time is known; losing one costs a scan, not a task.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        #: Something was dropped: only a scan finds it.
        self.was_cut = False
        self._times: dict[str, float] = {}
        self._heap: list[tuple[float, str]] = []

    def __len__(self) -> int:
        return len(self._times)

    def put(self, task_id: str, when: float) -> None:
        """Look at this task then, and not when it was to be looked at before."""
        if self._times.get(task_id) == when:
            return
        self._times[task_id] = when
        heapq.heappush(self._heap, (when, task_id))
        if len(self._heap) > 4 * self.capacity or len(self._times) > self.capacity + self.capacity // 4:
            self._shrink()

    def discard(self, task_id: str) -> None:
        """Do not look at this task."""
        self._times.pop(task_id, None)

    def next_time(self) -> float | None:
        """Return the instant of the next look, None where there is none."""
        while self._heap and self._times.get(self._heap[0][1]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def take(self, now: float, limit: int) -> list[str]:
        """Remove and return at most `limit` tasks to look at now, the longest due first."""
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
        """Forget what is superseded; beyond the capacity, what comes due last."""
        self._heap = sorted((when, task_id) for task_id, when in self._times.items())
        for _, task_id in self._heap[self.capacity :]:
            del self._times[task_id]
            self.was_cut = True
        del self._heap[self.capacity :]
