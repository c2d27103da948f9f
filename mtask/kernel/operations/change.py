"""Operations on tasks for clients: read, search, count, cancel, run again, change options, remove."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from pymongo import ReturnDocument

from mtask.database import setup
from mtask.errors import InvalidOption, OperationFailed, SchemaMismatch, TaskNotFinished, TaskNotFound
from mtask.kernel.document.options import TaskOption, check_option_names, option_of, with_new_names
from mtask.kernel.document.status import FINAL, FINAL_STATUSES, TaskStatus
from mtask.kernel.driver.indexes import LOOKUP_INDEX, TENANT_INDEX
from mtask.kernel.driver.operation import Call, Operation, command, tasks
from mtask.kernel.statements import expressions as x
from mtask.kernel.statements import filters, rules, views
from mtask.kernel.statements import publish as requests
from mtask.kernel.statements.derive import Pipeline

Document = dict[str, Any]
#: Matches a task that no other task needs, and whose end is told. The removal of any other one takes more steps.
NEEDED_BY_NONE: Mapping[str, Any] = {"flow": None, "owed_since": None, "callback_owed": None}
_RACES = 10
#: The most ids in one query.
_AT_ONCE = 1000
#: The code of MongoDB's error for a hint that names no index, among others.
_BAD_VALUE = 2
_CREATE_TIME = "task_state.create_time"


def get(task_id: str) -> Operation[Document]:
    """Return one task's document; raise TaskNotFound."""
    document: Document | None = yield tasks("find_one", {"_id": task_id})
    if document is None:
        raise TaskNotFound(task_id)
    return document


def get_many(task_ids: Sequence[str], fields: Sequence[str] | None = None) -> Operation[list[Document]]:
    """Return the documents with these ids, in any order. With `fields`, return only these fields of each."""
    found: list[Document] = []
    for start in range(0, len(task_ids), _AT_ONCE):
        wanted = filters.by_ids(task_ids[start : start + _AT_ONCE])
        found += yield tasks("find", wanted, None if fields is None else views.only(fields))
    return found


def get_ended(task_ids: Sequence[str]) -> Operation[list[Document]]:
    """Return the documents of those of these tasks that have a final status, in any order."""
    final = {"task_state.status": {"$in": FINAL}}
    found: list[Document] = []
    for start in range(0, len(task_ids), _AT_ONCE):
        # The hint keeps the server from choosing the index on the status.
        found += yield tasks("find", {**filters.by_ids(task_ids[start : start + _AT_ONCE]), **final}, hint="_id_")
    return found


def created(task_id: str) -> Operation[datetime | None]:
    """Return a task's create_time; raise TaskNotFound. None: the document is malformed and has no create_time."""
    document: Document | None = yield tasks("find_one", {"_id": task_id}, {views.CREATED: f"${_CREATE_TIME}"})
    if document is None:
        raise TaskNotFound(task_id)
    found = document.get(views.CREATED)
    return found if isinstance(found, datetime) else None


def find(
    criteria: Mapping[str, Any],
    limit: int,
    fields: Sequence[str] | None = None,
    after: tuple[datetime, str] | None = None,
) -> Operation[list[Document]]:
    """Return the documents of matching tasks, newest first: at most `limit` of them, or all if `limit` is 0.

    With `fields`, return only these fields of each. `after` is the create_time and the `_id` of the last task before
    these tasks. Tasks of one create_time are sorted by `_id`, the greatest first.
    """
    matched = filters.search(criteria)
    found: list[Document] = []
    for part in [matched] if after is None else filters.after_task(matched, *after):
        if found and len(found) == limit:
            break
        call = tasks(
            "find",
            part,
            None if fields is None else views.only(fields),
            sort=[(_CREATE_TIME, -1), ("_id", -1)],
            limit=limit - len(found) if limit else 0,
            **_hint(criteria),
        )
        found += yield from by_index(call)
    return found


def count(criteria: Mapping[str, Any]) -> Operation[int]:
    """Return the number of tasks that match."""
    matched = filters.search(criteria)
    if not matched:
        estimated: int = yield tasks("estimated_document_count")
        return estimated
    counted: int = yield from by_index(tasks("count_documents", matched, **_hint(criteria)))
    return counted


def _hint(criteria: Mapping[str, Any]) -> dict[str, Any]:
    # The status index would serve a search with a status, too, but would lead to the tasks of everybody.
    if criteria.get("lookup") is not None:
        return {"hint": LOOKUP_INDEX}
    return {} if criteria.get("tenant") is None else {"hint": TENANT_INDEX}


