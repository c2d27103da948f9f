"""Values that handlers return after their transactions have committed: the mark that a run still owes one.

The commit of a handler's transaction writes the SUCCESS before the handler has returned. If its value is to follow, the
same write sets the mark `returns_owed_by` in the run, and `owed_since` in the task. So nobody takes the missing value
for a null: readers and dependents wait, and a janitor finds the mark if the worker dies. Whoever stores the value, or
says that it is lost, removes the mark.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mtask.kernel.document.status import RunStatus
from mtask.kernel.statements import expressions as x
from mtask.kernel.statements import outbox
from mtask.kernel.statements.derive import Pipeline
from mtask.kernel.statements.filters import OWES_VALUE, RUNS, Filter, by_ids


def returned(task_id: str, run_id: str) -> Filter:
    """Match the task if this run has succeeded, and nobody has said that its value is lost."""
    run = {"run_id": run_id, "status": RunStatus.SUCCESS.value, "returns_lost": None}
    return {"_id": task_id, RUNS: {"$elemMatch": run}}


def owing(task_id: str, run_id: str) -> Filter:
    """Match the task if this run still owes its value."""
    return {"_id": task_id, RUNS: {"$elemMatch": {"run_id": run_id, "returns_owed_by": {"$exists": True}}}}


def owed(task_ids: Sequence[str], incarnations: Sequence[str]) -> Filter:
    """Match these tasks if handlers in these workers owe values of them."""
    return {**by_ids(task_ids), OWES_VALUE: {"$in": list(incarnations)}}


def store(run_id: str, returns: Any) -> Pipeline:
    """Store the value that the handler of a run has returned."""
    return _settle({"$eq": ["$$run.run_id", x.literal(run_id)]}, {"returns": x.literal(returns)})


def lose(run_id: str, reason: str) -> Pipeline:
    """Say why the value of a run is not stored."""
    return _settle({"$eq": ["$$run.run_id", x.literal(run_id)]}, {"returns_lost": x.literal(reason)})


def lose_all(incarnations: Sequence[str], reason: str) -> Pipeline:
    """Say why the values are not stored that handlers in these workers owed."""
    is_one = {"$in": ["$$run.returns_owed_by", x.literal(list(incarnations))]}
    return _settle(is_one, {"returns_lost": x.literal(reason)})


def _settle(condition: x.Expression, fields: Mapping[str, x.Expression], now: x.Expression = x.NOW) -> Pipeline:
    """Merge the fields into the runs for which the condition holds, and remove their marks.

    A task of no flow that then owes nothing more is done: its retention begins. The others of a flow are told next.
    """
    settled = {"$mergeObjects": [x.without("$$run", "returns_owed_by"), fields]}
    runs = {"$map": {"input": x.RUNS, "as": "run", "in": {"$cond": [condition, settled, "$$run"]}}}
    stays = {"$or": [x.FLOW, "$owed_tasks", {"$ne": [x.OWED_VALUES, []]}]}
    return [
        {"$set": {"task_state.worker_states": runs}},
        {"$set": {"expire_time": {"$cond": [stays, "$expire_time", outbox.retention_alone(now)]}}},
        {"$set": {"owed_since": {"$cond": [stays, x.OWED_SINCE, "$$REMOVE"]}, "quiet_time": now}},
    ]
