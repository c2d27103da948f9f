"""Changes many steps in one statement. A step that the server cannot change holds up no other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from mtask.errors import DocumentTooLarge, OperationFailed
from mtask.kernel.document.task import StoredTask, describe_validation
from mtask.kernel.driver.operation import Operation, tasks
from mtask.kernel.operations import claim as claims
from mtask.kernel.statements import filters
from mtask.kernel.statements.derive import Pipeline

Document = dict[str, Any]
#: What the document of a task that cannot be changed names as the writer of its FAIL, and the short reason if the task
#: has no room left in its document.
_WRITER = "flow"
TOO_LARGE = "too large: a change would exceed MongoDB's 16 MB; put less into params"


def change(guard: filters.Filter, update: Pipeline | Mapping[str, Any]) -> Operation[int]:
    """Change the tasks that match the guard, which names their `_id`s; return their number.

    The server stops at a task that it cannot change. Then each task is changed by itself, and such a task is marked
    FAIL, if it is malformed or too large. Else the error is raised, after all other tasks are changed.
    """
    try:
        result = yield tasks("update_many", guard, update, hint="_id_")
    except OperationFailed as error:
        return (yield from _change_apart(guard, update, error))
    return int(result.matched_count)


def _change_apart(
    guard: filters.Filter, update: Pipeline | Mapping[str, Any], error: OperationFailed
) -> Operation[int]:
    named = guard["_id"]
    task_ids = named["$in"] if isinstance(named, dict) and "$in" in named else [named]
    changed_cnt = refused_cnt = 0
    refusal: OperationFailed | None = None
    for task_id in task_ids:
        try:
            result = yield tasks("update_one", {**guard, "_id": task_id}, update, hint="_id_")
            changed_cnt += int(result.matched_count)
        except OperationFailed as refused:
            refused_cnt += 1
            if not (yield from _mark_unchangeable(task_id, refused)):
                refusal = refused
    if refusal is not None:
        raise refusal
    return changed_cnt + refused_cnt


def _mark_unchangeable(task_id: str, refused: OperationFailed) -> Operation[bool]:
    """Mark a task FAIL that the server cannot change, if it is malformed or too large; return whether it is marked."""
    document = yield tasks("find_one", {"_id": task_id})
    if document is None:
        return True  # it was removed
    reason = TOO_LARGE
    if not isinstance(refused, DocumentTooLarge):
        try:
            StoredTask.model_validate(document)
        except ValidationError as wrong:
            reason = describe_validation(wrong)
        else:
            return False
    try:
        return (yield from claims.quarantine(task_id, _WRITER, reason))
    except OperationFailed:
        return False
