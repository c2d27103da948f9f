"""Slots: bounds the number of handlers that run at once, and starts the claimed runs that wait for a slot."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Container, Iterator
from heapq import heapify, heappop, heappush
from math import exp
from time import monotonic
from typing import Generic, TypeVar

from mtask.kernel.worker.process.state import Scope
from mtask.kernel.worker.running.run import EndReason, HeldRun, Order
from mtask.kernel.worker.running.runner import Runner

#: The least delay of a timer, in seconds, from which a handler counts as having blocked the event loop.
_LATE = 0.05


class Slots:
    """Starts claimed runs as slots become free.

    If handlers are quick, the worker claims more tasks than it has free slots, because slots become free during the
    claim. So the worker may hold more runs than its concurrency for a moment. But the number of handlers that run at
    once never exceeds the concurrency. The waiting runs start in the order of a `Line`, whichever claim has brought
    them. A run that is ended before its handler starts is handed back.
    """

    def __init__(self, scope: Scope, runner: Runner, pace: Pace) -> None:
        self._vitals = scope.vitals
        self._ledger = scope.ledger
        self._signals = scope.signals
        self._runner = runner
        self._pace = pace
        self.running_cnt = 0
        #: The claimed runs that wait for a slot, each with the time at which its claim ended (monotonic seconds).
        self._waiting: Line[tuple[float, HeldRun]] = Line()
        self._impatience: asyncio.TimerHandle | None = None
        self._is_stopping = False

    @property
    def free_cnt(self) -> int:
        """The number of free slots that no claim under way has reserved. It is negative after claiming ahead."""
        return self._vitals.concurrency - len(self._ledger.claiming) - self.running_cnt - len(self._waiting)

    @property
    def all_cnt(self) -> int:
        """The number of runs that this worker may hold: those in its slots, and those that are claimed ahead."""
        return self._vitals.concurrency + self.ahead_cnt

    @property
    def ahead_cnt(self) -> int:
        """The number of tasks to claim beyond the free slots."""
        return self._pace.ahead(self._vitals.concurrency)

    def within_bytes(self, group: int) -> int:
        """Return the size of a group of tasks, made smaller if their params are probably large."""
        return self._pace.within_bytes(group)

    def set_concurrency(self, concurrency: int) -> None:
        """Let at most `concurrency` handlers run at once; 0 pauses the worker. Current runs continue."""
        self._vitals.concurrency = concurrency
        self.start_waiting()
        self._signals.room_made.send()

    def free(self) -> None:
        """Free the slot of a run whose handler has ended."""
        self.running_cnt -= 1
        self._pace.ended()
        if self._waiting:
            self.start_waiting()
        if not self.running_cnt:
            self._pace.rests()
        self._signals.slot_left.send()

    def add(self, run: HeldRun, now: float) -> None:
        """Add a run to the runs that wait for a slot. The caller must call `start_waiting` next.

        `now`: the time from which the run waits (monotonic seconds).
        """
        self._waiting.push(run, (now, run))

    def stop(self) -> None:
        """Hand back the runs that have not started, and all runs that are added later."""
        self._is_stopping = True
        self.start_waiting()

    def close(self) -> None:
        """Cancel the timer."""
        if self._impatience is not None:
            self._impatience.cancel()

    def start_waiting(self) -> None:
        """Start the runs that wait for a slot, as long as slots are free."""
        while self._waiting and (self.running_cnt < self._vitals.concurrency or self._is_stopping):
            _, run = self._waiting.pop()
            if self._is_stopping:
                run.end(EndReason.WORKER_STOP)
            if run.end_reason is not None or not run.is_lease_valid:
                self._runner.hand_back(run)
                continue
            self.running_cnt += 1
            self._runner.start(run)
        if self._waiting and self._impatience is None:
            oldest = min(since for since, _ in self._waiting)
            self._be_patient(max(0.0, oldest + PATIENCE - monotonic()))

    def _be_patient(self, seconds: float) -> None:
        self._impatience = asyncio.get_running_loop().call_later(seconds, self._lose_patience, monotonic() + seconds)

    def _lose_patience(self, due: float) -> None:
        """Hand back runs that have waited too long for a slot: the handlers take longer than the pace expected."""
        self._impatience = None
        now = monotonic()
        if now >= due + _LATE:
            # A handler has blocked the event loop. First the runs that have ended meanwhile must free their slots.
            self._be_patient(_LATE)
            return
        for _, run in self._waiting.take_out(lambda item: item[0] <= now - PATIENCE):
            self._pace.forget()
            self._runner.hand_back(run)
        self.start_waiting()


# --- pace ------------------------------------------------------------------------------------------------

# The pace: estimates how many slots become free during a claim. The worker claims tasks for these slots ahead.

#: The longest time for which a claimed run waits for a slot, in seconds. After this time the run is handed back.
PATIENCE = 0.5
#: The number of tasks to claim ahead, as a multiple of the number of runs that end during a claim. The runs that wait
#: keep the slots busy while claims or scans take long. And the larger the multiple, the sooner the worker is at its
#: capacity.
_SHARE = 8.0
#: The number of tasks claimed ahead is at most the number of runs that end within this time, in seconds.
_MAX_SPAN = 0.25
#: The number of tasks claimed ahead is at most this multiple of the number of runs that have ended lately. A few quick
#: runs do not show that the next ones are quick.
_EVIDENCE = 4
#: The time constant of the moving average of the rate at which runs end, in seconds.
_MEMORY = 0.25
#: The time without claims after which nothing is claimed ahead, in seconds. In the average, a longer time without
#: claims counts as this time. After such a time without runs, the rate is measured anew.
_PAUSE = 1.0
#: The weight of the newest claim in the moving average of the durations of claims.
_CLAIM_SHARE = 0.4
#: The most tasks to claim ahead, as a multiple of the number of slots. A limit is needed: if the process dies, each
#: claimed task waits until its lease lapses.
_MAX_TIMES = 10
#: The most bytes of params in a group, and the most bytes that are claimed ahead, as far as sizes can be foreseen.
_MAX_BYTES = 8 * 1024 * 1024
#: If params are smaller than before, the expected size shrinks by this fraction of the difference.
_SIZE_SHARE = 0.2


class Pace:
    """Measures how many runs end per second and how long claims take.

    If handlers are quick, slots become free while a claim is under way. Tasks that were claimed ahead keep these slots
    busy. With more tasks claimed ahead, more runs end during the next claim. So the number of tasks claimed ahead grows
    until the process is at its capacity. If handlers are slow, hardly any run ends during a claim, and nothing is
    claimed ahead. The time without runs does not count, so the first claims of a burst tell how quick its handlers are.
    """

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._landed_at = clock()
        #: The time at which the last run ended; None: there are runs, as far as this class knows.
        self._rests_since: float | None = self._landed_at
        self._ended_since = 0
        self._ended = self._seconds = self._claim_seconds = 0.0
        self._ahead = 0
        #: The size of a task's params that is expected, in bytes: that of the largest recent groups.
        self._size = 0.0

    def ended(self) -> None:
        """Note that a run has ended."""
        self._ended_since += 1

    def rests(self) -> None:
        """Note that no run is left."""
        self._rests_since = self._clock()

    def claimed(self, seconds: float) -> None:
        """Note that a claim has ended. `seconds`: the duration of the claim."""
        now = self._clock()
        since = now - self._landed_at
        rest = 0.0 if self._rests_since is None else now - self._rests_since
        self._landed_at, self._rests_since = now, None
        if rest >= _PAUSE:
            self.forget()  # the tasks of the next burst may be of another kind
        memory = exp(-min(since, _PAUSE) / _MEMORY)
        self._ended = memory * self._ended + self._ended_since
        self._seconds = memory * self._seconds + min(since - rest, _PAUSE)
        self._ended_since = 0
        share = _CLAIM_SHARE if self._claim_seconds else 1.0
        self._claim_seconds += share * (seconds - self._claim_seconds)
        rate = self._ended / self._seconds if self._seconds > 0 else 0.0
        self._ahead = int(min(rate * min(_SHARE * self._claim_seconds, _MAX_SPAN), _EVIDENCE * self._ended))

    def forget(self) -> None:
        """Reset the averages. Call this when a run that was claimed ahead has waited too long for a slot."""
        self._ended = self._seconds = 0.0
        self._ended_since = self._ahead = 0

    def read(self, count: int, size: int) -> None:
        """Note the number of tasks of a claimed group, and the size of their params in bytes.

        Large params take long to be read, and all of a group wait for them. They also fill the memory.
        """
        if count:
            mean = size / count
            self._size = max(mean, self._size + _SIZE_SHARE * (mean - self._size))

    def within_bytes(self, count: int) -> int:
        """Return this number of tasks, or the lower number, at least 1, that keeps their params within 8 MB."""
        return count if self._size * count <= _MAX_BYTES else max(1, int(_MAX_BYTES / self._size))

    def ahead(self, slots: int) -> int:
        """Return the number of tasks to claim beyond the free slots; 0 if the last claim ended too long ago.

        `slots`: the number of all slots.
        """
        return (
            self.within_bytes(min(self._ahead, _MAX_TIMES * slots)) if self._clock() - self._landed_at < _PAUSE else 0
        )


# --- line ------------------------------------------------------------------------------------------------

# The line: claimed runs that wait for a slot or for an executor, in the order in which they start.

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
