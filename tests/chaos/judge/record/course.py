"""How the run went: what happened in each second, and how long tasks that were free waited for somebody."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Sequence
from dataclasses import replace
from datetime import datetime

from mtask.kernel.document import rules
from mtask.kernel.document.status import RunStatus
from mtask.kernel.document.task import Run, Task
from tests.chaos.history import Clock, Fault
from tests.chaos.judge.record.change import COUNTED, Change
from tests.chaos.judge.record.logs import TaskLog
from tests.chaos.judge.record.verdict import Distribution, Figures, Rescue

#: How long after the database was away a wait is still put down to that, in seconds.
AFTERMATH = 2.0


class Course:
    """Gathers figures while versions go by. Instants inside are seconds since the run began."""

    def __init__(
        self, figures: Figures, clock: Clock, started: float, faults: Sequence[Fault], apart: Collection[str] = ()
    ) -> None:
        self._figures = figures
        #: Names of tasks that wait for more than a worker: for a place, or for the end of a pause.
        self._apart = apart
        self._began = clock.epoch + started
        self._faults = [replace(fault, start=fault.start - started, end=fault.end - started) for fault in faults]
        self._started = started
        self._claims: list[float] = []
        self._first_claims: list[float] = []
        self._rescues: list[Rescue] = []

    def second(self, instant: datetime) -> float:
        """Return a server's instant in seconds since the run began."""
        return instant.timestamp() - self._began

    def created(self, task: Task, at: datetime) -> None:
        """Count a new task."""
        self._figures.timeline.add("published", self.second(at))

    def changed(self, change: Change, log: TaskLog) -> None:
        """Count what a write did."""
        timeline = self._figures.timeline
        for earlier, run in change.closed:
            if run.end_time is None:
                continue
            if run.status is RunStatus.SUCCESS:
                timeline.add("succeeded", self.second(run.end_time))
            elif run.status in COUNTED:
                timeline.add("failed", self.second(run.end_time))
            if run.status is RunStatus.TIMEOUT:
                log.lapses.append(earlier.ping_expire_time)
        for run in change.appended:
            if run.status is RunStatus.RUNNING:
                timeline.add("claimed", self.second(run.claim_time))
                self._claimed(change, run, log)
        if change.after.status.is_final or change.after.task_state.cancel_requested:
            log.lapses.clear()

    def _claimed(self, change: Change, run: Run, log: TaskLog) -> None:
        claimed = self.second(run.claim_time)
        self._claims.append(claimed)
        if log.task_id.partition(":")[0] in self._apart:
            return
        due = rules.due_time(change.before)
        if not log.was_claimed:
            log.was_claimed = True
            self._first_claims.append(claimed - self.second(due))
        if not log.lapses:
            return
        lapse = min(log.lapses)
        log.lapses.remove(lapse)
        free = max(lapse, due, rules.retry_time(change.before, run.worker_id) or due)
        option = change.before.task_option
        is_for_named = bool(option.specific_worker_ids)
        self._rescues.append(Rescue(log.task_id, self.second(free), claimed, False, is_for_named))

    def conclude(self) -> None:
        """Fill the figures in."""
        figures = self._figures
        self._claims.sort()
        figures.first_claim = Distribution.of(self._first_claims)
        figures.rescues = [self._explained(rescue) for rescue in sorted(self._rescues, key=lambda r: r.claimed)]
        named = [rescue for rescue in figures.rescues if rescue.is_for_named]
        others = [rescue for rescue in figures.rescues if not rescue.is_for_named]
        away = [rescue for rescue in others if rescue.is_database_away]
        no_worker = [rescue for rescue in others if rescue.is_fleet_away and not rescue.is_database_away]
        figures.rescue_named = Distribution.of(rescue.delay for rescue in named)
        figures.rescue_away = Distribution.of(rescue.delay for rescue in away)
        figures.rescue_no_worker = Distribution.of(rescue.delay for rescue in no_worker)
        figures.rescue_up = Distribution.of(rescue.delay for rescue in others if rescue.could_be_prompt)
        for fault in self._faults:
            figures.faults[fault.nemesis] = figures.faults.get(fault.nemesis, 0) + 1
        self._failovers()
        figures.timeline.level()

    def _explained(self, rescue: Rescue) -> Rescue:
        met = [f for f in self._faults if f.start <= rescue.claimed and f.end + AFTERMATH >= rescue.free]
        # The fleet is back when its workers say so: no aftermath.
        no_worker = [f for f in met if _is_without_workers(f, rescue.free) or _is_without_workers(f, rescue.claimed)]
        told = tuple(f"{f.nemesis} {f.target} {f.start:.1f} to {f.end:.1f} s".replace("  ", " ") for f in met)
        meanwhile = bisect_left(self._claims, rescue.claimed) - bisect_right(self._claims, rescue.free)
        return replace(
            rescue,
            is_database_away=any(f.is_database_away for f in met),
            is_fleet_away=bool(no_worker),
            faults=told,
            claims_meanwhile=max(0, meanwhile),
        )

    def _failovers(self) -> None:
        delays = []
        for fault in self._faults:
            elected_at = fault.detail.get("elected_at")
            if not isinstance(elected_at, int | float):
                continue
            elected = elected_at - self._started
            # Without any worker nobody can claim: it is counted from when the fleet was back.
            fleet_back = max((f.end for f in self._faults if _is_without_workers(f, elected)), default=elected)
            place = bisect_left(self._claims, elected)
            delay = max(0.0, self._claims[place] - fleet_back) if place < len(self._claims) else None
            told = {"nemesis": fault.nemesis, "target": fault.target, "elected": elected, "first_claim_after": delay}
            committing_at = fault.detail.get("committing_at")
            told["committing_after"] = committing_at and committing_at - elected_at
            self._figures.failovers.append(told)
            if delay is not None:
                delays.append(delay)
        self._figures.failover = Distribution.of(delays)


def _is_without_workers(fault: Fault, instant: float) -> bool:
    return bool(fault.detail.get("is_fleet_away")) and fault.start <= instant <= fault.end
