"""Slots: bounds the number of handlers that run at once, and starts the claimed runs that wait for a slot."""

from __future__ import annotations

import asyncio
from time import monotonic

from mtask.kernel.worker.process.scope import Scope
from mtask.kernel.worker.running.line import Line
from mtask.kernel.worker.running.pace import PATIENCE, Pace
from mtask.kernel.worker.running.run import EndReason, HeldRun
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
