"""Publishes the tasks that tell the ends of other tasks, and crosses these ends off.

Each end that is to be told is marked in the update that made the status final. To settle the mark is to publish one
task `mtask/callback` for it, under a key that is made from the task and the number of the end, and then to cross it
off. So a process that dies between the two loses nothing, and the next one publishes nothing twice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime, timedelta
from typing import Any

from pydantic import ValidationError

from mtask.features.callbacks import rules, statements
from mtask.features.callbacks.rules import DELIVERY, DELIVERY_QUEUE, LOOKUP_OF_TASK, TaskIdentity
from mtask.kernel.document.lookup import MAX_LOOKUP_TEXT
from mtask.kernel.document.options import build_option
from mtask.kernel.document.parts import OwedCallback
from mtask.kernel.document.status import TaskStatus
from mtask.kernel.driver.indexes import CALLBACKS_INDEX, STATUS_INDEX
from mtask.kernel.driver.operation import Operation, tasks
from mtask.kernel.operations.relays import Relay
from mtask.kernel.statements import expressions as x
from mtask.kernel.statements import outbox
from mtask.kernel.statements import publish as requests
from mtask.kernel.statements.filters import NEXT
from mtask.logs import SureLogger, fields

Document = dict[str, Any]
logger = SureLogger("mtask.store")
#: The most tasks that one call settles.
BATCH = 500
#: The options of a delivery. After 10 s, 20 s, 40 s ... it is tried again, at last once an hour, for about two days.
_OPTION = build_option(
    {},
    {
        "max_unexpected_retries": 55,
        "unexpected_retry_delay_ms": 10_000,
        "retry_backoff": 2.0,
        "retry_max_delay_ms": 3_600_000,
        "ping_interval_ms": 10_000,
        "worker_timeout_ms": 30_000,
        "run_timeout_ms": 90_000,
        "retain_success_ms": 7 * 86_400_000,
    },
).stored()


def owed_for(age: timedelta, limit: int) -> Operation[list[str]]:
    """Return tasks with ends that have not been told for this time."""
    before = {"$subtract": [x.NOW, age // timedelta(milliseconds=1)]}
    oldest = {"$min": f"${outbox.OWED_FIELD}.time"}
    matched = {**statements.tellable(), "$expr": {"$lte": [oldest, before]}}
    found = yield tasks("find", matched, {"_id": 1}, limit=limit, hint=CALLBACKS_INDEX)
    return [str(document["_id"]) for document in found]


def deliveries(status: TaskStatus, limit: int, *, is_due: bool = False) -> Operation[list[str]]:
    """Return deliveries with this status. With `is_due`, only those that a worker should have taken by now."""
    matched: Document = {"task_state.status": status.value, "name": DELIVERY}
    if is_due:
        matched[NEXT] = {"$exists": True}
        matched["$expr"] = {"$lte": [f"${NEXT}", x.NOW]}
    found = yield tasks("find", matched, {"_id": 1}, limit=limit, hint=STATUS_INDEX)
    return [str(document["_id"]) for document in found]


def is_any() -> Operation[bool]:
    """Whether any task has ends that are still to be told."""
    found = yield tasks("find_one", outbox.owing_ends(), {"_id": 1}, hint=CALLBACKS_INDEX)
    return found is not None


def find(besides: Sequence[Any] = ()) -> Operation[list[Document]]:
    """Return tasks with ends that are still to be told, the oldest first, at most `BATCH`."""
    matched = {**statements.tellable(), **({"_id": {"$nin": list(besides)}} if besides else {})}
    order = [("callback_owed.time", 1)]
    found: list[Document] = yield tasks(
        "find", matched, dict(statements.VIEW), sort=order, limit=BATCH, hint=CALLBACKS_INDEX
    )
    return found


def settle_all(task_ids: Sequence[str]) -> Operation[Sequence[str]]:
    """Publish the tasks that tell the ends of these tasks, and cross the ends off. No other task ends by that."""
    for start in range(0, len(task_ids), BATCH):
        owed = statements.owed_of(task_ids[start : start + BATCH])
        rows = yield tasks("find", owed, dict(statements.VIEW), hint="_id_")
        yield from settle(rows)
    return ()


def settle(rows: Sequence[Document]) -> Operation[None]:
    """Publish the tasks that tell the ends in these rows of `find`, and cross the ends off."""
    made: list[Document] = []
    told: dict[str, tuple[datetime, Sequence[int]]] = {}
    unreadable: list[Document] = []
    for row in rows:
        task, owed = _identity(row), _readable(row["callback_owed"])
        owed_cnt = len(row["callback_owed"]) if isinstance(row["callback_owed"], list) else -1
        if task is not None:
            made += [_delivery(task, one, row["now"]) for one in owed]
        if task is None or not owed or owed_cnt != len(owed):
            unreadable.append(row)
        else:
            told[task.task_id] = task.create_time, [one.number for one in owed]
    if made:
        yield tasks("insert_new", made)
    if told:
        guard = {"_id": {"$in": list(told)}, **outbox.owing_ends()}
        yield tasks("update_many", guard, statements.cross_off(told), hint="_id_")
    for row in unreadable:
        logger.error("an owed callback cannot be read and is dropped", extra=fields(task=str(row["_id"])))
        as_read = statements.as_read(row["_id"], row["callback_owed"])
        yield tasks("update_one", as_read, statements.forget(), hint="_id_")


RELAY = Relay(outbox.OWED_FIELD, settle_all, lambda run, _: "callback" in run.owes)


def _identity(row: Mapping[str, Any]) -> TaskIdentity | None:
    """Return what names the task for good, or None if its document is malformed."""
    state = row.get("task_state")
    created = state.get("create_time") if isinstance(state, Mapping) else None
    task_id, name, key = row["_id"], row.get("name"), row.get("key")
    if not (isinstance(task_id, str) and isinstance(name, str) and isinstance(key, str)):
        return None
    return TaskIdentity(task_id, name, key, created) if isinstance(created, datetime) else None


def _readable(owed: Any) -> list[OwedCallback]:
    """Return the ends that can be told. A malformed document may hold anything in their place."""
    found = []
    for one in owed if isinstance(owed, list) else ():
        with suppress(ValidationError):
            found.append(OwedCallback.model_validate(one))
    return found


def _delivery(task: TaskIdentity, owed: OwedCallback, now: datetime) -> Document:
    """Return the document of the task that tells one end."""
    key = rules.webhook_id(task, owed.number)
    params: Document = {"webhook_id": key, "url": owed.url, "event": rules.event(task, owed)}
    if owed.secret is not None:
        params["secret"] = owed.secret
    fixed: Document = {
        "_id": f"{DELIVERY}:{key}",
        "name": DELIVERY,
        "key": key,
        "queue": DELIVERY_QUEUE,
        "params": params,
        "task_option": _OPTION,
    }
    if len(task.task_id) <= MAX_LOOKUP_TEXT:
        fixed["lookup"] = [{"k": LOOKUP_OF_TASK, "v": task.task_id}]
    return requests.task_document(fixed, None, now)
