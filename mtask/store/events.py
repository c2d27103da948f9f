"""Events: what happens to tasks, told by what each change of a document says; pure.

Each change that the engine makes names exactly the fields that it changed, so what has happened follows from the change
alone, in the order of the changes, once. Which run it was, and of which queue, tells the document as it is when the
event is read.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Any

from bson.timestamp import Timestamp

from mtask.model.status import FINAL_STATUSES, RunStatus, TaskStatus
from mtask.store.claims import runs_in

Document = Mapping[str, Any]
_RUN_FIELD = re.compile(r"^task_state\.worker_states\.(\d+)(?:\.(\w+))?(?:\.\w+)*$")
_RUNS = "task_state.worker_states"
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
#: An update is written about when its own clock says.
_AT_ONCE = timedelta(seconds=1)
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
_TIMES = ("success_time", "fail_time", "claim_time")


@dataclass(frozen=True, slots=True)
class TaskEvent:
    """One thing that happened to a task."""

    kind: EventKind
    task_id: str
    time: datetime  #: by the server's clock
    queue: str | None = None  #: None where the task was gone when the event was read
    run_id: str | None = None
    worker_id: str | None = None
    attempt: int | None = None
    #: What the task is from then on, where that changed with it; a final status is its end.
    task_status: TaskStatus | None = None
    reason: str | None = None  #: of a run that did not succeed
    progress: float | None = None  #: 0 to 1
    message: str | None = None  #: beside the progress
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
    updated: Document = change["updateDescription"].get("updatedFields", {})
    return _with_status(list(_of_runs(updated, task_id, time, queue, document)), updated, task_id, time, queue)


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
    updated: Document, task_id: str, time: datetime, queue: str | None, document: Document
) -> Iterator[TaskEvent]:
    for run, changed in _changed_runs(updated, runs_in(dict(document)), time):
        status, progress = changed.get("status"), run.get("progress")
        if "progress" in changed and isinstance(progress, Mapping):
            yield _event(EventKind.PROGRESS, run, progress, task_id, time, queue)
        if status in _OF_RUN:
            yield _event(_OF_RUN[status], {**run, **changed}, {}, task_id, time, queue)


def _event(
    kind: EventKind, run: Document, progress: Document, task_id: str, time: datetime, queue: str | None
) -> TaskEvent:
    own = next((run[name] for name in _TIMES if isinstance(run.get(name), datetime)), time)
    fraction = progress.get("fraction")
    return TaskEvent(
        kind,
        task_id,
        time if kind is EventKind.PROGRESS else own,
        queue,
        run_id=run.get("run_id"),
        worker_id=run.get("worker_id"),
        attempt=run.get("attempt"),
        reason=run.get("fail_reason") if kind is not EventKind.PROGRESS else None,
        progress=float(fraction) if isinstance(fraction, int | float) else None,
        message=progress.get("message"),
    )


def _changed_runs(updated: Document, runs: Sequence[Document], time: datetime) -> Iterator[tuple[Document, Document]]:
    """Yield each run that the change touched, as far as it is known, and what was changed of it; the oldest first."""
    changed: dict[int, dict[str, Any]] = {}
    added: set[int] = set()
    for path, value in updated.items():
        matched = _RUN_FIELD.match(path)
        if matched is None:
            continue
        place, field = int(matched[1]), matched[2]
        if field is None and isinstance(value, Mapping):
            changed.setdefault(place, {}).update(value)
            added.add(place)
        elif field == "progress":
            changed.setdefault(place, {})[field] = None  # it may be a part of it: the document tells the whole
        elif field is not None:
            changed.setdefault(place, {})[field] = value
    # Where old runs were left out, others stand in their places: told field by field, or as a whole array.
    moved = [fields for place, fields in sorted(changed.items()) if "run_id" in fields and place not in added]
    whole = updated.get(_RUNS)
    if moved or isinstance(whole, list):
        known = {run.get("run_id"): run for run in runs}
        stand = [{**known.get(fields["run_id"], {}), **fields} for fields in moved] or whole
        yield from _just_claimed([run for run in stand or () if isinstance(run, Mapping)], updated, time)
        return
    for place in sorted(changed):
        yield _run_at(place, changed[place], runs), changed[place]


def _run_at(place: int, changed: Document, runs: Sequence[Document]) -> Document:
    """Return the run that stood there when it was changed: runs may have been left out since."""
    if "run_id" in changed:
        return changed
    for name in ("success_time", "fail_time"):
        if name in changed:
            same = [r for r in runs if r.get(name) == changed[name] and r.get("status") == changed.get("status")]
            at_place = runs[place] if place < len(runs) else {}
            return at_place if at_place in same or not same else same[0]
    return runs[place] if place < len(runs) else {}


def _just_claimed(runs: Sequence[Document], updated: Document, time: datetime) -> Iterator[tuple[Document, Document]]:
    """Yield the run that a claim has added to an array that was written whole, after those that it closed."""
    running = [run for run in runs if run.get("status") == RunStatus.RUNNING.value and "claim_time" in run]
    newest = max(running, key=lambda run: run["claim_time"], default=None)
    if newest is None:
        return
    claimed_at = newest["claim_time"]
    if not _is_claim(updated, newest, time):
        return  # claimed before: it was something else that rewrote the array
    for run in runs:
        if run.get("status") == RunStatus.TIMEOUT.value and run.get("fail_time") == claimed_at:
            yield run, run
    yield newest, newest


def in_oplog(instant: datetime) -> Timestamp:
    """Return an instant as the oplog counts; raise ValueError or OverflowError."""
    return Timestamp(instant, 0)


def _is_claim(updated: Document, run: Document, time: datetime) -> bool:
    """Whether the change that rewrote the runs is the one that claimed this."""
    if "params" in updated or updated.get("task_state.failed_cnt") == 0:
        return False  # published again, and cleaned
    says = (
        updated.get("quiet_time") == run["claim_time"],
        updated.get("task_state.next_preempt_time") == run.get("ping_expire_time"),
        updated.get(_STATUS) == TaskStatus.RUNNING.value,
        time - run["claim_time"] <= _AT_ONCE,
    )
    return any(says)


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
    runs = {f"fullDocument.{_RUNS}.{field}": 1 for field in _RUN_FIELDS}
    return [*stages, {"$project": {**dict.fromkeys(kept, 1), **runs}}]


def _id() -> dict[str, Any]:
    """Return the task's id where it is text: stages may be reordered."""
    return {"$cond": [{"$eq": [{"$type": "$documentKey._id"}, "string"]}, "$documentKey._id", ":"]}
