"""Adds tasks to a flow from a handler, and reads the results for which a step has waited.

A child is first written into its parent's document, under the fence of the run, and then published. So a run that has
lost its lease adds nothing. If a process dies in between, whoever settles the parent publishes the child.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from pymongo import ReturnDocument

from mtask.errors import DatabaseTimeout, LeaseLost, RunCanceled, StepExists
from mtask.features.flows import publish, statements
from mtask.features.flows import settle as settling
from mtask.kernel.document.status import TaskStatus
from mtask.kernel.driver.bson import stored_size
from mtask.kernel.driver.indexes import CHILDREN_INDEX
from mtask.kernel.driver.operation import Operation, tasks
from mtask.kernel.operations import claim as claims
from mtask.kernel.statements import filters, views
from mtask.kernel.statements.outbox import OwedTask

Document = dict[str, Any]
#: The most children, and about the most bytes of them, that one statement adds. A parent's document holds them for the
#: moment.
BATCH, BATCH_BYTES = 500, 1024 * 1024
#: The most results that one statement reads.
PAGE = 100
#: How often children are added anew because another change of the parent comes in between.
_ROUNDS = 100


def make_room(key: str, parent_id: str, children: Sequence[OwedTask]) -> Operation[None]:
    """Take room in the flow for those of these children that it does not have; raise InvalidFlow or StepExists."""
    ids = [child.task_id for child in children]
    present: set[str] = set()
    for start in range(0, len(ids), BATCH):
        present |= yield from _present(parent_id, ids[start : start + BATCH])
    if len(present) < len(ids):
        yield from publish.take(key, len(ids) - len(present))


def in_batches(children: Sequence[OwedTask]) -> list[list[OwedTask]]:
    """Return the children in groups, each of which fits into one statement and into the parent's document."""
    batches: list[list[OwedTask]] = [[]]
    size = 0
    for child in children:
        own = stored_size(child.fixed)
        if batches[-1] and (len(batches[-1]) >= BATCH or size + own > BATCH_BYTES):
            batches.append([])
            size = 0
        batches[-1].append(child)
        size += own
    return batches


def add(
    parent_id: str, run_id: str, children: Sequence[OwedTask], is_lease_valid: Callable[[], bool]
) -> Operation[list[str]]:
    """Add these children to the parent's flow; return the ids of those that did not exist.

    Children that the same parent has added before stay as they are. Raises StepExists, LeaseLost or RunCanceled.
    """
    ids = [child.task_id for child in children]
    present = yield from _present(parent_id, ids)
    missing = [child for child in children if child.task_id not in present]
    if not missing:
        return []
    added = [child.task_id for child in missing]
    documents = yield from _append(parent_id, run_id, missing)
    if not is_lease_valid():
        raise LeaseLost(parent_id, run_id)  # whoever settles the parent publishes the children
    existing = yield tasks("insert_new", documents["owed_tasks"])
    yield tasks("update_one", {"_id": parent_id}, statements.added(added, documents["owed_since"]))
    if existing:
        yield from _present(parent_id, added)  # raises StepExists: another task was added under the same id
    return added


def _append(parent_id: str, run_id: str, children: Sequence[OwedTask]) -> Operation[Document]:
    """Let the parent owe these children; return the part of its document that holds them."""
    ids = {child.task_id for child in children}
    guard, view = statements.may_add(parent_id, run_id), {"owed_tasks": 1, "owed_since": 1}
    for _ in range(_ROUNDS):
        changed = yield tasks(
            "find_one_and_update",
            guard,
            statements.add(children),
            view,
            return_document=ReturnDocument.AFTER,
            hint="_id_",
        )
        if changed is not None:
            documents = [document for document in changed["owed_tasks"] if document["_id"] in ids]
            return {"owed_tasks": documents, "owed_since": changed["owed_since"]}
        yield from _explain(parent_id, run_id)
        yield from settling.settle_all([parent_id])
    raise DatabaseTimeout(f"{parent_id} is changed all the time")


def _explain(parent_id: str, run_id: str) -> Operation[None]:
    """Raise LeaseLost or RunCanceled if the run may add no children. Else a change of its task is to be settled."""
    held = yield tasks("find_one", filters.held_runs([parent_id], [run_id]), {"task_state.cancel_requested": 1})
    if held is None:
        raise LeaseLost(parent_id, run_id)
    if held["task_state"]["cancel_requested"]:
        raise RunCanceled(parent_id, run_id)


def _present(parent_id: str, ids: Sequence[str]) -> Operation[set[str]]:
    """Return those of the ids under which the parent has a child; raise StepExists if another task has one of them."""
    found = yield tasks("find", filters.by_ids(ids), {"flow.ancestors": 1}, hint=claims.BY_ID)
    for document in found:
        if document.get("flow", {}).get("ancestors", [])[-1:] != [parent_id]:
            raise StepExists(document["_id"])
    return {document["_id"] for document in found}


#: The queues that a task is and was in. An encrypted result has the data key of one of them, or that of the tenant.
_QUEUES = {"$concatArrays": [["$queue"], {"$ifNull": ["$task_state.former_queues", []]}]}

#: What tells of a result whose it is, and how it is encrypted.
_VIEW = {"step": "$flow.step", "queues": _QUEUES, "sealed": "$sealed"}


# --- results --------------------------------------------------------------------------------------------------


def descendants(task_ids: Sequence[str]) -> Operation[list[str]]:
    """Return the descendants of these tasks that have succeeded."""
    matched = {"flow.ancestors": {"$in": list(task_ids)}, "task_state.status": TaskStatus.SUCCESS.value}
    found = yield tasks("find", matched, {"_id": 1}, hint=CHILDREN_INDEX)
    return sorted(document["_id"] for document in found)


def results(task_ids: Sequence[str]) -> Operation[list[Document]]:
    """Return the results of those of these tasks that have succeeded, in this order.

    A row holds `_id`, `step`, `queues` and `returns`, `lost` (why) if the value is lost, and `sealed` where encrypted.
    """
    view = {**_VIEW, "returns": views.returned(), "lost": views.lost()}
    matched = {**filters.by_ids(task_ids), "task_state.status": TaskStatus.SUCCESS.value}
    found = yield tasks("find", matched, view, hint=claims.BY_ID)
    rows = {row["_id"]: row for row in found}
    return [rows[task_id] for task_id in task_ids if task_id in rows]


def result_of_run(task_id: str, run_id: str) -> Operation[list[Document]]:
    """Return the result of a run that has succeeded, also of a former round: one row as of `results`, or none."""
    matched = {"_id": task_id, "task_state.worker_states": {"$elemMatch": {"run_id": run_id, "status": "SUCCESS"}}}
    view = {**_VIEW, "returns": views.returned_by(run_id), "lost": views.lost_by(run_id)}
    found: list[Document] = yield tasks("find", matched, view, hint=claims.BY_ID)
    return found


def parents(task_ids: Sequence[str]) -> Operation[list[str]]:
    """Return those of these tasks that have children."""
    found = yield tasks("find", {**filters.by_ids(task_ids), "flow.has_children": True}, {"_id": 1}, hint=claims.BY_ID)
    return [document["_id"] for document in found]
