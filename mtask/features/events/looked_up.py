"""Checks that a looked-up document belongs to the task of a change. Other documents are not used.

A change names only the changed fields. The document supplies the other fields, such as the run's worker and the queue.
But the document is read some time after the change. Meanwhile, the task may have moved to another queue. Or it may have
been removed and published again under the same key, with other data. The functions are pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any

from mtask.features.events.changes import Runs, by_index, has_reported, updated_fields
from mtask.kernel.document.task import runs_in

Document = Mapping[str, Any]
#: A field of a change. If it is true, the change carries the document exactly as it was right after the change.
IS_EXACT = "is_exact"
_NONE: Document = {}
#: Fields of a run that never change once they are written.
_LASTING = ("run_id", "claim_time", "success_time", "fail_time")
#: The least distance in time between a change and a move to another queue that proves their order. At a smaller
#: distance, their times prove nothing, because an update that had to wait has the `$$NOW` of its start.
_NEAR = timedelta(seconds=60)


def document_of(change: Document) -> Document:
    """Return the document of a change, or an empty one if it may belong to another task."""
    document = change.get("fullDocument")
    if not isinstance(document, Mapping):
        return _NONE
    is_known = change["operationType"] != "update" or change.get(IS_EXACT) is True
    return document if is_known or _is_same(change["updateDescription"], document) else _NONE


def queue_of(change: Document, document: Document) -> str | None:
    """Return the queue of the task at the time of the change, or None if the queue is not certain."""
    queue = updated_fields(change.get("updateDescription") or _NONE).get("queue", _NONE)
    if queue is _NONE:
        was_known = change["operationType"] != "update" or change.get(IS_EXACT) is True
        queue = document.get("queue") if was_known or _is_before(document, change["wallTime"]) else None
    return queue if type(queue) is str else None


def _is_before(document: Document, instant: datetime) -> bool:
    """Whether the task was certainly in its present queue at that instant."""
    state = document.get("task_state")
    moved = state.get("queue_time") if isinstance(state, Mapping) else None
    return moved is None or (isinstance(moved, datetime) and instant - moved >= _NEAR)


def _is_same(described: Document, document: Document) -> bool:
    """Whether the document still contains an instant that the change wrote.

    If so, the document and the change belong to the same task.
    """
    updated, state = updated_fields(described), document.get("task_state")
    if _has_instant(updated, "quiet_time", document):
        return True
    if isinstance(state, Mapping) and _has_instant(updated, "task_state.finish_time", state):
        return True
    step = document.get("flow")
    if isinstance(step, Mapping) and _has_instant(updated, "flow.release_time", step):
        return True
    runs = Runs(runs_in(document))
    for index, fields in by_index(updated)[0].items():
        written = {name: fields[name] for name in _LASTING if fields.get(name) is not None}
        is_telling = any(isinstance(value, datetime) for value in written.values())
        if is_telling and runs.having(written):
            return True
        if has_reported(runs.at(index), fields.get("progress")):
            return True
    return False


def _has_instant(updated: Document, path: str, document: Document) -> bool:
    instant = updated.get(path)
    return isinstance(instant, datetime) and document.get(path.rpartition(".")[2]) == instant
