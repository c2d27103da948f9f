"""The engine's reads of tasks: batch queries for due tasks, and the fields that the rules need."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import chain
from typing import Any

from mtask.kernel.document.status import RunStatus, TaskStatus
from mtask.kernel.document.task import runs_in
from mtask.kernel.driver.indexes import DISCOVERY_INDEX, STATUS_INDEX, TURNS_INDEX
from mtask.kernel.driver.operation import Operation, tasks
from mtask.kernel.statements import expressions as x
from mtask.kernel.statements import filters

Document = dict[str, Any]

_RUN_RULES = (
    "run_id",
    "worker_id",
    "attempt",
    "status",
    "claim_time",
    "ping_expire_time",
    "fail_time",
    "retry_time",
    "final",
    "past",
    "misfit_since",
)

#: The fields that the rules need, and the server's time. None of these fields can be large.
RULE_VIEW: Mapping[str, Any] = {
    "name": 1,
    "key": 1,
    "tenant": 1,
    "queue": 1,
    "sealed": 1,
    "version": 1,
    "declared": 1,
    "task_option": 1,
    "task_state.status": 1,
    "task_state.create_time": 1,
    "task_state.start_time": 1,
    "task_state.not_after": 1,
    "task_state.finish_time": 1,
    "task_state.next_preempt_time": 1,
    "task_state.failed_cnt": 1,
    "task_state.cancel_requested": 1,
    "flow.key": 1,
    "flow.step": 1,
    "flow.on_failed": 1,
    "flow.release_time": 1,
    **{f"task_state.worker_states.{field}": 1 for field in _RUN_RULES},
    "schema_version": 1,
    "now": x.NOW,
}

SCAN_VIEW: Mapping[str, Any] = {
    "name": 1,
    "queue": 1,
    "tenant": 1,
    "task_option.priority": 1,
    "task_option.limit_key": 1,
    "task_state.next_preempt_time": 1,
    "task_state.status": 1,
    "task_state.worker_states.status": 1,
    "now": x.NOW,
}
#: The same without the server's time. An expression in a projection costs the server a third of the query's CPU, and
#: the client a quarter of what it takes to read the answer.
_TIMELESS_VIEW: Mapping[str, Any] = {field: wanted for field, wanted in SCAN_VIEW.items() if field != "now"}


#: The most queues of one query of `scan`. The server merges the ranges of an index in the order of the sort only if
#: there are 200 of them at most, and a queue has up to four. Else it reads all waiting tasks of the queues, and sorts
#: them.
_MOST_QUEUES = 40


@dataclass(frozen=True, slots=True)
class Scan:
    """The result of one batch query. Dates in it have no time zone. They are in UTC."""

    documents: list[Document]
    #: The server's time. None: nothing was found, or only due tasks were asked for.
    server_time: datetime | None
    is_complete: bool
    #: Whether some of the found tasks are not due yet.
    has_future: bool


def scan(
    queues: Sequence[str],
    names: Sequence[str],
    worker_id: str,
    horizon_ms: int,
    limit: int,
    also: Sequence[filters.Filter] = (),
    timeout: timedelta | None = None,
    position: filters.Filter | None = None,
) -> Operation[Scan]:
    """Return the tasks that this worker could take within the horizon.

    The highest priority comes first. Among equal priorities, the longest due task comes first.

    `also` holds further guards. If `timeout` is None, the usual limit of an
    operation applies. If `horizon_ms` is 0, all found tasks are due, and the scan does not ask for the server's time.
    `position`: the result of `behind`. Only the tasks behind it are returned.

    There is one query for each 40 queues. With several, a malformed task without a queue may be returned several times.
    """
    by_order = [("task_option.priority", -1), ("task_state.next_preempt_time", 1)]
    if position is not None:
        # The tasks are of one priority. The server reads them in the order of the index only if the sort leaves the
        # priority out. Otherwise it reads all of them, and then sorts.
        del by_order[0]
        also = [*also, position]
    view = SCAN_VIEW if horizon_ms else _TIMELESS_VIEW
    parts: list[Scan] = []
    for first in range(0, max(1, len(queues)), _MOST_QUEUES):  # without queues, for malformed tasks that have none
        claimable = filters.claimable(queues[first : first + _MOST_QUEUES], names, worker_id, horizon_ms)
        claimable = filters.with_guards(claimable, also)
        parts.append((yield from _scan(claimable, by_order, limit, DISCOVERY_INDEX, timeout, view)))
    return parts[0] if len(parts) == 1 else _merged(parts, limit)


def _merged(parts: Sequence[Scan], limit: int) -> Scan:
    """Return the first tasks of several scans."""
    found = sorted(chain.from_iterable(part.documents for part in parts), key=_order)
    times = [part.server_time for part in parts if part.server_time is not None]
    now = max(times, default=None)
    is_complete = len(found) <= limit and all(part.is_complete for part in parts)
    del found[limit:]
    return Scan(found, now, is_complete, now is not None and any(_is_future(document, now) for document in found))


def _order(document: Mapping[str, Any]) -> tuple[bool, tuple[int, datetime] | None]:
    """Return the sort key of a found task. Malformed ones come last."""
    place = place_of(document)
    return (True, None) if place is None else (False, (-place[0], place[1]))


def place_of(document: Mapping[str, Any]) -> tuple[int, datetime] | None:
    """Return the priority and the time by which a found task is ordered; None: the document is malformed."""
    option, state = document.get("task_option"), document.get("task_state")
    priority = option.get("priority") if isinstance(option, Mapping) else None
    moment = state.get("next_preempt_time") if isinstance(state, Mapping) else None
    if not isinstance(priority, int) or not isinstance(moment, datetime):
        return None
    return priority, moment


def behind(document: Mapping[str, Any]) -> filters.Filter | None:
    """Return a filter for the tasks of this one's priority that come behind it in the order of `scan`, or with it.

    Without the filter, the server first passes all keys that claims have removed, as it keeps these for minutes. None:
    the document is malformed.
    """
    place = place_of(document)
    return None if place is None else {"task_option.priority": place[0], filters.NEXT: {"$gte": place[1]}}


def scan_begun(
    queues: Sequence[str],
    names: Sequence[str],
    worker_id: str,
    horizon_ms: int,
    limit: int,
    also: Sequence[filters.Filter] = (),
) -> Operation[Scan]:
    """Scan only RUNNING tasks. The longest due task comes first.

    If the backlog is long, `scan` may not reach the RUNNING tasks.
    """
    begun = {**filters.claimable(queues, names, worker_id, horizon_ms), "task_state.status": TaskStatus.RUNNING.value}
    begun = filters.with_guards(begun, also)
    return (yield from _scan(begun, [("task_state.next_preempt_time", 1)], limit, STATUS_INDEX))


def scan_tenants(
    queue: str,
    names: Sequence[str],
    worker_id: str,
    horizon_ms: int,
    limit: int,
    between: Mapping[str, Any],
    also: Sequence[filters.Filter] = (),
) -> Operation[Scan]:
    """Scan the tasks of a queue tenant by tenant. Of each tenant, they come in the order of `scan`.

    `between` bounds the tenants: {"$gt": "acme"}, for example.
    """
    claimable = {**filters.claimable([queue], names, worker_id, horizon_ms), "queue": queue}
    claimable = filters.with_guards({**claimable, "tenant": {"$exists": True, **between}}, also)
    order = [("tenant", 1), ("task_option.priority", -1), ("task_state.next_preempt_time", 1)]
    return (yield from _scan(claimable, order, limit, TURNS_INDEX))


def tenants_at_ends(queue: str) -> Operation[tuple[str, str] | None]:
    """Return the first and the last tenant with open tasks in a queue, by their names. None: there is none."""
    ends: list[str] = []
    matched = {"queue": queue, "tenant": {"$exists": True}, filters.NEXT: {"$exists": True}}
    for direction in (1, -1):
        order = [("queue", direction), ("tenant", direction)]
        found = yield tasks("find", matched, {"_id": 0, "tenant": 1}, sort=order, limit=1, hint=TURNS_INDEX)
        if not found or not isinstance(found[0].get("tenant"), str):
            return None
        ends.append(found[0]["tenant"])
    return ends[0], ends[1]


def _scan(
    criteria: filters.Filter,
    order: list[tuple[str, int]],
    limit: int,
    index: str,
    timeout: timedelta | None = None,
    view: Mapping[str, Any] = SCAN_VIEW,
) -> Operation[Scan]:
    call = tasks("find_naive", criteria, view, sort=order, limit=limit, batch_size=limit, hint=index)
    found = yield call.within(timeout)
    now = found[0].get("now") if found else None
    has_future = now is not None and any(_is_future(document, now) for document in found)
    return Scan(found, now, len(found) < limit, has_future)


def _is_future(document: Document, now: datetime) -> bool:
    state = document.get("task_state")
    moment = state.get("next_preempt_time") if isinstance(state, dict) else None
    return isinstance(moment, datetime) and moment > now


def look(task_ids: Sequence[str]) -> Operation[list[Document]]:
    """Return the fields of these tasks that the rules need, each with the server's time as `now`."""
    found: list[Document] = yield tasks("find", filters.by_ids(task_ids), RULE_VIEW)
    return found


