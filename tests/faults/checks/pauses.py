"""Judges pauses: nothing of what was paused was claimed from when that was told until it was resumed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from tests.faults.checks.change import LOG_LAG
from tests.faults.checks.logs import RunLog, TaskLog
from tests.faults.checks.verdict import Verdict
from tests.faults.history import Fault

_LAG = LOG_LAG.total_seconds()


def paused_names(faults: Iterable[Fault]) -> set[str]:
    """Return the names of tasks that were paused at times."""
    return {fault.target for fault in faults if "pauses" in fault.detail}


def judge_pauses(
    verdict: Verdict, faults: Iterable[Fault], runs: Mapping[str, RunLog], tasks: Mapping[str, TaskLog]
) -> None:
    """Judge all claims by all pauses that were confirmed; one whose call failed may stand, or not."""
    for fault in faults:
        pauses = fault.detail.get("pauses")
        if not isinstance(pauses, list):
            continue
        name = fault.target
        counts = verdict.figures.controls.setdefault(
            f"pauses of {name}", {"confirmed": 0, "unknown": 0, "claims inside": 0, "published inside": 0}
        )
        counts["confirmed"] += len(pauses)
        counts["unknown"] += int(fault.detail.get("unknown", 0))
        for since, until in pauses:
            # A claim's $$NOW may be a little older than the clock that was asked.
            start, end = since + _LAG, until - _LAG
            for run_id, run in runs.items():
                if _is_of(run.task_id, name) and start < run.claim_time.timestamp() < end:
                    counts["claims inside"] += 1
                    told = {"run": run_id, "worker": run.worker_id, "at": run.claim_time.isoformat()}
                    what = "claimed while its queue was paused"
                    verdict.report(
                        "claimed_paused", run.task_id, what, since=f"{since:.3f}", until=f"{until:.3f}", **told
                    )
            counts["published inside"] += sum(
                any(start < life.created < end for life in log.lives)
                for task_id, log in tasks.items()
                if _is_of(task_id, name)
            )


def _is_of(task_id: str, name: str) -> bool:
    return task_id.partition(":")[0] == name
