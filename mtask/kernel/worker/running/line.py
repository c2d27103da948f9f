"""The line: claimed runs that wait for a slot or for an executor, in the order in which they start."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from heapq import heapify, heappop, heappush
from typing import Generic, TypeVar

from mtask.kernel.worker.running.run import HeldRun, Order

T = TypeVar("T")


class Line(Generic[T]):
    """Runs that wait, each as what its owner keeps of it. Of equal orders, the run that came first goes first.

    Runs that take turns start in the order in which they came, for their claims have given the tenants their turns. So
    such a run has at best the order of the run before it in its queue.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[Order, int, T]] = []
        self._came_cnt = 0
        #: The last run of each queue with fair turns, while it waits: its order, and its number.
        self._last: dict[str, tuple[Order, int]] = {}

    def __len__(self) -> int:
        return len(self._heap)

    def __iter__(self) -> Iterator[T]:
        """Yield what waits: the one that starts next, then the others in no order."""
        return (item for _, _, item in self._heap)

    def push(self, run: HeldRun, item: T) -> None:
        """Add a run."""
        order = run.order
        self._came_cnt += 1
        if run.takes_turns:
            order = max(order, self._last.get(run.queue, (order,))[0])
            self._last[run.queue] = (order, self._came_cnt)
        heappush(self._heap, (order, self._came_cnt, item))

    def pop(self) -> T:
        """Remove and return the one that starts next."""
        _, number, item = heappop(self._heap)
        if self._last:
            self._forget((number,))
        return item

    def take_out(self, is_out: Callable[[T], bool]) -> list[T]:
        """Remove and return those for which `is_out` is true."""
        out = {number: item for _, number, item in self._heap if is_out(item)}
        if out:
            self._heap = [entry for entry in self._heap if entry[1] not in out]
            heapify(self._heap)
            self._forget(out)
        return list(out.values())

    def _forget(self, numbers: Container[int]) -> None:
        self._last = {queue: last for queue, last in self._last.items() if last[1] not in numbers}
