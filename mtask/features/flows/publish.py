"""Publishes flows: all tasks of a flow in one transaction, once for each key of a flow."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any

from pymongo import ReturnDocument

from mtask.errors import (
    DatabaseTimeout,
    DuplicateKey,
    FlowConflict,
    InvalidFlow,
    LeaseLost,
    RunCanceled,
    StepExists,
    WorkersTooOld,
)
from mtask.features.flows import statements
from mtask.kernel.document.status import TaskStatus
from mtask.kernel.document.task import MAX_STEPS, SCHEMA_VERSION, OnFailed
from mtask.kernel.driver.bson import stored_size
from mtask.kernel.driver.indexes import CHILDREN_INDEX, FLOW_INDEX
from mtask.kernel.driver.operation import Operation, places, tasks
from mtask.kernel.operations import claim as claims
from mtask.kernel.operations import workers
from mtask.kernel.operations.publish import NewTask, encoded, milliseconds
from mtask.kernel.operations.relays import Relay, settle
from mtask.kernel.statements import expressions as x
from mtask.kernel.statements import filters, views
from mtask.kernel.statements import publish as requests
from mtask.kernel.statements.outbox import OwedTask

Document = dict[str, Any]
#: Time limit of a statement that reads or inserts all steps of a flow.
_LONG = timedelta(seconds=60)
_EXAMPLES = 5


@dataclass(frozen=True, slots=True)
class NewStep:
    """A validated task of a flow, ready to be published."""

    task: NewTask
    step: str
    after: Sequence[str]  #: the ids of the dependencies
    on_failed: OnFailed


@dataclass(frozen=True, slots=True)
class NewFlow:
    """A validated flow, ready to be published."""

    key: str
    steps: Sequence[NewStep]
    fail_fast: bool = False

    @property
    def head(self) -> NewStep:
        """The first step that waits for no other."""
        return next(step for step in self.steps if not step.after)


@dataclass(frozen=True, slots=True)
class PublishedFlow:
    """The result of publishing a flow."""

    key: str
    task_ids: Sequence[str]  #: the ids of the steps, in the order in which they were added
    created: bool  #: whether this call has published the flow; if it is False, the call has changed nothing
    #: Whether the flow that exists under this key has other steps or other dependencies.
    differs: bool = False


def publish(flow: NewFlow) -> Operation[PublishedFlow]:
    """Publish a flow. The caller must run this operation in a transaction.

    Raises FlowConflict or WorkersTooOld.
    """
    task_ids = [step.task.task_id for step in flow.steps]
    # Also what is not of the tenant takes a key or an id. Whoever publishes for no tenant may give any.
    found = yield tasks("find", {"flow.key": flow.key}, _SHAPE, hint=FLOW_INDEX).within(_LONG).for_everybody()
    tenant = flow.head.task.tenant
    if tenant is not None and any(document.get("tenant") != tenant for document in found):
        raise FlowConflict(flow.key, [], not_of=tenant)
    if found:
        return PublishedFlow(flow.key, task_ids, created=False, differs=_shape_of(found) != _shape(flow))
    old = yield from workers.without_flows(_EXAMPLES)
    if old:
        raise WorkersTooOld(old)
    by_id = tasks("find", {"_id": {"$in": task_ids}}, {"tenant": 1}, limit=_EXAMPLES).within(_LONG)
    taken = yield by_id.for_everybody()
    if taken:
        are_own = tenant is None or all(document.get("tenant") == tenant for document in taken)
        raise FlowConflict(flow.key, [document["_id"] for document in taken], not_of=None if are_own else tenant)
    new = yield from encoded([step.task for step in flow.steps])
    steps = [replace(step, task=task) for step, task in zip(flow.steps, new, strict=True)]
    flow = replace(flow, steps=steps)
    watches = _Watches.of(flow)
    now = yield from _insert_head(flow, watches)
    rest = [_document(flow, step, watches, now) for step in flow.steps if step is not flow.head]
    if rest:
        try:
            yield tasks("insert_many", rest).within(_LONG)
        except DuplicateKey as error:
            raise FlowConflict(flow.key, []) from error
    return PublishedFlow(flow.key, task_ids, created=True)


#: The fields by which two shapes of a flow are compared, and whose the flow is.
_SHAPE = {"tenant": 1, "flow.after": 1, "flow.on_failed": 1, "flow.ancestors": 1}
_Shape = dict[str, tuple[frozenset[str], str]]


def _shape(flow: NewFlow) -> _Shape:
    return {step.task.task_id: (frozenset(step.after), step.on_failed) for step in flow.steps}


def _shape_of(found: Sequence[Document]) -> _Shape:
    steps = ((document["_id"], document["flow"]) for document in found)
    # Children are no part of the shape: handlers have added them.
    return {
        task_id: (frozenset(step.get("after", ())), str(step.get("on_failed")))
        for task_id, step in steps
        if not step.get("ancestors")
    }


@dataclass(frozen=True, slots=True)
class _Watches:
    """Which dependency each step watches at first."""

    of_step: Mapping[str, str]  #: the `_id` of the dependency, by the `_id` of the step
    watched: frozenset[str]  #: all these dependencies

    @classmethod
    def of(cls, flow: NewFlow) -> _Watches:
        # The steps must not all watch the same dependency, so the choice is random.
        of_step = {step.task.task_id: random.choice(step.after) for step in flow.steps if step.after}
        return cls(of_step, frozenset(of_step.values()))


def _insert_head(flow: NewFlow, watches: _Watches) -> Operation[datetime]:
    """Insert the first step; return the server's time.

    All other steps get the same create_time. A transaction cannot ask for the server's time in another way.
    """
    head = flow.head
    fixed = {**head.task.fixed(), "flow": _part(flow, head, watches)}
    pipeline = requests.publish(fixed, head.task.start_expression(), released=x.NOW)
    update = tasks(
        "find_one_and_update",
        {"_id": head.task.task_id},
        pipeline,
        {"flow.head": 1, "task_state.create_time": 1},
        upsert=True,
        return_document=ReturnDocument.AFTER,
    )
    try:
        made = yield update
    except DuplicateKey as error:  # a flow of this key, in another shape, has just been published
        raise FlowConflict(flow.key, []) from error
    if made.get("flow", {}).get("head") != flow.key:  # an upsert leaves a task alone that exists
        raise FlowConflict(flow.key, [head.task.task_id])
    now: datetime = made["task_state"]["create_time"]
    return now


def _part(flow: NewFlow, step: NewStep, watches: _Watches) -> Document:
    """Return the step's part in its flow, without times."""
    part: Document = {"key": flow.key, "step": step.step, "after": list(step.after), "on_failed": step.on_failed}
    if flow.fail_fast:
        part["fail_fast"] = True
    if step.task.task_id not in watches.watched:
        part["unwatched"] = True
    if step is flow.head:
        part |= {"head": flow.key, "end_time": None}
    return part


