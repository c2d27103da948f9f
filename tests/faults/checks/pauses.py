"""Judges pauses: nothing of what was paused was claimed from when that was told until it was resumed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from tests.faults.checks.change import LOG_LAG
from tests.faults.checks.logs import RunLog, TaskLog
from tests.faults.checks.verdict import Verdict
from tests.faults.history import Fault

_LAG = LOG_LAG.total_seconds()


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
