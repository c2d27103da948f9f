"""Derives the events of tasks from the changes of their documents. The functions are pure.

A change names exactly the fields that it changed. So the kind and the number of events depend on the change alone. The
events have the same order as the changes. The looked-up document supplies the run and the queue, but only if it
certainly belongs to the same task (see `mtask.features.events.changes`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from enum import StrEnum
from typing import Any

from mtask.features.events import changes as lookup
from mtask.features.events.changes import END_TIMES, changed_runs, updated_fields
from mtask.kernel.document.identity import is_key_of
from mtask.kernel.document.parts import Sealed, is_sealed, refused
from mtask.kernel.document.status import FINAL, RunStatus, TaskStatus
from mtask.kernel.document.task import runs_in

Document = Mapping[str, Any]
_STATUS = "task_state.status"


class EventKind(StrEnum):
    """The kind of an event."""

    PUBLISHED = "published"
    RELEASED = "released"  #: the dependencies of a WAITING task have ended, and the task may start
    CLAIMED = "claimed"
    PROGRESS = "progress"
    SUCCEEDED = "succeeded"  #: a run ended as SUCCESS
    FAILED = "failed"  #: a run ended as FAIL, or a task became FAIL without a run, for example as a dependency failed
    TIMED_OUT = "timed_out"  #: the lease of a run lapsed
    CANCELED = "canceled"  #: a run was handed back, or a task without a run was canceled
    #: A finished task was opened again: by retry, by rerun, or by a publish. Or the end of a run began the next round.
    REOPENED = "reopened"
    REMOVED = "removed"


_OF_RUN = {
    RunStatus.RUNNING.value: EventKind.CLAIMED,
    RunStatus.SUCCESS.value: EventKind.SUCCEEDED,
    RunStatus.FAIL.value: EventKind.FAILED,
    RunStatus.TIMEOUT.value: EventKind.TIMED_OUT,
    RunStatus.CANCELED.value: EventKind.CANCELED,
}
_OF_TASK = {
    TaskStatus.SUCCESS.value: EventKind.SUCCEEDED,
    TaskStatus.FAIL.value: EventKind.FAILED,
    TaskStatus.CANCELED.value: EventKind.CANCELED,
}


@dataclass(frozen=True, slots=True)
class TaskEvent:
    """One event of a task."""

    kind: EventKind
    task_id: str
    time: datetime  #: the time of the event, by the server's clock
    #: The task's queue at the time of the event. It is None if the queue is not certain any more, for example because
    #: the task was removed or published anew before the event was read.
    queue: str | None = None
    #: The run of the event. It is None if the run or the task no longer existed when the event was read.
    run_id: str | None = None
    worker_id: str | None = None
    attempt: int | None = None
    #: The new status of the task, or None if the event did not change the status. With a final status, the task has
    #: ended.
    task_status: TaskStatus | None = None
    reason: str | None = None  #: the reason why the run did not succeed, or why a task without a run ended
    #: The reported progress, from 0 to 1, and its message. A report may change only one of the two. The other one is
    #: then None if a newer report has replaced this report.
    progress: float | None = None
    message: str | None = None
    #: Pass this token to `events(after=...)` to continue right after this event.
    token: str = ""
    #: The task's tenant. None: it has none, or its document was gone when the event was read.
    tenant: str | None = None

    @property
    def name(self) -> str:
        """The task's name."""
        return self.task_id.partition(":")[0]

    @property
    def key(self) -> str:
        """The task's key."""
        return self.task_id.partition(":")[2]

    def is_of(self, tenant: str) -> bool:
        """Whether this is the event of a tenant's task. If the task is gone, its key alone tells it."""
        is_gone = self.kind is EventKind.REMOVED or self.queue is None
        return is_key_of(tenant, self.key) and (self.tenant == tenant or (is_gone and self.tenant is None))

    @property
    def is_end(self) -> bool:
        """Whether the task finished with this event."""
        return self.task_status is not None and self.task_status.is_final


def events_of(change: Document) -> list[TaskEvent]:
    """Return the events of a change, in order; there may be none or several.

    The number of events does not depend on the looked-up document.
    """
    document = lookup.document_of(change)
    tenant = _text(document.get("tenant"))
    found = _events_of(change)
    if document.get("sealed") is not None:
        found = [without_readable(event) for event in found]
    return found if tenant is None else [replace(event, tenant=tenant) for event in found]


def as_told_to(event: TaskEvent, tenant: str) -> TaskEvent:
    """Return the event of a tenant's task as the tenant is told of it.

    If the task is gone, its key alone says whose it was, and it may have been nobody's. Then what else is known of its
    runs is left out.
    """
    if event.tenant == tenant:
        return event
    return replace(event, run_id=None, worker_id=None, attempt=None, reason=None, progress=None, message=None)


def without_readable(event: TaskEvent) -> TaskEvent:
    """Return the event of a task that must be encrypted. If its message is readable, it is refused."""
    if event.message is None or isinstance(event.message, Sealed):
        return event
    return replace(event, message=refused(event.task_id, "message"))


