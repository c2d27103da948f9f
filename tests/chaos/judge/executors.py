"""Judges executors: one handler at a time in each, and a dead one is a FAIL of its run at once, with the cause."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import attrgetter

from mtask.kernel.document.status import RunStatus
from tests.chaos.history import Clock, Fault
from tests.chaos.judge.handlers import Work
from tests.chaos.judge.record.logs import RunLog
from tests.chaos.judge.record.verdict import Distribution, Verdict

#: The fault whose detail names the executors that it killed.
KILLING = "kill executor"
#: How soon the FAIL must be written if nothing but the executor is disturbed, in seconds. A slow machine needs a while.
#: Nobody waits for leases: those of half the tasks are longer.
AT_ONCE = 5.0
#: How long a worker may not have noticed the death of an idle executor, in seconds.
_UNNOTICED = 1.0
#: How long a worker may be busy with what a fault has left, in seconds.
_AFTERMATH = 5.0
#: What the reason of a FAIL begins with, where an executor died, and where none could start.
_DIED, _NO_START = "executor ", "executor could not start"


@dataclass(frozen=True, slots=True)
class Kill:
    """An executor that a nemesis killed, in wall seconds."""

    pid: int
    signal: str
    at: float
    #: The worker whose executor it was.
    worker_id: str


@dataclass(frozen=True, slots=True)
class Life:
    """The life of a worker process, in monotonic seconds. Another process may have its pid before or after."""

    pid: int
    began: float
    ended: float


class ExecutorJudge:
    """Judges the handlers that run in executors, when all notes have been read."""

    def __init__(
        self,
        verdict: Verdict,
        clock: Clock,
        runs: Mapping[str, RunLog],
        work: Mapping[str, Work],
        faults: Sequence[Fault],
        isolated: Collection[str],
    ) -> None:
        """`isolated` names the handlers that run in executors."""
        self._verdict = verdict
        self._runs = runs
        self._faults = faults
        self._epoch = clock.epoch
        self._work = {run_id: done for run_id, done in work.items() if done.task_id.partition(":")[0] in isolated}
        self._ran_by: dict[str, set[str]] = defaultdict(set)
        for done in work.values():
            self._ran_by[done.task_id].add(done.worker_id)
        self._kills = sorted(self._found(clock), key=attrgetter("at"))

    def _found(self, clock: Clock) -> Iterator[Kill]:
        for fault in self._faults:
            if fault.nemesis == KILLING:
                for killed in fault.detail.get("killed", ()):
                    yield Kill(killed["pid"], killed["signal"], clock.epoch + killed["at"], fault.target)

    def judge(self, workers: Sequence[Life], asked: Collection[str], processes_left: int) -> None:
        """Judge it all. `workers`: the lives of worker processes; `asked`: tasks that somebody changed or canceled."""
        figures = self._verdict.figures.executors
        figures["handlers"] = len(self._work)
        figures["killed"] = len(self._kills)
        for run_id, work in self._work.items():
            if self._is_of_worker(work, workers):
                self._report(work, "an isolated handler began in its worker's process", run_id)
        self._one_at_a_time()
        self._deaths(asked)
        self._unexplained()
        if processes_left:
            what = "processes of workers were left when these had ended"
            self._verdict.report("wrong_executors", "-", what, count=processes_left)

    def _is_of_worker(self, work: Work, workers: Sequence[Life]) -> bool:
        """Whether the process that began with the handler was that of a worker."""
        if work.start is None:
            return False
        at = work.start - self._epoch
        return any(life.pid == work.pid and life.began <= at <= life.ended for life in workers)

    # --- one at a time ----------------------------------------------------------------------------------------

    def _one_at_a_time(self) -> None:
        by_pid: dict[int, list[tuple[float, str, Work]]] = defaultdict(list)
        for run_id, work in self._work.items():
            if work.start is not None:
                by_pid[work.pid].append((work.start, run_id, work))
        for entries in by_pid.values():
            entries.sort(key=lambda entry: entry[0])
            for (_, _, earlier), (start, run_id, work) in pairwise(entries):
                # One that did not end has died with its process, whose number another process may have got since.
                if earlier.is_ended and earlier.last > start:
                    self._report(work, "a handler began in an executor amid another", run_id, other=earlier.task_id)

    # --- deaths -----------------------------------------------------------------------------------------------

    def _deaths(self, asked: Collection[str]) -> None:
        counts, told = self._verdict.figures.executors, []
        counts |= {"runs in them": 0, "told as FAIL": 0, "committed before": 0, "excused": 0}
        for kill, run_id, work in self._victims():
            run = self._runs.get(run_id)
            if run is None:
                continue  # another rule tells of it
            counts["runs in them"] += 1
            end = (run.end_time or run.ping_expire_time).timestamp()
            is_disturbed = self._is_disturbed(work.worker_id, kill.at, max(end, kill.at + AT_ONCE))
            is_told = run.status is RunStatus.FAIL and (run.reason or "").startswith(_DIED)
            if is_told:
                counts["told as FAIL"] += 1
                told.append(end - kill.at)
            if run.status is RunStatus.SUCCESS:
                counts["committed before"] += 1  # else another rule tells of a success whose handler had no end
            elif is_told and kill.signal not in (run.reason or "") and not is_disturbed:
                self._report(work, "the death of an executor has another cause", run_id, killed_by=kill.signal)
            elif is_told and end - kill.at > AT_ONCE and not is_disturbed:
                self._report(work, "the death of an executor was told late", run_id, after=end - kill.at)
            elif not is_told and (is_disturbed or work.task_id in asked or run.is_gone):
                counts["excused"] += 1
            elif not is_told:
                what = f"an executor was killed, and its run is {run.status}"
                self._report(work, what, run_id, killed=kill.at, reason=run.reason)
        self._verdict.figures.deaths = Distribution.of(told)

    def _victims(self) -> Iterator[tuple[Kill, str, Work]]:
        """Yield each kill with the run that was in the executor."""
        for kill in self._kills:
            amid = [
                (work.start, run_id, work)
                for run_id, work in self._work.items()
                if work.pid == kill.pid and work.start is not None and work.start <= kill.at and not work.is_ended
            ]
            if amid:
                _, run_id, work = max(amid, key=lambda entry: entry[0])
                yield kill, run_id, work

    def _unexplained(self) -> None:
        """Judge the other way round: no executor dies unless somebody killed it."""
        died = [
            (run.end_time, run_id, run)
            for run_id, run in self._runs.items()
            if run.status is RunStatus.FAIL and (run.reason or "").startswith(_DIED) and run.end_time is not None
        ]
        # A kill explains one run. Those whose handlers noted their process come first.
        died.sort(key=lambda entry: (entry[1] not in self._work, entry[0]))
        spare = list(self._kills)
        for end_time, run_id, run in died:
            reason = run.reason or ""
            claimed, end = run.claim_time.timestamp(), end_time.timestamp()
            if self._is_disturbed(run.worker_id, claimed, end):
                continue
            work = self._work.get(run_id)
            if reason.startswith(_NO_START):
                is_explained = self._is_killing(run.worker_id, end)
            else:
                kills = [kill for kill in spare if kill.at <= end and self._may_explain(kill, run, work, claimed)]
                is_explained = bool(kills)
                if kills:
                    spare.remove(kills[0])
            if not is_explained:
                told = {"run": run_id, "worker": run.worker_id, "reason": reason}
                self._verdict.report("wrong_executors", run.task_id, "an executor ended, and nobody killed it", **told)

    @staticmethod
    def _may_explain(kill: Kill, run: RunLog, work: Work | None, claimed: float) -> bool:
        if work is not None:
            return kill.pid == work.pid
        # The executor was killed before the handler could note anything: amid the run, or just before it got the run.
        return kill.worker_id == run.worker_id and kill.signal in (run.reason or "") and kill.at >= claimed - _UNNOTICED

    def _is_killing(self, worker_id: str, at: float) -> bool:
        """Whether a nemesis killed executors of this worker about then."""
        return any(
            fault.nemesis == KILLING
            and worker_id in fault.target.split()
            and self._epoch + fault.start <= at <= self._epoch + fault.end + _AFTERMATH
            for fault in self._faults
        )

    def _is_disturbed(self, worker_id: str, since: float, until: float) -> bool:
        """Whether anything but the death of an executor kept this worker from its work, or from the database."""
        names = {worker_id, f"mtask-worker:{worker_id}"}
        for fault in self._faults:
            if self._epoch + fault.start > until or self._epoch + fault.end + _AFTERMATH < since:
                continue
            is_hit = not names.isdisjoint(fault.target.split()) and fault.nemesis != KILLING
            is_with_database = fault.is_database_away or fault.nemesis.startswith("one member")
            if is_hit or is_with_database or worker_id in self._ran_by.get(str(fault.detail.get("task_id")), ()):
                return True
        return False

    def _report(self, work: Work, what: str, run_id: str, **evidence: object) -> None:
        told = {"run": run_id, "worker": work.worker_id, "pid": work.pid, **evidence}
        self._verdict.report("wrong_executors", work.task_id, what, **told)
