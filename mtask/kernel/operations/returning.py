"""Stores what handlers return after their transactions have committed, or says that it is lost."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mtask.kernel.document.task import runs_in
from mtask.kernel.driver.indexes import OWED_INDEX
from mtask.kernel.driver.operation import Operation, tasks
from mtask.kernel.statements import filters, returning

#: The most tasks that one call finds.
BATCH = 500
WORKER_GONE = "the worker died or stopped before its handler had returned"
UNANSWERED = "the handler did not learn that its transaction had committed: the answer was lost"


def store(task_id: str, run_id: str, returns: Any) -> Operation[bool]:
    """Store the value that a handler has returned.

    Return False if it comes too late: it is told to be lost, or the run is gone.
    """
    stored = yield tasks("update_one", returning.returned(task_id, run_id), returning.store(run_id, returns))
    return bool(stored.matched_count)


def lose(task_id: str, run_id: str, reason: str) -> Operation[bool]:
    """Say why the value of a run is not stored, and return True, if the run owes one."""
    lost = yield tasks("update_one", returning.owing(task_id, run_id), returning.lose(run_id, reason))
    return bool(lost.matched_count)


@dataclass(frozen=True, slots=True)
class Owed:
    """Tasks whose handlers owe values, and the workers in which these handlers go on."""

    task_ids: Sequence[str] = ()
    #: The incarnations, and the worker_id of each.
    workers: dict[str, str] = field(default_factory=dict)
    #: The runs that owe values: each with its task and the incarnation of its worker.
    runs: Mapping[str, tuple[str, str]] = field(default_factory=dict)


def owed() -> Operation[Owed]:
    """Return the tasks that owe values, the oldest first, at most `BATCH`."""
    matched = {"owed_since": {"$exists": True}, filters.OWES_VALUE: {"$exists": True}}
    view = {f"task_state.worker_states.{name}": 1 for name in ("worker_id", "run_id", "returns_owed_by")}
    found = yield tasks("find", matched, view, sort=[("owed_since", 1)], limit=BATCH, hint=OWED_INDEX)
    owing = [
        (document["_id"], run)
        for document in found
        for run in runs_in(document)
        if isinstance(run.get("returns_owed_by"), str)
    ]
    return Owed(
        [document["_id"] for document in found if isinstance(document["_id"], str)],
        {run["returns_owed_by"]: str(run.get("worker_id")) for _, run in owing},
        {str(run.get("run_id")): (task_id, run["returns_owed_by"]) for task_id, run in owing},
    )


def lose_of(owed: Owed, incarnations: Iterable[str]) -> Operation[None]:
    """Say that the values are lost that handlers in these workers owed."""
    gone = list(incarnations)
    if gone and owed.task_ids:
        matched = returning.owed(owed.task_ids, gone)
        yield tasks("update_many", matched, returning.lose_all(gone, WORKER_GONE), hint="_id_")


def gone(owed: Owed, signs_of_life: Sequence[Mapping[str, Any]]) -> tuple[set[str], set[str]]:
    """Return the incarnations that have ended, and those that are silent: each of these may be alive.

    After the database was away, all workers are silent until they have sent a heartbeat again. `signs_of_life` are
    those of the workers in `owed`, from `workers.signs_of_life`.
    """
    found = {row["_id"]: row for row in signs_of_life}
    ended: set[str] = set()
    silent: set[str] = set()
    for incarnation, worker_id in owed.workers.items():
        row = found.get(worker_id)
        if row is None:
            silent.add(incarnation)  # a worker whose document was removed registers again
        elif row.get("incarnation") != incarnation or row["is_stopped"]:
            ended.add(incarnation)
        elif not row["is_live"]:
            silent.add(incarnation)
    return ended, silent
