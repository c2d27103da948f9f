"""What clients hand back: tasks and workers as models, statistics as rows."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from pydantic import ValidationError

from mtask.errors import InvalidInput, MalformedTask
from mtask.model.documents import Task, WorkerDocument, describe_validation
from mtask.model.status import TaskStatus

logger = logging.getLogger("mtask.client")


@dataclass(frozen=True, slots=True)
class StatRow:
    """How many tasks of one queue and name have one status."""

    queue: str
    name: str
    status: str
    count: int
    #: When the longest waiting of them is, or was, due; None for finished ones.
    oldest_preempt_time: datetime | None


def task_of(document: Mapping[str, Any]) -> Task:
    """Return the document as a Task; raise MalformedTask."""
    try:
        return Task.model_validate(document)
    except ValidationError as error:
        raise MalformedTask(str(document.get("_id")), describe_validation(error)) from None


def tasks_of(documents: Iterable[Mapping[str, Any]]) -> list[Task]:
    """Return the documents as Tasks; a malformed one is left out, with a warning in the log."""
    found = []
    for document in documents:
        try:
            found.append(task_of(document))
        except MalformedTask as error:
            logger.warning("malformed task left out: %s", error)
    return found


def workers_of(documents: Iterable[Mapping[str, Any]]) -> list[WorkerDocument]:
    """Return the documents as workers; foreign ones are left out, with a warning in the log."""
    found = []
    for document in documents:
        try:
            found.append(WorkerDocument.model_validate(document))
        except ValidationError as error:
            logger.warning("malformed worker left out: %s: %s", document.get("_id"), describe_validation(error))
    return found


def stats_of(rows: Iterable[Mapping[str, Any]]) -> list[StatRow]:
    """Return the rows of the statistics."""
    return [
        StatRow(
            queue=str(row["_id"].get("queue")),
            name=str(row["_id"].get("name")),
            status=str(row["_id"].get("status")),
            count=row["count"],
            oldest_preempt_time=row["oldest_preempt_time"],
        )
        for row in rows
    ]


def criteria(
    *,
    status: str | Sequence[str] | None,
    name: str | Sequence[str] | None,
    queue: str | Sequence[str] | None,
    key: str | Sequence[str] | None,
    worker_id: str | Sequence[str] | None,
) -> dict[str, Any]:
    """Return the checked criteria of a search; raise InvalidInput."""
    given = {"status": status, "name": name, "queue": queue, "key": key, "worker_id": worker_id}
    for field, wanted in given.items():
        if not isinstance(wanted, str | Iterable | None):
            raise InvalidInput(f"{field} is text, or several in a list, not {type(wanted).__name__}.", field=field)
        several = [wanted] if isinstance(wanted, str) else list(wanted or ())
        for value in several:
            if not isinstance(value, str):
                raise InvalidInput(f"{field} is text, not {type(value).__name__}.", field=field)
            if field == "status" and value not in TaskStatus.__members__:
                raise InvalidInput(f"{value!r} is no status: use {', '.join(TaskStatus.__members__)}.", field="status")
    return {
        field: wanted if wanted is None or isinstance(wanted, str) else [str(value) for value in wanted]
        for field, wanted in given.items()
    }


def check_limit(limit: int) -> int:
    """Return the limit; raise InvalidInput unless it is 0 (no limit) or more."""
    if isinstance(limit, bool) or not isinstance(limit, int) or limit < 0:
        raise InvalidInput(f"limit {limit!r}: use a whole number, 0 for no limit.", field="limit")
    return limit
