"""Judges limits: how many runs held a place at once, how many handlers ran, and whether places were left over."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from mtask.kernel.document.status import RunStatus
from tests.faults.checks.asked import TOLERANCE
from tests.faults.checks.change import LOG_LAG
from tests.faults.checks.handlers import Work
from tests.faults.checks.logs import Document, RunLog, TaskLog
from tests.faults.checks.verdict import Verdict

_LAG = LOG_LAG.total_seconds()


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
    """Judges what ran and what is left, when all versions and notes have gone by."""

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
