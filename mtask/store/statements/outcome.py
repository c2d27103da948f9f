"""How a run ends, and what of that is written into it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from mtask.model.status import RunStatus
from mtask.store.statements import expressions as x
from mtask.store.statements import rules


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ends, as the worker asks for it; the server's clock and rules do the rest."""

    task_id: str
    run_id: str
    status: Literal[RunStatus.SUCCESS, RunStatus.FAIL, RunStatus.CANCELED]
    returns: Any = None
    reason: str | None = None
    final: bool = False
    #: Wait before the next try, in ms: None = by the task's options for a FAIL, else none, and it is due as before.
    delay_ms: int | None = None
    jitter: float = 0.0
    #: What the handler told last of its progress, if that is not written yet.
    progress: Mapping[str, Any] | None = None

    def fields(self) -> dict[str, Any]:
        """Return what is merged into the run."""
        if self.status is RunStatus.SUCCESS:
            return {"status": self.status.value, "returns": self.returns}
        merged: dict[str, Any] = {"status": self.status.value, "fail_reason": self.reason}
        if self.final:
            merged["final"] = True
        return merged


def failure_delay(outcomes: Sequence[Outcome], mine: Any, now: x.Expression) -> x.Expression:
    """Return the delay of a FAIL by the task's options; null for a run that is handed back: it keeps its index."""
    # Under a name of its own: inside the twin, $$run is each of the runs that it counts.
    own = {"$let": {"vars": {"workerId": "$$run.worker_id"}, "in": rules.worker_failures("$$workerId", now)}}
    by_scope = {"$cond": [{"$eq": [f"{x.OPTION}.retry_scope", "worker"]}, own, f"{x.STATE}.failed_cnt"]}
    delay = rules.retry_delay_ms({"$add": [by_scope, 1]}, mine([outcome.jitter for outcome in outcomes]))
    is_fail = mine([outcome.status is RunStatus.FAIL for outcome in outcomes])
    return {"$cond": [is_fail, delay, None]}


def progress_told(outcomes: Sequence[Outcome], now: x.Expression) -> list[x.Expression]:
    """Return what is merged into `$$run` of what its handler told last, if any of the handlers told anything."""
    told = {outcome.run_id: outcome.progress for outcome in outcomes if outcome.progress is not None}
    return [progress_of(told, now)] if told else []


def progress_of(progress: Mapping[str, Mapping[str, Any]], now: x.Expression) -> x.Expression:
    """Return what is merged into `$$run` of the progress that is told of it."""
    index = {"$indexOfArray": [x.literal(list(progress)), "$$run.run_id"]}
    told = {"$arrayElemAt": [x.literal([dict(value) for value in progress.values()]), "$$index"]}
    # What is there already stays as it is, its time too: its writer may not have heard yet that it was written.
    there, fresh = ({"$mergeObjects": [value, {"time": now}]} for value in ("$$run.progress", told))
    is_known = {"$or": [{"$lt": ["$$index", 0]}, {"$eq": [there, fresh]}]}
    return {"$let": {"vars": {"index": index}, "in": {"$cond": [is_known, {}, {"progress": fresh}]}}}