def by_index(call: Call) -> Operation[Any]:
    """Send a read, which may have a hint; raise SchemaMismatch if the index of the hint is not there."""
    try:
        return (yield call)
    except OperationFailed as error:
        if not _lacks_index(call, error):
            raise
        index = call.kwargs["hint"]
        listed = yield command("listIndexes", "tasks")
        if index not in {found["name"] for found in listed["cursor"]["firstBatch"]}:
            raise SchemaMismatch("tasks", f"the index {index} is missing", "Run `mtask init`.") from error
    try:
        return (yield call)  # another process has made the index meanwhile
    except OperationFailed as error:
        if not _lacks_index(call, error):
            raise
        raise SchemaMismatch("tasks", f"the index {index} is still being made", "Try again in a while.") from error


def _lacks_index(call: Call, error: OperationFailed) -> bool:
    return error.code == _BAD_VALUE and "hint" in call.kwargs and "hint provided" in str(error)


def cancel(task_id: str, also: filters.Filter | None = None) -> Operation[Document]:
    """Cancel a task, or ask its worker to stop; return the changed task. A finished task stays as it is.

    `also` is a further condition on the task. If it does not hold, raise TaskNotFound.
    """
    return (yield from _change({"_id": task_id, **(also or {})}, requests.cancel(), task_id))


def run_again(
    task_id: str,
    *,
    everything: bool,
    waits: bool = False,
    params: Sequence[requests.NewParams] = (),
    also: filters.Filter | None = None,
) -> Operation[Document]:
    """Open a finished task for a new round; return the task.

    Without `everything`, the task must be FAIL or CANCELED. With `waits`, a step of a flow waits for its dependencies
    again, and whoever settles the change decides on it. `params` holds the new params, or nothing. `also` is
    a further condition on the task. If it does not hold, raise TaskNotFinished.
    """
    allowed = FINAL_STATUSES if everything else FINAL_STATUSES - {TaskStatus.SUCCESS}
    guard = {**filters.final(task_id, allowed), **(also or {})}
    pipeline = requests.run_again(everything=everything, waits=waits)
    for given in params:
        pipeline = [*requests.change_params(given), *pipeline]
    document: Document | None = yield tasks(
        "find_one_and_update", guard, pipeline, return_document=ReturnDocument.AFTER
    )
    if document is None:
        existing = yield from get(task_id)
        raise TaskNotFinished(task_id, existing["task_state"]["status"])
    return document


def update_option(task_id: str, changes: Mapping[str, Any], also: filters.Filter | None = None) -> Operation[Document]:
    """Change options of a task, by their names in code; return the task.

    Raises UnknownOption, InvalidOption or TaskNotFound.

    `also` is a further condition on the task. If it does not hold, raise TaskNotFound.
    """
    changes = with_new_names(changes)
    check_option_names(changes)
    for _ in range(_RACES):
        document = yield from get(task_id)
        current, again = document["task_option"], document.get("again")
        option = _changed(current, changes)
        following = None if again is None else _changed(again["task_option"], changes)
        # If a next round begins or comes meanwhile, its options need the change, too.
        next_options = None if again is None else again["task_option"]
        guard = {"_id": task_id, "task_option": current, "again.task_option": next_options, **(also or {})}
        pipeline = requests.update_option(option, following=following)
        changed: Document | None = yield tasks(
            "find_one_and_update", guard, pipeline, return_document=ReturnDocument.AFTER
        )
        if changed is not None:
            return changed
        if also is not None:
            raise TaskNotFound(task_id)
    raise InvalidOption("task_option", "other clients keep changing it; call again")


def _changed(options: Mapping[str, Any], changes: Mapping[str, Any]) -> TaskOption:
    known = {name: options[name] for name in TaskOption.model_fields if name in options}
    return option_of(known, changes)


def remove(task_id: str) -> Operation[bool]:
    """Remove a task of no flow, unless it is still to publish its next task, or its end is still to be told.

    Return whether it was removed.

    First request the end of a live run, so that the run ends at once.
    """
    asked = {"_id": task_id, "task_state.status": TaskStatus.RUNNING.value}
    yield tasks("update_one", asked, {"$set": {"task_state.cancel_requested": True}})
    result = yield tasks("delete_one", {"_id": task_id, **NEEDED_BY_NONE})
    return bool(result.deleted_count)


def remove_unchanged(task_id: str, also: filters.Filter) -> Operation[bool]:
    """Remove a task as `remove` does, if the condition holds. A live run ends when it next pings."""
    result = yield tasks("delete_one", {"_id": task_id, **NEEDED_BY_NONE, **also})
    return bool(result.deleted_count)


def remove_step(task_id: str) -> Operation[bool]:
    """Remove a task of a flow that has ended; return whether it was removed.

    The task stays while its end must still be told: to other tasks of the flow, or outside of it.
    """
    told: Document = {"owed_since": None, "owed_tasks": {"$in": [None, []]}, "callback_owed": None}
    result = yield tasks("delete_one", {"_id": task_id, "task_state.status": {"$in": FINAL}, **told})
    return bool(result.deleted_count)


