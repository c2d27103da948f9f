"""Judges what holds for queues: their limits, their pauses, and the schedules that publish into them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

from mtask.kernel.document.status import RunStatus
from tests.chaos.history import Fault
from tests.chaos.judge.handlers import Work
from tests.chaos.judge.record.asked import TOLERANCE, Asked
from tests.chaos.judge.record.change import LOG_LAG
from tests.chaos.judge.record.logs import Document, RunLog, TaskLog
from tests.chaos.judge.record.verdict import Verdict

_LAG = LOG_LAG.total_seconds()

# --- limits ---------------------------------------------------------------------------------------------------


class Span(NamedTuple):
    """From when to when a run held its place, or its handler ran, in wall seconds."""

    start: float
    end: float
    task_id: str
    run_id: str


@dataclass(frozen=True, slots=True)
class Limit:
    """What was asked for: so many at once of a name, in its own queue, or of those of one limit_key alone."""

    name: str
    key: str | None
    concurrency: int

    def __str__(self) -> str:
        return f"limit of {self.name}" + (f", each {self.key}" if self.key is not None else "")


class LimitJudge:
    """Judges how many runs held a place at once, how many handlers ran, and what is left in the end."""

    def __init__(
        self, verdict: Verdict, runs: Mapping[str, RunLog], tasks: Mapping[str, TaskLog], works: Mapping[str, Work]
    ) -> None:
        self._verdict = verdict
        self._runs = runs
        self._tasks = tasks
        self._works = works

    def judge(self, limits: Sequence[Limit], drained: float | None) -> None:
        """Judge runs by their limits; after `drained` (wall seconds), if that came, each was filled once more."""
        for limit in limits:
            run_ids = list(self._of(limit))
            leases = [self._lease(run_id) for run_id in run_ids]
            handlers = [span for run_id in run_ids if (span := self._handling(run_id)) is not None]
            self._verdict.figures.controls[str(limit)] = {
                "allowed": limit.concurrency,
                "most held at once": self._most(leases, limit, "held a place"),
                "most handlers at once": self._most(handlers, limit, "handlers ran"),
                "runs": len(run_ids),
            }
            if drained is None:
                continue
            usable = self._most([span for span in leases if span.start > drained], None, "")
            if usable < limit.concurrency:
                what = "places have leaked: fewer than allowed could run at once in the end"
                self._verdict.report("over_limit", str(limit), what, allowed=limit.concurrency, ran=usable)

    def judge_places(self, places: Iterable[Document]) -> None:
        """Judge the places at the end, when nothing runs any more."""
        for place in places:
            for entry in place.get("running") or ():
                what = f"its place in {place.get('_id')} was not given back"
                self._verdict.report("over_limit", entry.get("task_id"), what, claim_by=entry.get("claim_by"))

    def _of(self, limit: Limit) -> Iterator[str]:
        for run_id, run in self._runs.items():
            if run.task_id.partition(":")[0] != limit.name:
                continue
            document = self._tasks[run.task_id].document or {}
            if limit.key is None or document.get("task_option", {}).get("limit_key") == limit.key:
                yield run_id

    def _lease(self, run_id: str) -> Span:
        # Of two instants of the server the later may have been read a little earlier: see LOG_LAG.
        run = self._runs[run_id]
        return Span(run.claim_time.timestamp(), _end(run) - _LAG, run.task_id, run_id)

    def _handling(self, run_id: str) -> Span | None:
        """Return when its handler ran and its lease was valid: a frozen worker's may go on beyond it."""
        run, work = self._runs[run_id], self._works.get(run_id)
        if work is None or work.start is None:
            return None
        end = work.last if work.is_ended else _end(run)
        if run.status is not RunStatus.SUCCESS:
            end = min(end, _end(run) - TOLERANCE)
        return Span(work.start, end, run.task_id, run_id)

    def _most(self, spans: Iterable[Span], limit: Limit | None, what: str) -> int:
        """Return how many there were at once, at most; report each that was one too many."""
        most, others = 0, list[Span]()
        for span in sorted(span for span in spans if span.end > span.start):
            others = [other for other in others if other.end > span.start]
            if limit is not None and len(others) >= limit.concurrency:
                told = ", ".join(other.run_id for other in others)
                count = f"{len(others) + 1} {what} at once, {limit.concurrency} allowed"
                self._verdict.report(
                    "over_limit", span.task_id, count, of=limit, run=span.run_id, others=told, at=f"{span.start:.3f}"
                )
            others.append(span)
            most = max(most, len(others))
        return most


def _end(run: RunLog) -> float:
    """Return until when it held its lease, in wall seconds."""
    has_let_go = run.end_time is not None and run.status is not RunStatus.TIMEOUT
    return (run.end_time if has_let_go and run.end_time else run.ping_expire_time).timestamp()


