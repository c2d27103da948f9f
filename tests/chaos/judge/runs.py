"""Judges what a write did to runs: whether claims were due, and whether ends are those of runs that held a lease."""

from __future__ import annotations

from collections import Counter

from mtask.kernel.document import rules
from mtask.kernel.document.rules import KEPT_RUNS
from mtask.kernel.document.status import RunStatus
from mtask.kernel.document.task import Run
from tests.chaos.judge.record.asked import Asked
from tests.chaos.judge.record.change import LOG_LAG, MILLISECOND, Change, dropped_by_bound
from tests.chaos.judge.record.logs import RunLog, TaskLog
from tests.chaos.judge.record.verdict import Kind, Verdict

_NEVER_CHANGES = ("worker_id", "attempt", "claim_time")


class RunJudge:
    """Judges runs, and keeps all that were ever seen by their run_id."""

    def __init__(self, verdict: Verdict, asked: Asked) -> None:
        self._verdict = verdict
        self._asked = asked
        self.runs: dict[str, RunLog] = {}

    def judge(self, change: Change, log: TaskLog) -> None:
        """Judge one write, and follow its runs."""
        if change.appended:
            self._appended(change, log)
        for earlier, run in change.closed:
            self._closed(change, earlier, run)
        for earlier, run in change.moved:
            self._moved(change, earlier, run)
        for earlier, run in change.altered:
            self._altered(change, earlier, run)
        if change.vanished:
            self._vanished(change)
        if any(run.status is RunStatus.SUCCESS for _, run in change.closed):
            self._succeeded(change, log)
        for _, run in (*change.closed, *change.moved, *change.altered):
            if run.run_id in self.runs:
                self.runs[run.run_id].follow(run)

    # --- claims -----------------------------------------------------------------------------------------------

    def _appended(self, change: Change, log: TaskLog) -> None:
        for run in change.appended:
            self.register(change.task_id, run)
            if run.status is not RunStatus.RUNNING:
                self._report("stale_results", change, "a run was never RUNNING", run, status=run.status)
            else:
                self._claimed(change, run, log)
        if len(change.appended) > 1:
            told = ", ".join(run.run_id for run in change.appended)
            self._verdict.report("over_held", change.task_id, "one write claimed twice", runs=told, at=change.at)

    def register(self, task_id: str, run: Run) -> None:
        """Begin to follow a run."""
        known = self.runs.get(run.run_id)
        if known is None:
            self.runs[run.run_id] = RunLog.of(task_id, run)
            return
        what = "a run came back" if known.task_id == task_id else "a run_id belongs to two tasks"
        self._verdict.report(
            "stale_results", task_id, what, run=run.run_id, worker=run.worker_id, first_task=known.task_id
        )

    def _claimed(self, change: Change, run: Run, log: TaskLog) -> None:
        before, now, worker_id = change.before, run.claim_time, run.worker_id
        option = before.task_option
        if change.after.runs[-1].run_id != run.run_id:
            self._report("wrong_fields", change, "a new run does not stand last", run)
        lease = run.ping_expire_time - now
        if lease != option.worker_timeout_ms * MILLISECOND:
            self._report("over_held", change, "a lease of another length than asked for", run, lease=lease)
        if now > change.at + LOG_LAG:
            self._report("over_held", change, "claimed at an instant that had not come", run, now=now)
        if change.was_final:
            self._report("second_success", change, "claimed after its end", run, status=before.status)
            return
        is_over_tried = self._is_over_tried(change, run, log)
        live = rules.live_runs(before, now)
        reasons = {
            "claimed while somebody held it": not rules.has_free_seat(before, now),
            "claimed twice by one worker": any(other.worker_id == worker_id for other in live),
            "claimed by a worker that it does not admit": not rules.is_admitted(before, worker_id),
            "claimed before its start_time": rules.due_time(before) > now,
            "claimed before its retry_time": (rules.retry_time(before, worker_id) or now) > now,
            "claimed although its end was asked for": before.task_state.cancel_requested,
        }
        found = [what for what, is_so in reasons.items() if is_so]
        for what in found:
            held = ", ".join(f"{r.worker_id} until {r.ping_expire_time.isoformat()}" for r in live) or "nobody"
            self._report("over_held", change, what, run, now=now.isoformat(), held_by=held)
        if worker_id in rules.succeeded_workers(before):
            self._report("second_success", change, "claimed by a worker that had succeeded", run)
            return
        if not found and not is_over_tried and not rules.may_take(before, worker_id, now):
            self._report("over_held", change, "claimed against the rules", run, now=now.isoformat())
        self._attempt(change, run)

    def _is_over_tried(self, change: Change, run: Run, log: TaskLog) -> bool:
        before, now = change.before, run.claim_time
        option = before.task_option
        lapsed = [r for r in rules.current_runs(before) if r.is_lapsed(now)]
        if option.retry_scope == "worker":
            tried = (log.tried_by or Counter())[run.worker_id] + sum(r.worker_id == run.worker_id for r in lapsed)
        else:
            tried = log.tried + len(lapsed)
        is_over = option.has_retry_limit and tried > option.max_unexpected_retries
        is_exhausted = rules.is_exhausted(before, now) or (
            option.retry_scope == "worker" and rules.is_worker_exhausted(before, run.worker_id, now)
        )
        if is_over or is_exhausted:
            limit = option.max_unexpected_retries
            self._report("over_tried", change, "claimed beyond its limit", run, tried=tried, limit=limit)
        return is_over or is_exhausted

    def _attempt(self, change: Change, run: Run) -> None:
        own_only = change.before.task_option.retry_scope == "worker"
        attempts = [r.attempt for r in change.before.runs if not own_only or r.worker_id == run.worker_id]
        expected = max(attempts, default=0) + 1
        if run.attempt != expected:
            self._report("over_tried", change, "an attempt out of order", run, expected=expected, attempt=run.attempt)

    # --- ends -------------------------------------------------------------------------------------------------

    def _closed(self, change: Change, earlier: Run, run: Run) -> None:
        end, lease_end = run.end_time, earlier.ping_expire_time
        told = {"lease_end": lease_end.isoformat(), "end": end.isoformat() if end else None}
        self._unchanged(change, earlier, run)
        if end is None or (run.success_time is None) is (run.status is RunStatus.SUCCESS):
            self._report("wrong_fields", change, f"closed as {run.status} without its time", run)
        elif run.status is RunStatus.TIMEOUT:
            if end < lease_end:
                self._report("over_held", change, "timed out before its lease had lapsed", run, **told)
        elif end >= lease_end:
            self._report("stale_results", change, f"{run.status} written after its lease had lapsed", run, **told)
        if run.ping_expire_time != lease_end:
            self._report("stale_results", change, "its lease was moved when it was closed", run, **told)

    def _moved(self, change: Change, earlier: Run, run: Run) -> None:
        self._unchanged(change, earlier, run)
        told = {"from": earlier.ping_expire_time.isoformat(), "to": run.ping_expire_time.isoformat()}
        known = self.runs.get(run.run_id)
        if run.ping_expire_time < earlier.ping_expire_time:
            self._report("wrong_fields", change, "its lease was moved back", run, **told)
            return
        if known is None:
            return
        now = run.ping_expire_time - known.lease
        if now > change.at:
            self._report("over_held", change, "its lease was made longer than asked for", run, **told)
        elif now >= earlier.ping_expire_time:
            self._report("stale_results", change, "its lease was moved after it had lapsed", run, **told)

    def _altered(self, change: Change, earlier: Run, run: Run) -> None:
        if earlier.status is RunStatus.RUNNING:
            self._unchanged(change, earlier, run)
            self._report("stale_results", change, "a running run shows what only an ended one has", run)
        # The newest failed run alone keeps its error, and the same write may begin the next round.
        elif earlier.model_copy(update={"error": run.error, "past": earlier.past or run.past}) != run:
            was = _ending(earlier)
            self._report("stale_results", change, "an ended run was changed", run, was=was, became=_ending(run))

    def _unchanged(self, change: Change, earlier: Run, run: Run) -> None:
        for name in _NEVER_CHANGES:
            if getattr(earlier, name) != getattr(run, name):
                self._report("stale_results", change, f"its {name} was changed", run, was=getattr(earlier, name))

    def _vanished(self, change: Change) -> None:
        gone = {run.run_id for run in change.vanished}
        for run_id in gone & self.runs.keys():
            self.runs[run_id].is_gone = True
        if self._is_bound(change, gone):
            return
        at = change.at.timestamp()
        may_clean = self._asked.may_update(change.task_id, at)
        for run in change.vanished:
            if run.status is RunStatus.RUNNING and not (may_clean and run.is_lapsed(change.at)):
                self._report("stale_results", change, "a running run vanished", run)
            elif not may_clean:
                self._report("stale_results", change, "a run vanished", run, status=run.status)

    def _is_bound(self, change: Change, gone: set[str]) -> bool:
        """Whether these runs are what the bound of the array drops with this write."""
        before = change.before
        if change.appended:
            return gone == dropped_by_bound(before.runs, before, change.nows[0])
        if not change.is_reopened:
            return False
        for kept in (set(), {RunStatus.SUCCESS}):  # a rerun, and a retry, which lets successes stay
            staying = {RunStatus.RUNNING, *kept}
            past = [r for r in before.runs if r.past or r.status not in staying or r.is_lapsed(change.nows[0])]
            if len(before.runs) > KEPT_RUNS and gone == {r.run_id for r in past[: max(0, len(past) - KEPT_RUNS)]}:
                return True
        return False

    def _succeeded(self, change: Change, log: TaskLog) -> None:
        successes = [r for r in rules.current_runs(change.after) if r.status is RunStatus.SUCCESS]
        by_worker = Counter(run.worker_id for run in successes)
        told = ", ".join(f"{r.worker_id} {r.run_id}" for r in successes)
        if not successes:
            return
        if by_worker.most_common(1)[0][1] > 1:
            self._verdict.report("second_success", change.task_id, "two successes of one worker", runs=told)
        elif len(successes) > max(log.most_places, change.after.task_option.concurrent_worker_cnt):
            self._verdict.report("second_success", change.task_id, "more successes than asked for", runs=told)

    def _report(self, kind: Kind, change: Change, what: str, run: Run, **evidence: object) -> None:
        self._verdict.report(
            kind, change.task_id, what, run=run.run_id, worker=run.worker_id, at=change.at.isoformat(), **evidence
        )


def _ending(run: Run) -> str:
    end = run.end_time
    return f"{run.status} at {end.isoformat() if end else None}, lease to {run.ping_expire_time.isoformat()}"