def _events_of(change: Document) -> list[TaskEvent]:
    task_id = change.get("documentKey", {}).get("_id")
    if not isinstance(task_id, str):
        return []
    document = lookup.document_of(change)
    queue = lookup.queue_of(change, document)
    time: datetime = change["wallTime"]
    kind = change["operationType"]
    if kind in ("insert", "replace"):
        return [TaskEvent(EventKind.PUBLISHED, task_id, time, queue, task_status=_first_status(document))]
    if kind == "delete":
        return [TaskEvent(EventKind.REMOVED, task_id, time)]
    description = change.get("updateDescription")
    if kind != "update" or description is None:
        return []
    found = list(_of_runs(changed_runs(description, runs_in(document)), task_id, time, queue))
    if _begins_next_round(description):
        return [*found, TaskEvent(EventKind.REOPENED, task_id, time, queue, task_status=TaskStatus.INIT)]
    return _with_status(found, updated_fields(description), task_id, time, queue)


def _begins_next_round(description: Document) -> bool:
    """Whether the change also began the task's next round. Without a next round, a cancel removes the field, too."""
    if "again" not in (description.get("removedFields") or ()):
        return False
    return any(path.partition(".")[0] == "gather" for path in description.get("updatedFields") or ())


def _first_status(document: Document) -> TaskStatus:
    """Return the status of an inserted task: WAITING or INIT."""
    state = document.get("task_state")
    is_waiting = isinstance(state, Mapping) and state.get("status") == TaskStatus.WAITING.value
    return TaskStatus.WAITING if is_waiting else TaskStatus.INIT


def is_in_doubt(change: Document) -> bool:
    """Whether the looked-up document may belong to another task, or to another queue than the change."""
    if change["operationType"] != "update" or not isinstance(change.get("fullDocument"), Mapping):
        return False
    document = lookup.document_of(change)
    return lookup.queue_of(change, document) is None and bool(events_of(change))


def _with_status(
    found: list[TaskEvent], updated: Document, task_id: str, time: datetime, queue: str | None
) -> list[TaskEvent]:
    """Add the task's new status to the last event in `found`. If `found` is empty, make an event for the status."""
    status = updated.get(_STATUS)
    if type(status) is not str or status not in TaskStatus.__members__:
        return found
    known = TaskStatus(status)
    if found:
        return [*found[:-1], replace(found[-1], task_status=known)]
    if status in FINAL:
        reason = _text(updated.get("task_state.reason"))
        return [TaskEvent(_OF_TASK[status], task_id, time, queue, task_status=known, reason=reason)]
    if known is TaskStatus.INIT and isinstance(updated.get("flow.release_time"), datetime):
        return [TaskEvent(EventKind.RELEASED, task_id, time, queue, task_status=known)]
    if known in (TaskStatus.INIT, TaskStatus.WAITING):
        return [TaskEvent(EventKind.REOPENED, task_id, time, queue, task_status=known)]
    return []


def _of_runs(
    touched: Iterable[tuple[Document, Document]], task_id: str, time: datetime, queue: str | None
) -> Iterator[TaskEvent]:
    for run, changed in touched:
        status, progress = changed.get("status"), changed.get("progress")
        if isinstance(progress, Mapping):
            yield _event(EventKind.PROGRESS, run, progress, task_id, time, queue)
        if type(status) is str and status in _OF_RUN:  # BSON code is a subclass of str that cannot be hashed
            yield _event(_OF_RUN[status], {**run, **changed}, {}, task_id, time, queue)


def _event(
    kind: EventKind, run: Document, progress: Document, task_id: str, time: datetime, queue: str | None
) -> TaskEvent:
    # The document may be newer than the event. It may contain the end of the run, which this event must not report.
    is_end = kind not in (EventKind.PROGRESS, EventKind.CLAIMED)
    times = END_TIMES if is_end else ("claim_time",) if kind is EventKind.CLAIMED else ()
    stored = run.get("progress")
    # The change names only the changed part of the progress. The document supplies the other part, unless it holds
    # newer progress.
    if kind is EventKind.PROGRESS and isinstance(stored, Mapping) and stored.get("time") == progress.get("time"):
        progress = {**stored, **progress}
    fraction = progress.get("fraction")
    return TaskEvent(
        kind,
        task_id,
        next((run[name] for name in times if isinstance(run.get(name), datetime)), time),
        queue,
        run_id=_text(run.get("run_id")),
        worker_id=_text(run.get("worker_id")),
        attempt=int(attempt) if isinstance(attempt := run.get("attempt"), int) else None,
        reason=_text(run.get("fail_reason")) if is_end else None,
        progress=float(fraction) if isinstance(fraction, int | float) else None,
        message=_text(progress.get("message")),
    )


def _text(value: Any) -> str | None:
    """Return the value if it is a string, or an encrypted one. Else return None: a document may hold any type."""
    if type(value) is str:
        return value
    return Sealed(value) if is_sealed(value) else None
