"""The results of clients: tasks and workers as models, statistics as rows."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from pydantic import ValidationError

from mtask.errors import InvalidInput, MalformedTask, SchemaMismatch, shown
from mtask.features.encryption.readable import refuse_readable
from mtask.kernel.document.task import Task, WorkerDocument, describe_validation
from mtask.search.partial import FoundTasks

logger = logging.getLogger("mtask.client")
#: The highest limit that MongoDB accepts.
MAX_LIMIT = 2**31 - 1


@dataclass(frozen=True, slots=True)
class StatRow:
    """The number of tasks with the same queue, name and status."""

    queue: str
    name: str
    status: str
    count: int
    #: The earliest time at which one of these tasks is or was due; None for finished tasks.
    oldest_preempt_time: datetime | None
    #: The reason why no worker can take the due tasks, such as a pause. None: a worker can take them.
    stuck: str | None = None
    #: Whether the count is incomplete, because the status has more tasks than were counted.
    is_more: bool = False


def task_of(document: Mapping[str, Any]) -> Task:
    """Return the document as a Task; raise MalformedTask."""
    try:
        task = Task.model_validate(document)
    except ValidationError as error:
        raise MalformedTask(str(document.get("_id")), describe_validation(error)) from None
    if task.sealed is not None or task.again is not None:
        refuse_readable(task)
    return task


def tasks_of(documents: Iterable[Mapping[str, Any]]) -> list[Task]:
    """Return the documents as Tasks. Malformed documents are left out, and the log warns of them."""
    found = []
    for document in documents:
        try:
            found.append(task_of(document))
        except MalformedTask as error:
            logger.warning("malformed task left out: %s", error)
    return found


def tasks_in(result: Any) -> list[Task]:
    """Return the tasks in the result of an operation."""
    several: Iterable[Any]
    if isinstance(result, list):
        several = result
    elif isinstance(result, FoundTasks):
        several = result.tasks.values()
    else:
        inner = getattr(result, "tasks", None) or getattr(result, "task", None) or result
        several = inner if isinstance(inner, list | tuple) else [inner]
    return [one for one in several if isinstance(one, Task)]


def worker_of(document: Mapping[str, Any]) -> WorkerDocument:
    """Return the document as a worker; raise SchemaMismatch."""
    try:
        return WorkerDocument.model_validate(document)
    except ValidationError as error:
        reason = f"the document of worker {shown(document.get('_id'))} is malformed: {describe_validation(error)}"
        remedy = "Remove it: a live worker registers again."
        raise SchemaMismatch("workers", reason, remedy) from None


def workers_of(documents: Iterable[Mapping[str, Any]]) -> list[WorkerDocument]:
    """Return the documents as workers. Malformed documents are left out, and the log warns of them."""
    found = []
    for document in documents:
        try:
            found.append(worker_of(document))
        except SchemaMismatch as error:
            logger.warning("malformed worker left out: %s", error)
    return found


def stats_of(rows: Iterable[Mapping[str, Any]]) -> list[StatRow]:
    """Return the rows of the statistics, sorted, without those of documents that lack a queue, a name or a status.

    Such documents are malformed: no worker serves them, and `mtask doctor` names them.
    """
    found = []
    for row in rows:
        queue, name, status = (row["_id"].get(part) for part in ("queue", "name", "status"))
        if isinstance(queue, str) and isinstance(name, str) and isinstance(status, str):
            oldest, is_more = _instant(row["oldest_preempt_time"]), row.get("is_more", False)
            found.append(StatRow(queue, name, status, row["count"], oldest, is_more=is_more))
    return sorted(found, key=lambda row: (row.queue, row.name, row.status))


def _instant(value: Any) -> datetime | None:
    """Return the value if it is a datetime. Return None for another type, which a malformed document may hold."""
    return value if isinstance(value, datetime) else None


def check_limit(limit: int) -> int:
    """Return the limit; raise InvalidInput unless it is 0 (no limit) or more."""
    if isinstance(limit, bool) or not isinstance(limit, int) or not 0 <= limit <= MAX_LIMIT:
        raise InvalidInput(f"limit {shown(limit)}: use a whole number, 0 for no limit.", field="limit")
    return limit