def _document(flow: NewFlow, step: NewStep, watches: _Watches, now: datetime) -> Document:
    task, part = step.task, _part(flow, step, watches)
    if not step.after:
        fixed = {**task.fixed(), "flow": {**part, "release_time": now}}
        return requests.task_document(fixed, task.start_at(now), now)
    part["held_by"] = watches.of_step[task.task_id]
    start = task.start
    if isinstance(start, timedelta):  # a delay counts from the release
        part["delay_ms"], start = milliseconds(start), None
    made = requests.task_document({**task.fixed(), "flow": part}, start, now)
    made["task_state"]["status"] = TaskStatus.WAITING.value
    del made["task_state"]["next_preempt_time"]
    return made


# --- room ------------------------------------------------------------------------------------------------

# Room in flows: counts the tasks that are added to a flow, so that it has no more than it may have, whoever adds some
# at the same time.
#
# The count is in the collection `places`, and not in a task: a handler's transaction ends by a write to its task, and
# would conflict with each count there. The first count is that of the tasks that are there. Room is taken before tasks
# are added, so a process that dies in between leaves the count too high, and removed tasks stay counted. A count that
# leaves no room is made anew, unless room was taken a moment ago.

#: The tasks for which room was taken are there after this time, in ms, or never will be.
_ADDED_MS = 60_000
#: The time for which a count is kept after its last use, in ms.
_KEPT_MS = 3_600_000
#: The most tries. Another one is needed where the count is made, or made anew.
_RACES = 20


