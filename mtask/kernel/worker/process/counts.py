"""The meter: counts what this worker does, in memory. `mtask.features.metrics.worker` stores the counts.

The meter is no middleware: transactions end runs without a finish, and executors run their middleware in a child
process. A run costs it a few microseconds, and no round trip.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime

from mtask.kernel.document import rules
from mtask.kernel.document.status import RunStatus
from mtask.kernel.document.task import Run, StoredTask
from mtask.kernel.operations.claim import RunFacts
from mtask.kernel.operations.find_due import Lapse
from mtask.kernel.worker.process.tally import Tally
from mtask.kernel.worker.running.run import HeldRun

#: The name of each status: an enum takes longer to tell it.
_NAMES = {status: status.value for status in RunStatus}


class Meter:
    """The tally of this worker. Only the event loop changes it; any thread may read it."""

    def __init__(self) -> None:
        self.tally = Tally()

    def claimed(self, facts: RunFacts, since: datetime | None) -> None:
        """Count the time for which a task was due before this run claimed it. `since`: see `due_since`."""
        if since is not None:
            self.tally.of(facts.queue, facts.name).wait.observe((facts.claim_time - since).total_seconds())

    def ended(self, run: HeldRun, status: RunStatus) -> None:
        """Count a run whose end is written, and the time that its handler took."""
        counts = self.tally.of(run.queue, run.name)
        name = _NAMES[status]
        counts.runs[name] = counts.runs.get(name, 0) + 1
        if run.took is not None:
            counts.run.observe(run.took)

    def refused(self, queue: object, name: object) -> None:
        """Count a claimed run that could not be started, and was closed with FAIL."""
        counts = self.tally.of(str(queue), str(name)).runs
        counts[RunStatus.FAIL.value] = counts.get(RunStatus.FAIL.value, 0) + 1

    def lapsed(self, lapses: Iterable[Lapse]) -> None:
        """Count lapsed runs that this worker has closed."""
        for lapse in lapses:
            counts = self.tally.of(lapse.queue, lapse.name).runs
            counts[RunStatus.TIMEOUT.value] = counts.get(RunStatus.TIMEOUT.value, 0) + lapse.run_cnt
            self.tally.leases_lapsed += lapse.run_cnt

    def lost(self, claim_cnt: int) -> None:
        """Count claims that did not win their task."""
        if claim_cnt:
            self.tally.claims_lost += claim_cnt
            self.tally.revision += 1

    def fired(self, seconds: float) -> None:
        """Count a firing of a schedule that came this late."""
        self.tally.lateness.observe(seconds)
        self.tally.revision += 1


def due_since(task: StoredTask) -> datetime | None:
    """Return the time since which the task was due when its newest run claimed it; None: the document does not tell.

    A run that ended without a success makes the task due again: at the end of its lease, after its retry delay, or at
    its end. A retry or rerun by hand leaves no time in the document.
    """
    since = rules.due_time(task)
    if len(task.runs) == 1 and not task.task_state.clean_cnt:
        return since
    ends = [end for run in task.runs if not run.past and (end := _due_again(run)) is not None]
    if ends:
        return max(since, *ends)
    former = [run.end_time or run.ping_expire_time for run in task.runs if run.past]
    if task.task_state.clean_cnt and task.task_state.start_time is None:
        return None
    return None if former and since <= max(former) else since


def _due_again(run: Run) -> datetime | None:
    """Return the time at which the task was due again after this run; None: the run is under way, or has succeeded."""
    if run.status is RunStatus.TIMEOUT:
        return run.ping_expire_time
    return run.retry_time or run.fail_time
