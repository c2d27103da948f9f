"""Events: what happens to tasks, told by what each change of a document says; pure.

Each change that the engine makes names exactly the fields that it changed, so what has happened, and how many events
that makes, follows from the change alone, in the order of the changes, once. Which run it was, and of which queue,
tells the document as it is when the event is read.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from enum import StrEnum
from typing import Any

from bson.timestamp import Timestamp

from mtask.model.status import FINAL_STATUSES, RunStatus, TaskStatus
from mtask.store.changes import END_TIMES, changed_runs
from mtask.store.claims import runs_in
from mtask.store.filters import RUNS

Document = Mapping[str, Any]
_STATUS = "task_state.status"
_FINAL = frozenset(status.value for status in FINAL_STATUSES)


class EventKind(StrEnum):
    """What has happened."""

    PUBLISHED = "published"
    CLAIMED = "claimed"
    PROGRESS = "progress"
    SUCCEEDED = "succeeded"  #: a run ended as SUCCESS
    FAILED = "failed"  #: a run ended as FAIL, or the task did without one
    TIMED_OUT = "timed_out"  #: a run's lease lapsed
    CANCELED = "canceled"  #: a run was handed back, or the task canceled that nobody held
    REOPENED = "reopened"  #: a finished task is open again: retry, rerun or a publish that cleaned it
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
_RUN_FIELDS = (
    "run_id",
    "worker_id",
    "attempt",
    "status",
    "claim_time",
    "success_time",
    "fail_time",
    "fail_reason",
    "progress",
)


@dataclass(frozen=True, slots=True)
class TaskEvent:
    """One thing that happened to a task."""

    kind: EventKind
    task_id: str
    time: datetime  #: by the server's clock
    queue: str | None = None  #: None where the task was gone when the event was read
    #: None where the run had been left out of the document, or the task was gone, when the event was read.
    run_id: str | None = None
    worker_id: str | None = None
    attempt: int | None = None
    #: What the task is from then on, where that changed with it; a final status is its end.
    task_status: TaskStatus | None = None
    reason: str | None = None  #: of a run that did not succeed
    #: 0 to 1, and the message beside it. Of either that stayed as it was: None where more was told before it was read.
    progress: float | None = None
    message: str | None = None
    #: Give it to `events(after=...)` to go on right after this event.
    token: str = ""

    @property
    def name(self) -> str:
        """The task's name."""
        return self.task_id.partition(":")[0]

    @property
    def key(self) -> str:
        """The task's key."""
        return self.task_id.partition(":")[2]

    @property
    def is_end(self) -> bool:
        """Whether the task has finished with it."""
        return self.task_status is not None and self.task_status.is_final


def events_of(change: Document) -> list[TaskEvent]:
    """Return what a change says has happened: nothing, one event, or several, in order."""
    task_id = change.get("documentKey", {}).get("_id")
    if not isinstance(task_id, str):
        return []
    document = change.get("fullDocument") or {}
    queue = document.get("queue") if isinstance(document.get("queue"), str) else None
    time: datetime = change["wallTime"]
    kind = change["operationType"]
    if kind in ("insert", "replace"):
        return [TaskEvent(EventKind.PUBLISHED, task_id, time, queue, task_status=TaskStatus.INIT)]
    if kind == "delete":
        return [TaskEvent(EventKind.REMOVED, task_id, time)]
    if kind != "update":
        return []
    description = change["updateDescription"]
    found = list(_of_runs(changed_runs(description, runs_in(dict(document))), task_id, time, queue))
    return _with_status(found, description.get("updatedFields", {}), task_id, time, queue)


def _with_status(
    found: list[TaskEvent], updated: Document, task_id: str, time: datetime, queue: str | None
) -> list[TaskEvent]:
    """Say with the last event what the task is now; where no run tells of it, that is an event of its own."""
    status = updated.get(_STATUS)
    if not isinstance(status, str) or status not in TaskStatus.__members__:
        return found
    known = TaskStatus(status)
    if found:
        return [*found[:-1], replace(found[-1], task_status=known)]
    if status in _FINAL:
        return [TaskEvent(_OF_TASK[status], task_id, time, queue, task_status=known)]
    if known is TaskStatus.INIT:
        return [TaskEvent(EventKind.REOPENED, task_id, time, queue, task_status=known)]
    return []


def _of_runs(
    touched: Iterable[tuple[Document, Document]], task_id: str, time: datetime, queue: str | None
) -> Iterator[TaskEvent]:
    for run, changed in touched:
        status, progress = changed.get("status"), changed.get("progress")
        if isinstance(progress, Mapping):
            yield _event(EventKind.PROGRESS, run, progress, task_id, time, queue)
        if isinstance(status, str) and status in _OF_RUN:
            yield _event(_OF_RUN[status], {**run, **changed}, {}, task_id, time, queue)


def _event(
    kind: EventKind, run: Document, progress: Document, task_id: str, time: datetime, queue: str | None
) -> TaskEvent:
    # Today's document may know of an end that this event did not.
    is_end = kind not in (EventKind.PROGRESS, EventKind.CLAIMED)
    times = END_TIMES if is_end else ("claim_time",) if kind is EventKind.CLAIMED else ()
    stored = run.get("progress")
    # The change names what is new of it. The rest is known from the document as long as nothing was told since.
    if kind is EventKind.PROGRESS and isinstance(stored, Mapping) and stored.get("time") == progress.get("time"):
        progress = {**stored, **progress}
    fraction = progress.get("fraction")
    return TaskEvent(
        kind,
        task_id,
        next((run[name] for name in times if isinstance(run.get(name), datetime)), time),
        queue,
        run_id=run.get("run_id"),
        worker_id=run.get("worker_id"),
        attempt=run.get("attempt"),
        reason=run.get("fail_reason") if is_end else None,
        progress=float(fraction) if isinstance(fraction, int | float) else None,
        message=progress.get("message"),
    )


def in_oplog(instant: datetime) -> Timestamp:
    """Return an instant as the oplog counts; raise ValueError or OverflowError."""
    return Timestamp(instant, 0)


def pipeline(
    names: Sequence[str] | None, queues: Sequence[str] | None, keys: Sequence[str] | None, task_id: str | None = None
) -> list[dict[str, Any]]:
    """Return the stages that leave other tasks' changes out, and of the documents what can be large."""
    matched: dict[str, Any] = {"ns.coll": "tasks", "documentKey._id": {"$type": "string"}}
    if task_id is not None:
        matched["documentKey._id"] = task_id
    if names is not None:
        matched["documentKey._id"] = {"$regex": f"^(?:{'|'.join(map(re.escape, names))}):"}
    stages: list[dict[str, Any]] = [{"$match": matched}]
    if keys is not None:
        key = {"$substrBytes": [_id(), {"$add": [{"$indexOfBytes": [_id(), ":"]}, 1]}, -1]}
        stages.append({"$match": {"$expr": {"$in": [key, {"$literal": list(keys)}]}}})
    if queues is not None:
        stages.append({"$match": {"fullDocument.queue": {"$in": list(queues)}}})
    kept = ("operationType", "ns", "documentKey", "wallTime", "updateDescription", "fullDocument.queue")
    runs = {f"fullDocument.{RUNS}.{field}": 1 for field in _RUN_FIELDS}
    return [*stages, {"$project": {**dict.fromkeys(kept, 1), **runs}}]


def _id() -> dict[str, Any]:
    """Return the task's id where it is text: stages may be reordered."""
    return {"$cond": [{"$eq": [{"$type": "$documentKey._id"}, "string"]}, "$documentKey._id", ":"]}
