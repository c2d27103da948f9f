"""The results of clients: tasks and workers as models, statistics as rows."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from pydantic import ValidationError

from mtask.errors import InvalidInput, MalformedTask, SchemaMismatch, shown
from mtask.features.encryption.readable import refuse_readable
from mtask.kernel.document.identity import check_key, check_name, is_text, prefix_of
from mtask.kernel.document.lookup import Lookup, values_by_name
from mtask.kernel.document.status import TaskStatus
from mtask.kernel.document.task import Task, WorkerDocument, describe_validation
from mtask.kernel.driver.bson import is_scalar
from mtask.search.partial import FoundTasks

logger = logging.getLogger("mtask.client")
#: The highest limit that MongoDB accepts.
MAX_LIMIT = 2**31 - 1
#: The most parts of a path in a document.
MAX_PARTS = 100


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
    """Return the rows of the statistics, without those of documents that lack a queue, a name or a status.

    Such documents are malformed: no worker serves them, and `mtask doctor` names them.
    """
    found = []
    for row in rows:
        queue, name, status = (row["_id"].get(part) for part in ("queue", "name", "status"))
        if isinstance(queue, str) and isinstance(name, str) and isinstance(status, str):
            oldest, is_more = _instant(row["oldest_preempt_time"]), row.get("is_more", False)
            found.append(StatRow(queue, name, status, row["count"], oldest, is_more=is_more))
    return found


def _instant(value: Any) -> datetime | None:
    """Return the value if it is a datetime. Return None for another type, which a malformed document may hold."""
    return value if isinstance(value, datetime) else None


def criteria(
    *,
    status: str | Sequence[str] | None,
    name: str | Sequence[str] | None,
    queue: str | Sequence[str] | None,
    key: str | Sequence[str] | None,
    worker_id: str | Sequence[str] | None,
    lookup: Lookup | None = None,
    key_prefix: str | None = None,
    params: Mapping[str, Any] | None = None,
    tenant: str | None = None,
    owner: str | None = None,
) -> dict[str, Any]:
    """Check the criteria of a search and return them; raise InvalidInput, or InvalidKey for what is no key.

    With a `tenant`, the keys are those that the tenant gave. With an `owner`, only its tasks match.
    """
    given = {"status": status, "name": name, "queue": queue, "key": key, "worker_id": worker_id}
    checked: dict[str, Any] = {}
    for field, wanted in given.items():
        if not isinstance(wanted, str | Iterable | None):
            raise InvalidInput(f"{field} is text or a list of texts, not {type(wanted).__name__}.", field=field)
        several = [wanted] if isinstance(wanted, str) else list(wanted or ())
        for value in several:
            if not isinstance(value, str):
                raise InvalidInput(f"{field} is text, not {type(value).__name__}.", field=field)
            if not is_text(value):
                raise InvalidInput(f"{field} {shown(value)} holds a lone surrogate, which is not text.", field=field)
            if field == "status" and str(value) not in TaskStatus.__members__:
                known = ", ".join(TaskStatus.__members__)
                raise InvalidInput(f"{shown(value)} is no status: use {known}.", field="status")
            if field == "key":
                check_key(value)
            if field == "name":
                check_name(value)  # else its colon would move the beginning of the key, and so a tenant's border
        texts = [str(value) for value in several]
        checked[field] = None if wanted is None else texts[0] if isinstance(wanted, str) else texts
    if lookup is not None:
        checked["lookup"] = values_by_name(lookup, is_scalar) or None
    if key_prefix is not None:
        checked["key_prefix"] = check_key(key_prefix)
    if tenant is not None:
        checked |= _of_tenant(tenant, checked)
    elif owner is not None:
        checked["tenant"] = owner
        if checked.get("key_prefix") == prefix_of(owner):  # all its keys begin so, and an index leads to its tasks
            del checked["key_prefix"]
    if params is not None:
        checked["params"] = _params(params) or None
    return checked


def _of_tenant(tenant: str, checked: Mapping[str, Any]) -> dict[str, Any]:
    """Return the criteria of a tenant's search: the tenant, and the stored form of its keys."""
    made: dict[str, Any] = {"tenant": tenant}
    keys = checked["key"]
    if keys is not None:
        several = [keys] if isinstance(keys, str) else keys
        made["key"] = [prefix_of(tenant) + key for key in several]
    if checked.get("key_prefix") is not None:
        made["key_prefix"] = prefix_of(tenant) + checked["key_prefix"]
    return made


def _params(params: object) -> dict[str, Any]:
    """Return the wanted values of params, by path; raise InvalidInput."""
    if not isinstance(params, Mapping):
        raise InvalidInput("params is a mapping from paths in the params to values.", field="params")
    for path in params:
        if not isinstance(path, str) or not is_text(path) or "\0" in path:
            raise InvalidInput(f"params: {shown(path)} is no path, such as user.id.", field="params")
        parts = path.split(".")
        if len(parts) > MAX_PARTS or any(not part or part.startswith("$") for part in parts):
            raise InvalidInput(f"params: {shown(path)} is no path, such as user.id.", field="params")
    return dict(params)


def check_limit(limit: int) -> int:
    """Return the limit; raise InvalidInput unless it is 0 (no limit) or more."""
    if isinstance(limit, bool) or not isinstance(limit, int) or not 0 <= limit <= MAX_LIMIT:
        raise InvalidInput(f"limit {shown(limit)}: use a whole number, 0 for no limit.", field="limit")
    return limit