def take(key: str, count: int) -> Operation[None]:
    """Count so many more tasks of a flow; raise InvalidFlow if it has no room for them."""
    place = {"_id": f"flow {key}"}
    used = {"count_time": x.NOW, "quiet_time": x.NOW, "expire_time": x.add_ms(x.NOW, _KEPT_MS)}
    more = [{"$set": {"task_cnt": {"$add": ["$task_cnt", count]}, **used}}]
    for _ in range(_RACES):
        counted = yield places("update_one", {**place, "task_cnt": {"$lte": MAX_STEPS - count}}, more)
        if counted.matched_count:
            return
        is_old = {"$lt": [{"$ifNull": ["$count_time", None]}, x.add_ms(x.NOW, -_ADDED_MS)]}
        found = yield places("find_one", place, {"task_cnt": 1, "is_old": is_old})
        if found is not None and found["task_cnt"] + count <= MAX_STEPS:
            continue  # another caller has made the count since the update
        if found is not None and not found["is_old"]:
            reason = f"{count} more tasks do not fit: it has {found['task_cnt']}, and {MAX_STEPS} are the most"
            raise InvalidFlow(key, reason)
        there = yield tasks("count_documents", {"flow.key": key}, hint=FLOW_INDEX)
        if found is None:
            yield places("insert_new", [{**place, "task_cnt": there, "schema_version": SCHEMA_VERSION}])
        else:
            fresh = [{"$set": {"task_cnt": there, **used}}]
            yield places("update_one", {**place, "task_cnt": found["task_cnt"]}, fresh)
    raise DatabaseTimeout(f"the flow {key!r} is counted all the time")


# --- children --------------------------------------------------------------------------------------------

# Adds tasks to a flow from a handler, and reads the results for which a step has waited.
#
# A child is first written into its parent's document, under the fence of the run, and then published. So a run that has
# lost its lease adds nothing. If a process dies in between, whoever settles the parent publishes the child.

#: The most children, and about the most bytes of them, that one statement adds. A parent's document holds them for the
#: moment.
BATCH, BATCH_BYTES = 500, 1024 * 1024
#: The most results that one statement reads.
PAGE = 100
#: How often children are added anew because another change of the parent comes in between. Tests tune it.
ROUNDS = 100


def make_room(key: str, parent_id: str, children: Sequence[OwedTask]) -> Operation[None]:
    """Take room in the flow for those of these children that it does not have; raise InvalidFlow or StepExists."""
    ids = [child.task_id for child in children]
    present: set[str] = set()
    for start in range(0, len(ids), BATCH):
        present |= yield from _present(parent_id, ids[start : start + BATCH])
    if len(present) < len(ids):
        yield from take(key, len(ids) - len(present))


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
    parent_id: str,
    run_id: str,
    children: Sequence[OwedTask],
    is_lease_valid: Callable[[], bool],
    relays: Sequence[Relay],
) -> Operation[list[str]]:
    """Add these children to the parent's flow; return the ids of those that did not exist.

    Children that the same parent has added before stay as they are. `relays`: that of flows, and those that settle what
    follows from it. Raises StepExists, LeaseLost or RunCanceled.
    """
    ids = [child.task_id for child in children]
    present = yield from _present(parent_id, ids)
    missing = [child for child in children if child.task_id not in present]
    if not missing:
        return []
    added = [child.task_id for child in missing]
    documents = yield from _append(parent_id, run_id, missing, relays)
    if not is_lease_valid():
        raise LeaseLost(parent_id, run_id)  # whoever settles the parent publishes the children
    existing = yield tasks("insert_new", documents["owed_tasks"])
    yield tasks("update_one", {"_id": parent_id}, statements.added(added, documents["owed_since"]))
    if existing:
        yield from _present(parent_id, added)  # raises StepExists: another task was added under the same id
    return added


def _append(parent_id: str, run_id: str, children: Sequence[OwedTask], relays: Sequence[Relay]) -> Operation[Document]:
    """Let the parent owe these children; return the part of its document that holds them."""
    ids = {child.task_id for child in children}
    guard, view = statements.may_add(parent_id, run_id), {"owed_tasks": 1, "owed_since": 1}
    for _ in range(ROUNDS):
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
        yield from settle(relays, [parent_id])
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
