"""Publishes calls that gather: with debounce, as a list, or once more after a live run. And publishes once a window.

Before a call is sent, one read tells the server's time and the newest call that the document knows. So the call has its
place in the order of all calls, however late it arrives and however often it is sent.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from pymongo import ReturnDocument

from mtask.errors import DuplicateKey, GatherConflict, GatherFull, TaskError, TaskExists, WorkersTooOld
from mtask.features.gathering import statements as gathering
from mtask.features.gathering.statements import SentCall
from mtask.kernel.document.task import GatherKind
from mtask.kernel.driver.operation import Operation, server_time, tasks, viewed
from mtask.kernel.operations import workers
from mtask.kernel.operations.publish import NewTask, Published, milliseconds
from mtask.kernel.statements import expressions as x
from mtask.kernel.statements import filters
from mtask.kernel.statements import publish as requests
from mtask.kernel.statements.derive import Stage, close_lapsed, derive
from mtask.kernel.statements.rounds import CONTENT

_RACES = 5
_EXAMPLES = 5
_WHAT = "publishing that gathers"


@dataclass(frozen=True, slots=True)
class GatherPolicy:
    """How calls under one key gather."""

    kind: GatherKind
    debounce: timedelta | None = None
    max_wait: timedelta | None = None
    call_id: str | None = None  #: None: a fresh one

    replaces_options = True

    def publish(self, task: NewTask, *, in_session: bool) -> Operation[Published]:
        """Publish a call; raise a TaskError."""
        (result,) = yield from publish([task], self, in_session=in_session)
        if isinstance(result, TaskError):
            raise result
        return result

    def publish_many(self, batch: Sequence[NewTask], *, in_session: bool) -> Operation[list[Any]]:
        """Publish a call for each task."""
        return publish(batch, self, in_session=in_session)


@dataclass(frozen=True, slots=True)
class WindowPolicy:
    """A publish once a window: a task that has succeeded is kept so long.

    Thereafter, and after another end, a publish renews it.
    """

    window: timedelta

    replaces_options = True

    def publish(self, task: NewTask, *, in_session: bool) -> Operation[Published]:
        """Publish a task, unless a task of this key is open or has succeeded within the window."""
        return publish_once_a_window(task, self.window)

    def publish_many(self, batch: Sequence[NewTask], *, in_session: bool) -> Operation[list[Any]]:
        """Publish each task so."""
        return publish_each_once_a_window(batch, self.window)


def publish(
    batch: Sequence[NewTask], policy: GatherPolicy, *, in_session: bool
) -> Operation[list[Published | TaskError]]:
    """Publish a call for each task, in order. Return one entry for each: its result, or the error about its task.

    A call takes two round trips, the first call of a task takes three. Raises WorkersTooOld before anything is written.
    """
    asked = None
    if in_session:
        yield from _check_workers()
    elif batch:
        asked = yield from _ask([task.task_id for task in batch])
    token = policy.call_id or secrets.token_hex(12)
    results: list[Published | TaskError] = []
    for index, task in enumerate(batch):
        # The calls of one batch have the same time, so their ids keep their order.
        call_id = token if len(batch) == 1 else f"{token}-{index:06}"
        try:
            results.append((yield from _publish(task, policy, call_id, asked)))
        except TaskError as error:
            results.append(error)
    return results


def _check_workers() -> Operation[None]:
    # In a transaction, the server takes the time as it applies the call: from then on, nobody else changes the task.
    old = yield from workers.without_flows(_EXAMPLES)
    if old:
        raise WorkersTooOld(old, what=_WHAT)


@dataclass(frozen=True, slots=True)
class _Asked:
    """What is read before a call."""

    time: datetime
    is_untouched: bool = False  #: whether no claim has begun the round


def asked_time(now: datetime, known: datetime | None) -> datetime:
    """Return the asked_time of a call that is about to be sent. `known` is that of the newest call in the document.

    A call that was answered before is older, also after a change of the primary to a server whose clock is behind.
    """
    return now if known is None else max(now, known + timedelta(milliseconds=1))


def _ask(task_ids: Sequence[str]) -> Operation[dict[str, _Asked]]:
    """Return what a call for each task must know. The key "" is for tasks that do not exist."""
    old = [{"$match": workers.too_old()}, {"$limit": _EXAMPLES}, {"$project": {"_id": 0, "old": "$_id"}}]
    rows = yield tasks(
        "rows",
        [
            {"$match": filters.by_ids(list(dict.fromkeys(task_ids)))},
            {
                "$project": {
                    "last": gathering.last_asked_time(),
                    "now": x.NOW,
                    "is_untouched": {"$and": [{"$isArray": [x.RUNS]}, gathering.is_untouched()]},
                }
            },
            {"$unionWith": {"coll": "workers", "pipeline": old}},
        ],
    )
    if any("old" in row for row in rows):
        raise WorkersTooOld([str(row["old"]) for row in rows if "old" in row], what=_WHAT)
    asked = {row["_id"]: _Asked(asked_time(row["now"], row.get("last")), row["is_untouched"]) for row in rows}
    if len(asked) < len(set(task_ids)):
        asked[""] = _Asked((yield from server_time()))
    return asked


def _publish(
    task: NewTask, policy: GatherPolicy, call_id: str, asked: Mapping[str, _Asked] | None
) -> Operation[Published]:
    exists = asked is not None and task.task_id in asked
    known = None if asked is None else asked[task.task_id if exists else ""]
    call = _sent(task, policy, call_id, known.time if known else gathering.asked_time())
    if known is not None and known.is_untouched:
        guard, stages = gathering.untouched(task.task_id) | task.guard(), gathering.add_untouched(call)
        verdict = yield from _add(guard, stages, call)
        if verdict is not None:
            return _result(task.task_id, policy, verdict)
    for _ in range(_RACES):
        if not exists and (yield from _insert(task, call)):
            return Published(task.task_id, created=True, updated=False)
        stages = [*close_lapsed(), gathering.reopen(call), *derive(), *gathering.add(call)]
        verdict = yield from _add(task.guard(), stages, call)
        if verdict is not None:
            return _result(task.task_id, policy, verdict)
        exists = False  # the task has been removed meanwhile
    raise TaskExists(task.task_id, not_of=task.tenant)


def _sent(task: NewTask, policy: GatherPolicy, call_id: str, time: x.Expression) -> SentCall:
    content = {name: value for name, value in task.fixed().items() if name in CONTENT}
    debounce, most = (None if wait is None else milliseconds(wait) for wait in (policy.debounce, policy.max_wait))
    is_own = policy.call_id is not None
    return SentCall(time, call_id, policy.kind, content, task.start_expression(), debounce, most, is_own)


def _insert(task: NewTask, call: SentCall) -> Operation[bool]:
    fixed = task.fixed()
    if call.kind == "calls":
        fixed["params"] = {"calls": [fixed["params"]]}
    gather, start = gathering.first_round(call)
    return (yield from _upsert(task.task_id, requests.publish(fixed, start, gather=gather)))


def _upsert(task_id: str, pipeline: Any) -> Operation[bool]:
    for _ in range(_RACES):
        try:
            result = yield tasks("update_one", {"_id": task_id}, pipeline, upsert=True)
        except DuplicateKey:
            continue  # another publisher was faster; the next attempt finds the task
        return result.upserted_id is not None
    return False


def _add(guard: filters.Filter, stages: Sequence[Stage], call: SentCall) -> Operation[Mapping[str, Any] | None]:
    """Add the call to the task; return what has become of the call, or None if the guard matches no task."""
    projection = gathering.verdict(call)
    add = tasks("find_one_and_update", guard, list(stages), projection=projection, return_document=ReturnDocument.AFTER)
    row: Mapping[str, Any] | None = yield from viewed(add, "is_in", gone={"is_in": True})
    return row


def _result(task_id: str, policy: GatherPolicy, verdict: Mapping[str, Any]) -> Published:
    if verdict["is_in"]:
        return Published(task_id, created=False, updated=True)
    if verdict["has_flow"]:
        raise TaskExists(task_id)
    if not verdict["is_of_kind"]:
        raise GatherConflict(task_id, collects=policy.kind == "calls")
    if policy.kind == "calls":
        raise GatherFull(task_id)
    return Published(task_id, created=False, updated=False)


def publish_once_a_window(task: NewTask, window: timedelta) -> Operation[Published]:
    """Publish a task, unless a task of this key is open or has succeeded within the window."""
    kept_ms = milliseconds(window)
    for _ in range(_RACES):
        if (yield from _upsert(task.task_id, requests.publish(task.fixed(), task.start_expression()))):
            return Published(task.task_id, created=True, updated=False)
        fixed = task.fixed()
        result = yield tasks(
            "update_one",
            gathering.outside_window(task.task_id, kept_ms) | task.guard(),
            gathering.renew(fixed, task.start_expression()),
        )
        if result.matched_count:
            return Published(task.task_id, created=False, updated=True)
        if (yield tasks("find_one", task.guard(), {"_id": 1})) is not None:
            return Published(task.task_id, created=False, updated=False)
    raise TaskExists(task.task_id, not_of=task.tenant)


def publish_each_once_a_window(batch: Sequence[NewTask], window: timedelta) -> Operation[list[Published | TaskError]]:
    """Publish each task as `publish_once_a_window` does. Return its result, or the error about it, in order."""
    results: list[Published | TaskError] = []
    for task in batch:
        try:
            results.append((yield from publish_once_a_window(task, window)))
        except TaskError as error:
            results.append(error)
    return results
