"""One write to a task: the document before it and after it, what differs, and which $$NOW it was made at.

Every update that the engine makes evaluates the rules at one instant, its own $$NOW. A version tells it in most cases:
the claim_time of a new run, the success_time or fail_time of a run that the write closed, the finish_time of a task
that it ended. A ping tells it by the lease: ping_expire_time less the length that the claim gave it. Where a write
leaves no instant (cancel of a running task, new options), it closed no lapsed run although it would have closed any;
so it was made before the end of every lease that is still open, and never after `at`. The rules change with time at
the ends of leases only, so two candidates stand for all: `at` itself, and just before the first of these ends.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import cached_property

from mtask.kernel.document.rules import KEPT_RUNS
from mtask.kernel.document.status import RunStatus
from mtask.kernel.document.task import Run, Task
from tests.chaos.judge.record.logs import RunLog
from tests.oracles import rules as oracle

MILLISECOND = timedelta(milliseconds=1)
#: How far the time of a write in the oplog may lie behind the update's own $$NOW. MongoDB dates the oplog by the clock
#: reading that some thread stored last; one that waited for a core between reading and storing puts an older one there.
LOG_LAG = 50 * MILLISECOND
COUNTED = frozenset({RunStatus.FAIL, RunStatus.TIMEOUT})
Pair = tuple[Run, Run]


@dataclass
class Change:
    """What one write did; `known` are the runs seen so far, by run_id."""

    before: Task
    after: Task
    at: datetime
    known: Mapping[str, RunLog]
    appended: list[Run] = field(default_factory=list)
    vanished: list[Run] = field(default_factory=list)
    closed: list[Pair] = field(default_factory=list)
    moved: list[Pair] = field(default_factory=list)
    #: Runs that were closed before and are not the same now, `past` aside; or that run and show more than pings leave:
    #: a lease, and the session of a transaction that is about to begin.
    altered: list[Pair] = field(default_factory=list)
    #: Successes whose values have come after the commit, or are told to be lost.
    valued: list[Pair] = field(default_factory=list)
    is_aged: bool = False

    def __post_init__(self) -> None:
        old = {run.run_id: run for run in self.before.runs}
        for run in self.after.runs:
            earlier = old.pop(run.run_id, None)
            if earlier is None:
                self.appended.append(run)
            elif earlier != run:
                self._compare(earlier, run)
        self.vanished = list(old.values())

    def _compare(self, earlier: Run, run: Run) -> None:
        if run.past and not earlier.past:
            self.is_aged = True
        if earlier.status is RunStatus.RUNNING:
            if run.status is not RunStatus.RUNNING:
                self.closed.append((earlier, run))
            elif run.ping_expire_time != earlier.ping_expire_time:
                self.moved.append((earlier, run))
            elif run.past is earlier.past and run.model_copy(update={"session_id": earlier.session_id}) != earlier:
                self.altered.append((earlier, run))
        elif _is_valued(earlier, run):
            self.valued.append((earlier, run))
        elif run.model_copy(update={"past": earlier.past}) != earlier or (earlier.past and not run.past):
            self.altered.append((earlier, run))

    @property
    def task_id(self) -> str:
        """The task's id."""
        return self.after.id

    @cached_property
    def exact_nows(self) -> set[datetime]:
        """The instants that the write left in the document: of one write, one."""
        nows = {run.claim_time for run in self.appended if run.status is RunStatus.RUNNING}
        nows |= {run.end_time for _, run in self.closed if run.end_time is not None}
        finish_time = self.after.task_state.finish_time
        if finish_time is not None and finish_time != self.before.task_state.finish_time:
            nows.add(finish_time)
        if not nows:
            nows = {
                run.ping_expire_time - self.known[run.run_id].lease for _, run in self.moved if run.run_id in self.known
            }
        return nows

    @cached_property
    def nows(self) -> list[datetime]:
        """The instants at which the write can have been made, as far as the rules tell them apart."""
        if self.exact_nows:
            return sorted(self.exact_nows)
        first_end = min((r.ping_expire_time for r in self.after.runs if r.status is RunStatus.RUNNING), default=None)
        if first_end is not None and first_end <= self.at:
            return [first_end - MILLISECOND]
        return [self.at]

    @property
    def was_final(self) -> bool:
        """Whether the task had ended before."""
        return self.before.status.is_final

    @property
    def is_reopened(self) -> bool:
        """Whether the task had ended and has not any more."""
        return self.was_final and not self.after.status.is_final

    @property
    def begins_next_round(self) -> bool:
        """Whether it began the round of the calls that had come while a run held the task."""
        before, after = self.before, self.after
        return before.again is not None and after.again is None and before.gather != after.gather

    @property
    def is_ping(self) -> bool:
        """Whether only leases were moved."""
        return bool(self.moved) and not (self.appended or self.vanished or self.closed or self.altered)

    @property
    def newly_counted(self) -> int:
        """How many runs it closed that count as failed."""
        return sum(run.status in COUNTED for _, run in self.closed)


def _is_valued(earlier: Run, run: Run) -> bool:
    told = {"past": earlier.past, "returns_owed_by": None, "returns_lost": None}
    if earlier.returns_owed_by is None or run.returns_owed_by is not None or (earlier.past and not run.past):
        return False
    return run.model_copy(update=told) == earlier.model_copy(update=told)


def dropped_by_bound(runs: list[Run], task: Task, now: datetime) -> set[str]:
    """Return the run_ids that a claim at `now` drops since the array is bounded: the twin of the pipeline's."""
    if len(runs) <= KEPT_RUNS:
        return set()
    failed = [r for r in runs if not r.past and (r.status in COUNTED or r.is_lapsed(now))]
    canceled = [r for r in runs if not r.past and r.status is RunStatus.CANCELED]
    past = [r for r in runs if r.past]
    groups = [(failed, oracle.kept_runs(task)), (canceled, KEPT_RUNS), (past, KEPT_RUNS)]
    return {run.run_id for group, keep in groups for run in group[: max(0, len(group) - keep)]}
