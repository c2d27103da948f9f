"""Judges rolling deploys: a worker that cannot run a task leaves it to others for a while."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

from mtask.features.rollout.worker import HANDED_ON, LEFT_ALONE
from tests.chaos.history import Clock, Document
from tests.chaos.judge.record.asked import TOLERANCE
from tests.chaos.judge.record.logs import RunLog
from tests.chaos.judge.record.verdict import Verdict


def judge_misfits(verdict: Verdict, runs: Iterable[RunLog], ends: Sequence[Document], clock: Clock) -> None:
    """Report each run that a worker began too soon after it had handed the same task on. A new process knows nothing.

    `ends`: the ends of processes, each with the `place` and the time `at` which it was (monotonic seconds).
    """
    claims: Mapping[tuple[str, str], list[float]] = defaultdict(list)
    for run in runs:
        if (run.reason or "").startswith(HANDED_ON):
            claims[run.task_id, run.worker_id].append(run.claim_time.timestamp())
    ended: Mapping[str, list[float]] = defaultdict(list)
    for end in ends:
        ended[str(end.get("place"))].append(clock.epoch + float(end["at"]))
    for (task_id, worker_id), times in claims.items():
        for former, later in pairwise(sorted(times)):
            is_new_process = any(former <= at + TOLERANCE and at <= later for at in ended[worker_id])
            if later - former < LEFT_ALONE - 1 and not is_new_process:
                told = {"worker": worker_id, "after_s": round(later - former, 2)}
                verdict.report("wasted_runs", task_id, "claimed again soon after it was handed on", **told)
    if claims:
        tasks = {task_id for task_id, _ in claims}
        handed_on = sum(map(len, claims.values()))
        verdict.figures.controls["rolling deploys"] = {"tasks handed on": len(tasks), "runs handed on": handed_on}
