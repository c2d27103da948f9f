"""Slots: how many handlers may run at once, and the claimed runs that wait for one."""

from __future__ import annotations

import asyncio
from collections import deque
from time import monotonic

from mtask.worker.claiming.pace import PATIENCE, Pace
from mtask.worker.running.runner import Runner
from mtask.worker.state.held_run import EndReason, HeldRun
from mtask.worker.state.scope import Scope

#: A timer that comes later than this, in seconds, says that something blocked the loop.
_LATE = 0.05


class Slots:
    """Starts claimed runs as slots become free.

    Where handlers are quick, more is claimed than there are free slots: those will be free by the time the claim has
    landed. So the worker may hold more leases than its concurrency for an instant; handlers never overlap beyond it. A
    run that waits for a slot is started in the order of the claims, and not at all once it is to be ended.
    """

    def __init__(self, scope: Scope, runner: Runner, pace: Pace) -> None:
        self._vitals = scope.vitals
        self._ledger = scope.ledger
        self._signals = scope.signals
        self._runner = runner
        self._pace = pace
        self.running_cnt = 0
        #: Claimed runs whose slots are not free yet; with the time at which their claim landed.
        self._waiting: deque[tuple[float, HeldRun]] = deque()
        self._impatience: asyncio.TimerHandle | None = None
        self._is_stopping = False

    @property
    def free_cnt(self) -> int:
        """How many slots are free, and not kept for a claim that is under way; below 0: claimed ahead."""
        return self._vitals.concurrency - len(self._ledger.claiming) - self.running_cnt - len(self._waiting)

    @property
    def ahead_cnt(self) -> int:
        """How many tasks to claim beyond the slots that are free."""
        return self._pace.ahead(self._vitals.concurrency)

    def set_concurrency(self, concurrency: int) -> None:
        """Run this many handlers at once from now on; 0 pauses. What runs goes on."""
        self._vitals.concurrency = concurrency
        self.start_waiting()
        self._signals.room_made.send()

    def free(self) -> None:
        """Take back the slot of a run that has really ended."""
        self.running_cnt -= 1
        self._pace.ended()
        if self._waiting:
            self.start_waiting()
        self._signals.room_made.send()

    def add(self, run: HeldRun, now: float) -> None:
        """Have a run wait for its slot, from a monotonic instant (seconds) on; `start_waiting` is to follow."""
        self._waiting.append((now, run))

    def stop(self) -> None:
        """Hand back what has not begun, now and from now on."""
        self._is_stopping = True
        self.start_waiting()

    def close(self) -> None:
        """End the timer."""
        if self._impatience is not None:
            self._impatience.cancel()

    def start_waiting(self) -> None:
        """Start what waits, as far as slots are free."""
        while self._waiting and (self.running_cnt < self._vitals.concurrency or self._is_stopping):
            _, run = self._waiting.popleft()
            if self._is_stopping:
                run.end(EndReason.WORKER_STOP)
            if run.end_reason is not None or not run.is_lease_valid:
                self._runner.hand_back(run)
                continue
            self.running_cnt += 1
            self._runner.start(run)
        if self._waiting and self._impatience is None:
            self._be_patient(max(0.0, self._waiting[0][0] + PATIENCE - monotonic()))

    def _be_patient(self, seconds: float) -> None:
        self._impatience = asyncio.get_running_loop().call_later(seconds, self._lose_patience, monotonic() + seconds)

    def _lose_patience(self, due: float) -> None:
        """Hand back what has waited long for a slot: some handlers take longer than those before them."""
        self._impatience = None
        now = monotonic()
        if now >= due + _LATE:
            self._be_patient(_LATE)  # a handler blocked the loop: what has ended meanwhile frees its slots first
            return
        while self._waiting and self._waiting[0][0] <= now - PATIENCE:
            self._pace.forget()
            self._runner.hand_back(self._waiting.popleft()[1])
        self.start_waiting()
