"""Changes of whole flows that a user asks for: cancel a flow, and retry its failed steps.

Each batch of steps is one update with a guard. The changes are settled after all batches: a step that the user cancels
then ends by the user's cancel, and not because a dependency was canceled a moment before. `relays` settle them: that
of flows, and those that tell others of the same ends.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mtask.errors import DependencyMissing
from mtask.features.flows import read as reading
from mtask.features.flows import statements as flows
from mtask.features.flows.read import BATCH, part_of
from mtask.features.flows.settle import change
from mtask.features.flows.views import texts
from mtask.kernel.document.task import MAX_STEPS
from mtask.kernel.driver.indexes import FLOW_INDEX, HELD_INDEX, OWED_INDEX
from mtask.kernel.driver.operation import Operation, tasks
from mtask.kernel.operations.relays import Relay, settle, settle_all
from mtask.kernel.statements import filters
from mtask.kernel.statements import publish as requests
from mtask.kernel.statements.derive import Pipeline

#: The most passes of one call. Each pass changes at least one step, so more are only needed if running handlers keep
#: adding steps.
_PASSES = 100
_ID = {"_id": 1}
_RETRIED = {"flow.after": 1, "flow.ancestors": 1, "flow.on_failed": 1}
#: The order of a cancel: no other process ends WAITING steps because of a dependency that the same call cancels.
_WAITING_FIRST = [(flows.STATUS, -1)]
_WAIT_AGAIN = flows.hold_again()
#: The part `flow` of each step, by its id.
_Parts = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class ChangedFlow:
    """The result of a cancel or a retry of a flow."""

    key: str
    task_ids: Sequence[str]  #: the ids of the steps that this call has changed
    counts: dict[str, int]  #: the numbers of the flow's steps by status, after the call


def cancel(key: str, relays: Sequence[Relay], *, everything: bool) -> Operation[ChangedFlow]:
    """Cancel the open steps of a flow, until a pass changes none; raise FlowNotFound.

    Without `everything`, the clean-up stays: the steps that run also after failures.
    """
    yield from reading.must_exist(key)
    matched = flows.cancelable(key, everything=everything)
    changed: dict[str, None] = {}
    for _ in range(_PASSES):
        ids = yield from change_all(matched, requests.cancel(), _WAITING_FIRST)
        # A step that has succeeded may owe a next task. This task must exist before it can be canceled.
        owing = yield from _owing(key)
        if not ids and not owing:
            break
        changed |= dict.fromkeys(ids)
        yield from settle_all(relays, [*ids, *owing])
        changed |= dict.fromkeys((yield from _own(ids)))
    return (yield from _changed(key, changed))


def cancel_steps(key: str, relays: Sequence[Relay], among: filters.Filter, own: filters.Filter) -> Operation[int]:
    """Cancel those open steps of a flow that match `among`; return the number of steps that are canceled by it.

    `own` matches the steps whose ends are the user's. It must match those of `among`, whatever their status.
    """
    matched = {"$and": [flows.cancelable(key, everything=True), among]}
    ids = yield from change_all(matched, requests.cancel(), _WAITING_FIRST)
    yield from settle_all(relays, ids)
    return len(ids) + len((yield from _own(ids, own)))


def _owing(key: str) -> Operation[list[str]]:
    """Return the steps that are still to publish tasks."""
    owing = {"flow.key": key, "owed_since": {"$exists": True}, "owed_tasks.0": {"$exists": True}}
    found = yield tasks("find", owing, _ID, hint=OWED_INDEX)
    return [document["_id"] for document in found]


def _own(canceled: Sequence[str], among: filters.Filter | None = None) -> Operation[list[str]]:
    """Make the ends that these cancels caused the user's own: no retry of another step opens such a step again.

    With `among`, only those of the steps that match it.

    Another process may have settled a cancel before this call came to the dependents. Return the ids of these.
    """
    owned: list[str] = []
    pending = list(canceled)
    while pending:
        batch, pending = pending[:BATCH], pending[BATCH:]
        caused = {**flows.ended_by_any(batch), **({} if among is None else {"$and": [among]})}
        found = yield tasks("find", caused, _ID, hint=HELD_INDEX)
        ids = [document["_id"] for document in found]
        if ids:
            yield tasks("update_many", {**filters.by_ids(ids), **caused}, flows.disown(), hint="_id_")
            owned += ids
            pending += ids
    return owned


def retry(key: str, relays: Sequence[Relay]) -> Operation[ChangedFlow]:
    """Open all FAIL and CANCELED steps of a flow again; raise FlowNotFound."""
    yield from reading.must_exist(key)
    failed = yield from _failed(key, {})
    for task_id, dependencies in failed.gone.items():
        raise DependencyMissing(task_id, dependencies)
    ids = yield from _reopen(failed, relays)
    return (yield from _changed(key, dict.fromkeys(ids)))


def check_dependencies(task_id: str) -> Operation[bool]:
    """Return whether a dependency of the task is open; raise DependencyMissing if one is not there any more."""
    rows = yield tasks("find", {"_id": task_id, "flow.after.0": {"$exists": True}}, _RETRIED, hint="_id_")
    gone, waiting = yield from _gone_and_waiting(rows)
    if gone:
        raise DependencyMissing(task_id, gone[task_id])
    return task_id in waiting


def _gone_and_waiting(rows: Sequence[Mapping[str, Any]]) -> Operation[tuple[dict[str, list[str]], set[str]]]:
    """Return the dependencies of these steps that are not there any more, by step, and the steps with an open one.

    Steps that lack none are left out. Without the results of its dependencies, a step would do its work on less than it
    was meant to.
    """
    after = {row["_id"]: texts(part_of(dict(row)).get("after")) for row in rows}
    is_open = yield from reading.open_by_id(sorted({task_id for ids in after.values() for task_id in ids}))
    gone = {task_id: [each for each in ids if each not in is_open] for task_id, ids in after.items()}
    waiting = {task_id for task_id, ids in after.items() if any(is_open.get(each) for each in ids)}
    return {task_id: ids for task_id, ids in gone.items() if ids}, waiting


def retry_steps(key: str, relays: Sequence[Relay], among: filters.Filter) -> Operation[list[str]]:
    """Open those FAIL and CANCELED steps of a flow again that match `among`; return their ids.

    Those stay that lack a dependency.
    """
    return (yield from _reopen((yield from _failed(key, among)), relays))


@dataclass(frozen=True, slots=True)
class _Failed:
    """The FAIL and CANCELED steps among these of a flow."""

    matched: filters.Filter
    parts: _Parts
    gone: Mapping[str, Sequence[str]]  #: the dependencies that are not there any more, by step
    waiting: Collection[str]  #: the steps with an open dependency


def _failed(key: str, among: filters.Filter) -> Operation[_Failed]:
    matched = {"$and": [{"flow.key": key, **flows.failed_steps()}, *([among] if among else [])]}
    rows = yield tasks("find", matched, _RETRIED, hint=FLOW_INDEX)
    gone, waiting = yield from _gone_and_waiting(rows)
    return _Failed(matched, {row["_id"]: part_of(row) for row in rows}, gone, waiting)


def _reopen(failed: _Failed, relays: Sequence[Relay]) -> Operation[list[str]]:
    """Open these steps of a flow again, but those that lack a dependency; return their ids.

    A step whose dependency is open, or is opened, too, waits for it again. A clean-up is opened after its dependencies:
    while they are failed, whoever decides on it releases it. Of the others, the order does not matter: if another
    process ends a step again because its dependency is still to be opened, then the settling of that dependency opens
    the step.
    """
    steps = {task_id: part for task_id, part in failed.parts.items() if task_id not in failed.gone}
    opened = {*steps}.union(*(texts(part.get("ancestors")) for part in steps.values()))
    awaited = {task_id: opened & {*texts(part.get("after"))} for task_id, part in steps.items()}
    late = {task_id for task_id, part in steps.items() if awaited[task_id] and part.get("on_failed") == "run"}
    again = {task_id for task_id in steps if awaited[task_id] or task_id in failed.waiting}
    at_once = [task_id for task_id in steps if task_id not in again]
    yield from _open(failed.matched, at_once, requests.run_again(everything=False))
    yield from _open(failed.matched, [*(again - late)], _WAIT_AGAIN)
    while late:
        now = [task_id for task_id in late if not awaited[task_id] & late] or [*late]  # a circle is malformed
        yield from _open(failed.matched, now, _WAIT_AGAIN)
        late -= {*now}
    yield from settle(relays, [*steps])
    return [*steps]


def _open(matched: filters.Filter, task_ids: Sequence[str], pipeline: Pipeline) -> Operation[None]:
    for start in range(0, len(task_ids), BATCH):
        yield from change({**filters.by_ids(task_ids[start : start + BATCH]), **matched}, pipeline)


def change_all(matched: filters.Filter, pipeline: Pipeline, order: list[tuple[str, int]]) -> Operation[list[str]]:
    """Change all steps that match, in this order; return their ids. A changed step no longer matches."""
    changed: list[str] = []
    for _ in range(2 * MAX_STEPS // BATCH):
        found = yield tasks("find", matched, _ID, sort=order, limit=BATCH, hint=FLOW_INDEX)
        ids = [document["_id"] for document in found]
        if not ids:
            break
        yield from change({**matched, **filters.by_ids(ids)}, pipeline)
        changed += ids
    return changed


def _changed(key: str, task_ids: dict[str, None]) -> Operation[ChangedFlow]:
    counted = yield from reading.counts([key])
    return ChangedFlow(key, list(task_ids), counted[key])
