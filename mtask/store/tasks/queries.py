"""Operations on tasks for clients: read, search, count, cancel, run again, change options, remove."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pymongo import ReturnDocument

from mtask.errors import InvalidOption, TaskNotFinished, TaskNotFound
from mtask.model.options import TaskOption, build_option, check_option_names
from mtask.model.status import FINAL_STATUSES, TaskStatus
from mtask.store.driver.operation import Operation, tasks
from mtask.store.statements import filters, requests
from mtask.store.statements.derive import Pipeline

Document = dict[str, Any]
_RACES = 10


def get(task_id: str) -> Operation[Document]:
    """Return one task's document; raise TaskNotFound."""
    document: Document | None = yield tasks("find_one", {"_id": task_id})
    if document is None:
        raise TaskNotFound(task_id)
    return document


def find(criteria: Mapping[str, Any], limit: int, *, newest_first: bool = True) -> Operation[list[Document]]:
    """Return the documents of matching tasks, ordered by create_time."""
    order = [("task_state.create_time", -1 if newest_first else 1), ("_id", 1)]
    found: list[Document] = yield tasks("find", filters.search(criteria), sort=order, limit=limit)
    return found


def count(criteria: Mapping[str, Any]) -> Operation[int]:
    """Return the number of tasks that match."""
    matched = filters.search(criteria)
    counted: int = yield tasks("count_documents", matched) if matched else tasks("estimated_document_count")
    return counted


def cancel(task_id: str) -> Operation[Document]:
    """Cancel a task, or ask its worker to stop; return the changed task. A finished task stays as it is."""
    return (yield from _change({"_id": task_id}, requests.cancel(), task_id))


def run_again(task_id: str, *, everything: bool) -> Operation[Document]:
    """Open a finished task for a new round; return the task.

    Without `everything`, the task must be FAIL or CANCELED.
    """
    allowed = FINAL_STATUSES if everything else FINAL_STATUSES - {TaskStatus.SUCCESS}
    guard = filters.final(task_id, allowed)
    document: Document | None = yield tasks(
        "find_one_and_update", guard, requests.run_again(everything=everything), return_document=ReturnDocument.AFTER
    )
    if document is None:
        existing = yield from get(task_id)
        raise TaskNotFinished(task_id, existing["task_state"]["status"])
    return document


def update_option(task_id: str, changes: Mapping[str, Any]) -> Operation[Document]:
    """Change options of a task; return the task. Raises UnknownOption, InvalidOption or TaskNotFound."""
    check_option_names(changes)
    for _ in range(_RACES):
        document = yield from get(task_id)
        current = document["task_option"]
        known = {name: current[name] for name in TaskOption.model_fields if name in current}
        option = build_option(known, changes)
        guard = {"_id": task_id, "task_option": current}
        changed: Document | None = yield tasks(
            "find_one_and_update", guard, requests.update_option(option), return_document=ReturnDocument.AFTER
        )
        if changed is not None:
            return changed
    raise InvalidOption("task_option", "other clients keep changing it; call again")


def remove(task_id: str) -> Operation[bool]:
    """Remove a task of no flow; return whether it existed.

    First request the end of a live run, so that the run ends at once.
    """
    asked = {"_id": task_id, "task_state.status": TaskStatus.RUNNING.value}
    yield tasks("update_one", asked, {"$set": {"task_state.cancel_requested": True}})
    result = yield tasks("delete_one", {"_id": task_id, "flow": None})
    return bool(result.deleted_count)


def remove_step(task_id: str) -> Operation[bool]:
    """Remove a task of a flow that has ended; return whether it was removed.

    The task stays while other tasks of the flow must still be told of its end.
    """
    ended = {"task_state.status": {"$in": [status.value for status in FINAL_STATUSES]}}
    result = yield tasks("delete_one", {"_id": task_id, **ended, "owed_since": None, "owed_tasks": {"$in": [None, []]}})
    return bool(result.deleted_count)


def statistics() -> Operation[list[Document]]:
    """Count the tasks by queue, name and status. Each count comes with the earliest next_preempt_time."""
    group = {
        "_id": {"queue": "$queue", "name": "$name", "status": "$task_state.status"},
        "count": {"$sum": 1},
        "oldest_preempt_time": {"$min": "$task_state.next_preempt_time"},
    }
    order = {"_id.queue": 1, "_id.name": 1, "_id.status": 1}
    found: list[Document] = yield tasks("rows", [{"$group": group}, {"$sort": order}], allowDiskUse=True)
    return found


def _change(guard: Mapping[str, Any], pipeline: Pipeline, task_id: str) -> Operation[Document]:
    document: Document | None = yield tasks(
        "find_one_and_update", guard, pipeline, return_document=ReturnDocument.AFTER
    )
    if document is None:
        raise TaskNotFound(task_id)
    return document
