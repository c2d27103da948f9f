"""What a document that was looked up tells of a change: only what is proven to be of that very task; pure.

A change names what was changed. The rest, such as whose run it was and in which queue, is looked up, and the document
is then as it is when the change is read: its task may have been moved to another queue since, or removed and published
again under the same key, with other data in another queue.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any

from mtask.model.documents import runs_in
from mtask.store.streams.changes import Runs, by_index, has_told, updated_fields

Document = Mapping[str, Any]
#: Marks a change whose document is as it was right after the change.
IS_EXACT = "is_exact"
_NONE: Document = {}
#: Once written these stay as they are as long as the run is there.
_LASTING = ("run_id", "claim_time", "success_time", "fail_time")
#: An update that had to wait is made with the `$$NOW` of its begin: what is so near to a move may lie on either side.
_NEAR = timedelta(seconds=60)


def document_of(change: Document) -> Document:
    """Return what is known of the document of a change; nothing of one that may be another task's."""
    document = change.get("fullDocument")
    if not isinstance(document, Mapping):
        return _NONE
    is_known = change["operationType"] != "update" or change.get(IS_EXACT) is True
    return document if is_known or _is_same(change["updateDescription"], document) else _NONE


def queue_of(change: Document, document: Document) -> str | None:
    """Return the queue of the task at the change, given what is known of its document; None: not known."""
    queue = updated_fields(change.get("updateDescription") or _NONE).get("queue", _NONE)
    if queue is _NONE:
        was_known = change["operationType"] != "update" or change.get(IS_EXACT) is True
        queue = document.get("queue") if was_known or _is_before(document, change["wallTime"]) else None
    return queue if type(queue) is str else None


def _is_before(document: Document, instant: datetime) -> bool:
    """Whether the task was in its present queue by then."""
    state = document.get("task_state")
    moved = state.get("queue_time") if isinstance(state, Mapping) else None
    return moved is None or (isinstance(moved, datetime) and instant - moved >= _NEAR)


def _is_same(described: Document, document: Document) -> bool:
    """Whether an instant that the change has written still stands in the document."""
    updated, state = updated_fields(described), document.get("task_state")
    if _has_instant(updated, "quiet_time", document):
        return True
    if isinstance(state, Mapping) and _has_instant(updated, "task_state.finish_time", state):
        return True
    runs = Runs(runs_in(document))
    for index, fields in by_index(updated)[0].items():
        written = {name: fields[name] for name in _LASTING if fields.get(name) is not None}
        is_telling = any(isinstance(value, datetime) for value in written.values())
        if is_telling and runs.having(written):
            return True
        if has_told(runs.at(index), fields.get("progress")):
            return True
    return False


def _has_instant(updated: Document, path: str, document: Document) -> bool:
    instant = updated.get(path)
    return isinstance(instant, datetime) and document.get(path.rpartition(".")[2]) == instant