# --- pauses ---------------------------------------------------------------------------------------------------


def paused_names(faults: Iterable[Fault]) -> set[str]:
    """Return the names of tasks that were paused at times."""
    return {fault.target for fault in faults if "pauses" in fault.detail}


def judge_pauses(
    verdict: Verdict, faults: Sequence[Fault], runs: Mapping[str, RunLog], tasks: Mapping[str, TaskLog]
) -> None:
    """Judge all claims by all pauses that were confirmed; one whose call failed may stand, or not."""
    for name in sorted(paused_names(faults)):
        of_name = [fault.detail for fault in faults if fault.target == name and "pauses" in fault.detail]
        # A claim's $$NOW may be a little older than the clock that was asked.
        pauses = [(since + _LAG, until - _LAG) for detail in of_name for since, until in detail["pauses"]]
        inside = 0
        for run_id, run in runs.items():
            if not _is_of(run.task_id, name):
                continue
            at = run.claim_time.timestamp()
            for since, until in pauses:
                if since < at < until:
                    inside += 1
                    told = {"run": run_id, "worker": run.worker_id, "at": f"{at:.3f}"}
                    paused = f"{since:.3f} to {until:.3f}"
                    verdict.report("claimed_paused", run.task_id, "claimed while it was paused", paused=paused, **told)
        created = [life.created for task_id, log in tasks.items() if _is_of(task_id, name) for life in log.lives]
        verdict.figures.controls[f"pauses of {name}"] = {
            "confirmed": len(pauses),
            "unknown": sum(detail.get("unknown", 0) for detail in of_name),
            "claims inside": inside,
            "published inside": sum(since < at < until for at in created for since, until in pauses),
        }


def _is_of(task_id: str, name: str) -> bool:
    return task_id.partition(":")[0] == name


# --- schedules ------------------------------------------------------------------------------------------------


class FiringJudge:
    """Judges a schedule: each of its nominal times was published once, and nothing else.

    Its catch_up leaves nothing out, however long nobody was there.
    """

    def __init__(self, verdict: Verdict, schedule: Document) -> None:
        self._verdict = verdict
        self.name: str = schedule["name"]
        self._fired: int = schedule["fired"]
        interval = timedelta(seconds=schedule["interval"])
        # What it says of itself is believed only where it says that it has fired on.
        end = _instant(max(schedule["until"] + 0.001, schedule["next"]))
        self._times: dict[str, datetime] = {}
        moment = _instant(schedule["first"])
        while moment < end:
            text = moment.replace(tzinfo=None).isoformat(timespec="milliseconds" if moment.microsecond else "seconds")
            self._times[f"{self.name}:{self.name}/{text}Z"] = moment
            moment += interval

    def ask(self, asked: Asked) -> None:
        """Have its tasks count as asked for: nobody else publishes them."""
        for task_id, moment in self._times.items():
            asked.expect(task_id, moment.timestamp())

    def judge(self, tasks: Mapping[str, TaskLog]) -> None:
        """Judge its tasks, when all versions have gone by."""
        missing = [task_id for task_id in self._times if task_id not in tasks]
        found = [task_id for task_id in tasks if task_id.partition(":")[0] == self.name]
        stray = [task_id for task_id in found if task_id not in self._times]
        twice = [task_id for task_id in found if len(tasks[task_id].lives) > 1]
        for what, task_ids in {
            "a firing was never published": missing,
            "published, and it is none of its times": stray,
            "published twice": twice,
        }.items():
            for task_id in task_ids:
                self._verdict.report("wrong_firings", task_id, what)
        for task_id, moment in self._times.items():
            start = self._start_time(tasks.get(task_id))
            if start is not None and start != moment:
                self._verdict.report("wrong_firings", task_id, "due at another time", start_time=start.isoformat())
        if self._fired != len(self._times):
            what = "it says that it has fired another number of times"
            self._verdict.report("wrong_firings", self.name, what, says=self._fired, expected=len(self._times))
        self._verdict.figures.controls[f"firings of {self.name}"] = {
            "expected": len(self._times),
            "missing": len(missing),
            "twice": len(twice) + max(0, self._fired - len(self._times)),
            "stray": len(stray),
        }

    def _start_time(self, log: TaskLog | None) -> datetime | None:
        state = (log.document or {}).get("task_state") if log is not None else None
        start = state.get("start_time") if isinstance(state, dict) else None
        return start if isinstance(start, datetime) else None


def _instant(seconds: float) -> datetime:
    """Return the instant to the millisecond, as the server has it."""
    return datetime.fromtimestamp(0, UTC) + timedelta(milliseconds=round(seconds * 1000))
