"""Judges what handlers did by what the documents say of their runs: starts, ends, and effects of transactions."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from mtask.kernel.document.status import RunStatus
from tests.chaos.history import Clock, Fault, Note
from tests.chaos.judge.record.asked import TOLERANCE
from tests.chaos.judge.record.logs import Document, RunLog
from tests.chaos.judge.record.verdict import Distribution, Example, Timeline, Verdict

#: What holds a process up, or its clock back: whatever its target says, no handler can be ended meanwhile. The death of
#: an executor holds nobody up.
_DISTURBING = re.compile(r"kill(?! executor)|freeze|stop|hog|clock|suspend|pause|restart", re.IGNORECASE)

_ENDS = frozenset({"end", "raised", "cancelled"})


@dataclass(slots=True)
class Work:
    """What the handler of one run did, in wall seconds."""

    task_id: str
    worker_id: str
    pid: int
    starts: int = 0
    start: float | None = None
    written: float | None = None
    end: float | None = None
    last: float = 0.0
    is_ended: bool = False  #: in whatever way; else its process died


class HandlerJudge:
    """Judges notes and effects, when all versions have gone by."""

    def __init__(self, verdict: Verdict, clock: Clock, runs: Mapping[str, RunLog], depositing: Collection[str]) -> None:
        self._verdict = verdict
        self._clock = clock
        self._runs = runs
        self._depositing = depositing
        self._work: dict[str, Work] = {}
        #: What handlers were told of children that they added.
        self.added: list[Note] = []
        #: The runs whose handlers returned a next task.
        self.going_on: set[str] = set()
        #: The calls whose params the handler of a run had, where its task gathers calls.
        self.saw: dict[str, list[str]] = {}

    @property
    def work(self) -> Mapping[str, Work]:
        """What handlers did, by run_id."""
        return self._work

    def read(self, notes: Iterable[Note], timeline: Timeline, began: float) -> None:
        """Take in all notes."""
        for note in notes:
            at = self._clock.epoch + note.at
            work = self._work.get(note.run_id)
            if work is None:
                work = self._work[note.run_id] = Work(note.task_id, note.worker_id, note.pid)
            work.last = max(work.last, at)
            if note.event == "start":
                work.starts += 1
                work.start = at if work.start is None else min(work.start, at)
                if note.detail:
                    self.saw[note.run_id] = note.detail
                timeline.add("started", at - began)
            else:
                work.is_ended |= note.event in _ENDS
                if note.event in ("written", "end"):
                    setattr(work, note.event, at)
                elif note.event == "added":
                    self.added.append(note)
                elif note.event == "next":
                    self.going_on.add(note.run_id)

    def judge(self) -> None:
        """Judge starts and ends."""
        for run_id, work in self._work.items():
            self._started(run_id, work)
        for run_id, run in self._runs.items():
            if run.status is RunStatus.SUCCESS:
                self._succeeded(run_id, run)
        self._verdict.figures.handler_starts = sum(work.starts for work in self._work.values())

    def _started(self, run_id: str, work: Work) -> None:
        told = {"run": run_id, "worker": work.worker_id, "pid": work.pid}
        run = self._runs.get(run_id)
        if work.starts > 1:
            self._verdict.report("over_tried", work.task_id, "a handler began twice", starts=work.starts, **told)
        if run is None:
            self._verdict.report("unstarted", work.task_id, "a handler began, and no claim had granted it", **told)
        elif (run.task_id, run.worker_id) != (work.task_id, work.worker_id):
            whose = f"{run.worker_id} for {run.task_id}"
            self._verdict.report("unstarted", work.task_id, "a handler began in another's run", whose=whose, **told)
        elif work.start is not None and work.start < run.claim_time.timestamp() - TOLERANCE:
            early = run.claim_time.timestamp() - work.start
            self._verdict.report("unstarted", work.task_id, "a handler began before its claim", early=early, **told)

    def _succeeded(self, run_id: str, run: RunLog) -> None:
        told = {"run": run_id, "worker": run.worker_id, "success_time": run.end_time}
        work = self._work.get(run_id)
        if work is None or work.start is None:
            self._verdict.report("unstarted", run.task_id, "succeeded, and no handler had begun", **told)
            return
        done = [work.end]
        if self._is_depositing(run.task_id):
            done.append(work.written)  # its transaction has made it SUCCESS: the process may die thereafter
        instants = [instant for instant in done if instant is not None]
        if not instants:
            self._verdict.report("stale_results", run.task_id, "succeeded, and its handler had no end", **told)
        elif run.end_time is not None and min(instants) > run.end_time.timestamp() + TOLERANCE:
            late = min(instants) - run.end_time.timestamp()
            self._verdict.report("stale_results", run.task_id, "succeeded before its handler ended", by=late, **told)

    def _is_depositing(self, task_id: str) -> bool:
        return task_id.partition(":")[0] in self._depositing

    # --- effects ----------------------------------------------------------------------------------------------

    def judge_effects(self, effects: Iterable[Document]) -> None:
        """Compare what transactions wrote with the successes."""
        written: Counter[str] = Counter()
        for effect in effects:
            run_id, task_id, worker_id = (str(effect.get(name)) for name in ("run_id", "task_id", "worker_id"))
            written[run_id] += 1
            run = self._runs.get(run_id)
            told = {"run": run_id, "worker": worker_id}
            if written[run_id] > 1:
                self._verdict.report("wrong_effects", task_id, "an effect was written twice", **told)
            elif run is None:
                self._verdict.report("wrong_effects", task_id, "an effect of a run that never was", **told)
            elif run.status is not RunStatus.SUCCESS or not self._is_depositing(run.task_id):
                self._verdict.report("wrong_effects", task_id, f"an effect of a run that is {run.status}", **told)
            elif (run.task_id, run.worker_id) != (task_id, worker_id):
                whose = f"{run.worker_id} for {run.task_id}"
                self._verdict.report("wrong_effects", task_id, "an effect under another's name", whose=whose, **told)
        for run_id, run in self._runs.items():
            if run.status is RunStatus.SUCCESS and self._is_depositing(run.task_id) and run_id not in written:
                told = {"run": run_id, "worker": run.worker_id}
                self._verdict.report("wrong_effects", run.task_id, "succeeded without its effect", **told)
        self._verdict.figures.effects = written.total()

    # --- handlers beyond their lease --------------------------------------------------------------------------

    def measure_overtime(self, faults: Sequence[Fault]) -> None:
        """Tell how long handlers went on after their lease had lapsed."""
        excused, others = [], []
        disturbances = self._disturbances(faults)
        for run_id, work in self._work.items():
            run = self._runs.get(run_id)
            if run is None or run.status is RunStatus.SUCCESS:
                continue
            # A run that was handed back or failed gave its lease up before that ended.
            is_given_up = run.status in (RunStatus.CANCELED, RunStatus.FAIL) and run.end_time is not None
            lapse = (run.end_time if is_given_up and run.end_time else run.ping_expire_time).timestamp()
            over = work.last - lapse
            if over <= (TOLERANCE if is_given_up else 0.0):
                continue
            since = lapse - run.lease.total_seconds()
            if any(start <= work.last and end >= since for start, end in disturbances.get(work.worker_id, ())):
                excused.append(over)
            else:
                others.append((over, run_id, work))
        others.sort(key=lambda entry: entry[0], reverse=True)
        overtime = self._verdict.figures.overtime
        overtime.excused = Distribution.of(excused)
        overtime.others = Distribution.of(over for over, _, _ in others)
        overtime.worst = [
            Example(work.task_id, f"went on for {over:.3f} s", f"run {run_id}, worker {work.worker_id}, pid {work.pid}")
            for over, run_id, work in others[:10]
        ]

    def _disturbances(self, faults: Sequence[Fault]) -> Mapping[str, list[tuple[float, float]]]:
        """Return by worker when it could not do as it should; a fault that names a task meets whoever ran it."""
        epoch = self._clock.epoch
        by_task: dict[str, set[str]] = defaultdict(set)
        named = {str(fault.detail.get("task_id")) for fault in faults}
        for work in self._work.values():
            if work.task_id in named:
                by_task[work.task_id].add(work.worker_id)
        everyone = {work.worker_id for work in self._work.values()}
        found: dict[str, list[tuple[float, float]]] = defaultdict(list)
        for fault in faults:
            if not _DISTURBING.search(fault.nemesis):
                continue
            met = {worker_id for worker_id in everyone if worker_id in fault.target.split()}
            met |= by_task.get(str(fault.detail.get("task_id")), set())
            for worker_id in met:
                found[worker_id].append((epoch + fault.start, epoch + fault.end))
        return found
