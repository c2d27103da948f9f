"""The timeline of a task: its waits and its runs as bars on one axis of time, from 0 to WIDTH."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta

from mtask.kernel.document import rules
from mtask.kernel.document.status import RunStatus
from mtask.kernel.document.task import Run, Task

WIDTH = 1000.0
#: The most runs that a timeline shows, the newest ones, and the narrowest bar.
MOST_RUNS, _NARROWEST = 12, 3.0
_TICKS = 4


@dataclass(frozen=True, slots=True)
class Bar:
    """A bar. `kind`: the class by which the style sheet colours it."""

    x: float
    width: float
    kind: str
    words: str


@dataclass(frozen=True, slots=True)
class Mark:
    """An instant on a lane: the last ping, or the end of the lease."""

    x: float
    kind: str
    words: str


@dataclass(frozen=True, slots=True)
class Lane:
    """One row of the timeline: the task itself, or one run."""

    label: str
    bars: tuple[Bar, ...]
    marks: tuple[Mark, ...] = ()
    kind: str = ""


@dataclass(frozen=True, slots=True)
class Timeline:
    """A timeline. `ticks`: instants at equal distances, the first at 0 and the last at WIDTH."""

    lanes: tuple[Lane, ...]
    ticks: tuple[datetime, ...]
    span: timedelta
    left_out: int  #: the number of older runs that it does not show


def timeline(task: Task, now: datetime) -> Timeline:
    """Return the timeline of a task."""
    state = task.task_state
    runs = task.runs[-MOST_RUNS:]
    begin = state.create_time if len(runs) == len(task.runs) else runs[0].claim_time
    begin = min([begin, *(run.claim_time for run in runs)])
    ends = [run.ping_expire_time for run in runs if run.status is RunStatus.RUNNING]
    end = max(state.finish_time or now, *(run.end_time or run.claim_time for run in runs), *ends, begin)
    if state.finish_time is None and state.next_preempt_time is not None and not ends:
        # A time far ahead would squeeze all that has happened.
        end = max(end, min(state.next_preempt_time, now + max(now - begin, timedelta(seconds=10))))
    span = max(end - begin, timedelta(milliseconds=10))

    def at(moment: datetime) -> float:
        return round(min(1.0, max(0.0, (moment - begin) / span)) * WIDTH, 1)

    lanes = [Lane("task", tuple(_bar(at, *one) for one in _of_task(task, begin, now, runs)), (), "task")]
    lanes += [_of_run(run, at, now, _closed(run, task.runs, now)) for run in runs]
    ticks = tuple(begin + span * index / _TICKS for index in range(_TICKS + 1))
    return Timeline(tuple(lanes), ticks, span, len(task.runs) - len(runs))


def _of_task(
    task: Task, begin: datetime, now: datetime, runs: list[Run]
) -> Iterator[tuple[datetime, datetime, str, str]]:
    """Yield the spans in which the task waited, and those in which it was held."""
    end = task.task_state.finish_time or now
    due = min(max(rules.due_time(task), begin), end)
    at = begin
    for run in sorted(runs, key=lambda run: run.claim_time):
        start, stop = run.claim_time, _closed(run, task.runs, now)
        if start > at:
            yield from _waits(at, start, due)
        if stop > at:
            yield max(start, at), stop, "held", "held by a run"
            at = stop
        due = max(due, run.retry_time or due)
    if at < end:
        yield from _waits(at, end, due)


def _waits(start: datetime, stop: datetime, due: datetime) -> Iterator[tuple[datetime, datetime, str, str]]:
    if start < due:
        yield start, min(due, stop), "early", "not due yet"
    if max(start, due) < stop:
        yield max(start, due), stop, "waits", "waits for a worker"


def _closed(run: Run, runs: list[Run], now: datetime) -> datetime:
    """Return when a run ended. A run whose lease lapsed holds the task until another run preempts it."""
    if run.end_time is not None:
        return run.end_time
    if run.status is RunStatus.RUNNING:
        return now if run.is_live(now) else run.ping_expire_time
    later = [other.claim_time for other in runs if other.claim_time > run.claim_time]
    return min([run.ping_expire_time, *later])


def _of_run(run: Run, at: Callable[[datetime], float], now: datetime, stop: datetime) -> Lane:
    bars = [_bar(at, run.claim_time, stop, run.status.value, _words(run, stop))]
    marks = []
    if run.status is RunStatus.RUNNING and run.is_live(now):
        bars.append(_bar(at, now, run.ping_expire_time, "lease", "the rest of its lease"))
    if run.progress is not None and run.progress.time <= stop:
        marks.append(Mark(at(run.progress.time), "progress", "progress was reported"))
    if run.status is RunStatus.TIMEOUT or run.is_lapsed(now):
        marks.append(Mark(at(min(run.ping_expire_time, stop)), "lapsed", "its lease lapsed"))
    return Lane(f"run {run.attempt}", tuple(bars), tuple(marks), run.status.value)


def _words(run: Run, stop: datetime) -> str:
    return f"{run.status.value} after {(stop - run.claim_time).total_seconds():.1f} s on {run.worker_id}"


def _bar(at: Callable[[datetime], float], start: datetime, stop: datetime, kind: str, words: str) -> Bar:
    x = at(start)
    width = max(_NARROWEST, round(at(stop) - x, 1))
    return Bar(min(x, WIDTH - width), width, kind, words)