def statistics(tenant: str | None = None) -> Operation[list[Document]]:
    """Count the tasks by queue, name and status. Each count comes with the earliest next_preempt_time.

    With a `tenant`, count only its tasks. The rows come in no order: malformed documents may hold arrays in two of
    these fields, and the server sorts by no two arrays.
    """
    group = {
        "_id": {"queue": "$queue", "name": "$name", "status": "$task_state.status"},
        "count": {"$sum": 1},
        "oldest_preempt_time": {"$min": "$task_state.next_preempt_time"},
    }
    stages: list[Document] = [{"$group": group}]
    if tenant is None:
        every: list[Document] = yield tasks("rows", stages, allowDiskUse=True)
        return every
    call = tasks("rows", [{"$match": {"tenant": tenant}}, *stages], allowDiskUse=True, hint=TENANT_INDEX)
    found: list[Document] = yield from by_index(call)
    return found


def _change(guard: Mapping[str, Any], pipeline: Pipeline, task_id: str) -> Operation[Document]:
    document: Document | None = yield tasks(
        "find_one_and_update", guard, pipeline, return_document=ReturnDocument.AFTER
    )
    if document is None:
        raise TaskNotFound(task_id)
    return document


# --- retention -------------------------------------------------------------------------------------------

# Removes tasks: either all tasks that match a filter, or all finished tasks of a queue except the newest.
#
# Tasks are removed in batches. For each batch, the ids of the tasks are read first. Then the tasks that still match are
# deleted. So a task stays if it is run again in between. Tasks of flows stay, too, because other tasks may need them.
# So do tasks that are still to publish their next task, and tasks whose end is still to be told.

#: The most tasks that one command removes.
BATCH = 500


def purgeable(criteria: Mapping[str, Any], older_than_ms: int | None) -> filters.Filter:
    """Match the tasks to purge. They match the criteria, have no live run, and are old enough."""
    matched = filters.search(criteria)
    conditions: list[x.Expression] = [{"$eq": [{"$size": rules.live_runs(x.NOW)}, 0]}]
    if older_than_ms is not None:
        ended = {"$ifNull": [f"{x.STATE}.finish_time", f"{x.STATE}.create_time"]}
        conditions.append({"$lte": [ended, {"$subtract": [x.NOW, older_than_ms]}]})
    return {**matched, **NEEDED_BY_NONE, "$expr": {"$and": [{"$isArray": [x.RUNS]}, *conditions]}}


def count_matched(matched: filters.Filter) -> Operation[int]:
    """Return the number of tasks that match."""
    counted: int = yield tasks("count_documents", matched)
    return counted


def remove_batch(matched: filters.Filter, limit: int) -> Operation[tuple[int, bool]]:
    """Remove up to `limit` matching tasks; return their number, and whether more may match."""
    most = min(limit, BATCH)
    found = yield tasks("find", matched, {"_id": 1}, limit=most)
    ids = [document["_id"] for document in found]
    if not ids:
        return 0, False
    result = yield tasks("delete_many", {**matched, "_id": {"$in": ids}})
    return int(result.deleted_count), len(ids) >= most


def prepare_keep() -> Operation[None]:
    """Make the index that finds the newest finished tasks of a queue, if a database of an earlier mtask lacks it."""
    yield from setup.make_finished_index()


def remove_older(
    queue: str, statuses: Sequence[TaskStatus], keep: int, also: Sequence[filters.Filter] = ()
) -> Operation[int]:
    """Remove a batch of a queue's finished tasks, but keep the newest `keep` tasks. Return the number of found tasks.

    `also` holds further guards for the removal.
    """
    assert set(statuses) <= FINAL_STATUSES
    finished = {"queue": queue, "task_state.status": {"$in": [status.value for status in statuses]}, **NEEDED_BY_NONE}
    order = [("task_state.finish_time", -1), ("_id", -1)]
    view = {"_id": 1, "task_state.finish_time": 1}
    has_ended = {**finished, "task_state.finish_time": {"$exists": True}}
    found = yield tasks("find", has_ended, view, sort=order, skip=keep, limit=BATCH)
    times = [when for when in (finish_time_of(document) for document in found) if when is not None]
    if not times:
        return 0
    # A task may have been run again and finished again since the read. Such a task is now one of the newest, so it
    # stays.
    ids = [document["_id"] for document in found]
    guard = {**finished, "_id": {"$in": ids}, "task_state.finish_time": {"$lte": max(times)}}
    yield tasks("delete_many", filters.with_guards(guard, also))
    return len(found)


def finish_time_of(document: Mapping[str, Any]) -> datetime | None:
    """Return the time at which a task finished, or None if a malformed document has no valid time."""
    state = document.get("task_state")
    when = state.get("finish_time") if isinstance(state, Mapping) else None
    return when if isinstance(when, datetime) else None
