"""Changes of whole flows that a user asks for: cancel a flow, and retry its failed steps.

Each batch of steps is one update with a guard. The changes are settled after all batches: a step that the user cancels
then ends by the user's cancel, and not because a dependency was canceled a moment before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mtask.model.documents import MAX_STEPS
from mtask.store.driver.operation import Operation, tasks
from mtask.store.flows import reading, settling
from mtask.store.flows.changing import change
from mtask.store.flows.looking import BATCH
from mtask.store.layout.indexes import FLOW_INDEX, HELD_INDEX, OWED_INDEX
from mtask.store.statements import filters, flows, requests
from mtask.store.statements.derive import Pipeline

#: The most passes of one call. Each pass changes at least one step, so more are only needed if running handlers keep
#: adding steps.
_PASSES = 100
_ID = {"_id": 1}


@dataclass(frozen=True, slots=True)
class ChangedFlow:
    """The result of a cancel or a retry of a flow."""

    key: str
    task_ids: Sequence[str]  #: the ids of the steps that this call has changed
    counts: dict[str, int]  #: the numbers of the flow's steps by status, after the call


def cancel(key: str, *, everything: bool) -> Operation[ChangedFlow]:
    """Cancel the open steps of a flow, until a pass changes none; raise FlowNotFound.

    Without `everything`, the clean-up stays: the steps that run also after failures.
    """
    yield from reading.must_exist(key)
    matched = flows.cancelable(key, everything=everything)
    changed: dict[str, None] = {}
    for _ in range(_PASSES):
        # WAITING steps come first, so that no other process ends them because of a dependency that this call cancels.
        ids = yield from _change_all(matched, requests.cancel(), [(flows.STATUS, -1)])
        # A step that has succeeded may owe a next task. This task must exist before it can be canceled.
        owing = yield from _owing(key)
        if not ids and not owing:
            break
        changed |= dict.fromkeys(ids)
        yield from settling.settle_all([*ids, *owing])
        changed |= dict.fromkeys((yield from _own(ids)))
    return (yield from _changed(key, changed))


def _owing(key: str) -> Operation[list[str]]:
    """Return the steps that are still to publish tasks."""
    owing = {"flow.key": key, "owed_since": {"$exists": True}, "owed_tasks.0": {"$exists": True}}
    found = yield tasks("find", owing, _ID, hint=OWED_INDEX)
    return [document["_id"] for document in found]


def _own(canceled: Sequence[str]) -> Operation[list[str]]:
    """Make the ends that these cancels caused the user's own: no retry of another step opens such a step again.

    Another process may have settled a cancel before this call came to the dependents. Return the ids of these.
    """
    owned: list[str] = []
    pending = list(canceled)
    while pending:
        batch, pending = pending[:BATCH], pending[BATCH:]
        caused = flows.ended_by_any(batch)
        found = yield tasks("find", caused, _ID, hint=HELD_INDEX)
        ids = [document["_id"] for document in found]
        if ids:
            yield tasks("update_many", {**filters.by_ids(ids), **caused}, flows.disown(), hint="_id_")
            owned += ids
            pending += ids
    return owned


def retry(key: str) -> Operation[ChangedFlow]:
    """Open all FAIL and CANCELED steps of a flow again; raise FlowNotFound.

    The order does not matter. If another process ends a step again because its dependency is still to be opened, then
    the settling of that dependency opens the step.
    """
    yield from reading.must_exist(key)
    failed = {"flow.key": key, **flows.failed_steps()}
    found = yield tasks("find", failed, _ID, hint=FLOW_INDEX)
    ids = [document["_id"] for document in found]
    for start in range(0, len(ids), BATCH):
        guard = {**filters.by_ids(ids[start : start + BATCH]), **failed}
        yield from change(guard, requests.run_again(everything=False))
    yield from settling.settle_all(ids)
    return (yield from _changed(key, dict.fromkeys(ids)))


def _change_all(matched: filters.Filter, pipeline: Pipeline, order: list[tuple[str, int]]) -> Operation[list[str]]:
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