def look_at_due(task_ids: Sequence[str], horizon_ms: int) -> Operation[list[Document]]:
    """Return the same as `look`, but only for tasks that some worker may take within the horizon."""
    found: list[Document] = yield tasks("find", filters.due_tasks_within(task_ids, horizon_ms), RULE_VIEW)
    return found


def read(document_id: Any) -> Operation[Document | None]:
    """Return one whole document, or None if it does not exist. The `_id` may be of any type.

    Read documents one at a time: each may have 16 MB.
    """
    found: Document | None = yield tasks("find_one", {"_id": {"$eq": document_id}})
    return found


def lapsed(grace_ms: int, limit: int) -> Operation[list[Any]]:
    """Return the `_id` of each task with a run that lapsed at least `grace_ms` ago and that nobody has closed since."""
    found = yield tasks("find", filters.lapsed(grace_ms), {"_id": 1}, limit=limit, hint=STATUS_INDEX)
    return [document["_id"] for document in found]


def undiscoverable(limit: int) -> Operation[list[Document]]:
    """Return malformed tasks that no batch query finds."""
    found: list[Document] = yield tasks("find", filters.undiscoverable(), {"_id": 1}, limit=limit)
    return found


def unserved_names(queues: Sequence[str], names: Sequence[str], limit: int) -> Operation[list[str]]:
    """Return up to `limit` names of tasks that wait in these queues. The names in `names` are left out."""
    unserved: list[str] = []
    while len(unserved) < limit:
        found = yield tasks(
            "find", filters.unserved(queues, [*names, *unserved]), {"_id": 0, "name": 1}, limit=1, hint=DISCOVERY_INDEX
        )
        if not found:
            break
        unserved.append(found[0]["name"])
    return unserved


# --- lapses ----------------------------------------------------------------------------------------------

# Tells which tasks had lapsed runs that a statement has closed. For metrics; nothing depends on it.

_VIEW = {
    "name": 1,
    "queue": 1,
    **{f"{filters.RUNS}.{field}": 1 for field in ("status", "fail_time")},
}


@dataclass(frozen=True, slots=True)
class Lapse:
    """Lapsed runs of one task that were closed together."""

    queue: str
    name: str
    run_cnt: int
    time: datetime


def lapses_closed(task_ids: Collection[Any], task_cnt: int, since: datetime) -> Operation[list[Lapse]]:
    """Return what a statement has closed that changed this number of these tasks: the tasks whose runs lapsed last.

    The server tells how many tasks a statement has changed, and not which. If another worker closes lapsed runs of the
    same tasks at the same time, a task may be told in place of another one, but the number is right. A statement can
    change a task without a lapsed run, too: what lapsed before `since`, by the server's clock, was closed before.
    """
    documents = yield tasks("find", filters.by_ids(list(task_ids)), _VIEW, hint="_id_")
    lapses = [lapse for document in documents if (lapse := lapse_in(document)) is not None]
    found = [lapse for lapse in lapses if lapse.time >= since]
    return sorted(found, key=lambda lapse: lapse.time, reverse=True)[:task_cnt]


def lapse_in(document: dict[str, Any], at: datetime | None = None) -> Lapse | None:
    """Return the lapsed runs of a task that were closed at this time, by default those that were closed last."""
    times = [
        run["fail_time"]
        for run in runs_in(document)
        if run.get("status") == RunStatus.TIMEOUT and isinstance(run.get("fail_time"), datetime)
    ]
    time = max(times, default=None) if at is None else at
    if time is None or time not in times:
        return None
    return Lapse(str(document.get("queue")), str(document.get("name")), times.count(time), time)
