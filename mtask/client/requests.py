"""The clients' requests: each checks its arguments at once and returns the operation to run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from mtask.arguments.pointers import TaskPointer, id_of, ids_of, position_of
from mtask.arguments.publish import UNCHANGED, Declarations, Preparation, TaskRef, TaskSpec, new_params
from mtask.client import views
from mtask.client.versions import is_etag_of
from mtask.errors import (
    DependencyFailed,
    InvalidInput,
    MalformedTask,
    OperationFailed,
    PreconditionFailed,
    ResultLost,
    TaskCanceled,
    TaskFailed,
    TaskNotFinished,
    TaskNotFound,
    TaskRunning,
    shown,
)
from mtask.kernel.document.identity import check_text
from mtask.kernel.document.parts import Sealed
from mtask.kernel.document.status import TaskStatus
from mtask.kernel.document.task import Task, WorkerDocument
from mtask.kernel.driver.codec import GET_CODEC, Codec
from mtask.kernel.driver.operation import Operation
from mtask.kernel.operations import change as queries
from mtask.kernel.operations import encode, workers
from mtask.kernel.operations.relays import settle_all, settle_marked
from mtask.kernel.statements import filters
from mtask.kernel.statements.publish import NewParams
from mtask.lazy import LazyModule
from mtask.search.partial import FoundTasks, TaskFields, check_fields, read_fields

if TYPE_CHECKING:
    from mtask.features.events import task_events as events
    from mtask.features.events.task_events import TaskEvent
    from mtask.features.flows import change as flow_operating
    from mtask.features.flows import retention
    from mtask.parts import relays
else:
    # A plain publish needs none of these.
    relays = LazyModule("mtask.parts.relays")
    retention = LazyModule("mtask.features.flows.retention")
    flow_operating = LazyModule("mtask.features.flows.change")
    events = LazyModule("mtask.features.events.task_events")

T = TypeVar("T")
#: The most attempts of a change that another change of the task disturbs.
_RACES = 10
#: The task after which a search goes on: the last task of the former page, or its id. None: begin with the newest.
After: TypeAlias = TaskPointer | None

#: Times of a wait, in seconds. _LASTS: the time after which the wait follows the task's events. _EVENT_WAIT: the length
#: of one request for events. _READ_EVERY: the interval at which the task is read while its events are followed.
_LASTS, _EVENT_WAIT, _READ_EVERY = 1.0, 1.0, 30.0
#: The first and the longest pause between two reads of a task that is waited for, in seconds.
_FIRST_PAUSE, _LONGEST_PAUSE = 0.01, 0.5


def get(task_id: str) -> Operation[Task]:
    """Return one task."""
    return views.task_of((yield from queries.get(task_id)))


def get_many(pointers: Iterable[TaskPointer], tenant: str | None = None) -> Operation[FoundTasks[Task]]:
    """Return several tasks."""
    task_ids = list(dict.fromkeys(ids_of(pointers, tenant)))

    def operation() -> Operation[FoundTasks[Task]]:
        documents = {document["_id"]: document for document in (yield from queries.get_many(task_ids))}
        found: FoundTasks[Task] = FoundTasks({})
        for task_id in task_ids:
            if task_id not in documents:
                found.missing.append(task_id)
                continue
            try:
                found.tasks[task_id] = views.task_of(documents[task_id])
            except MalformedTask as error:
                found.malformed[task_id] = error.reason
        return found

    return operation()


def get_many_fields(
    pointers: Iterable[TaskPointer], fields: Sequence[str], tenant: str | None = None
) -> Operation[FoundTasks[TaskFields]]:
    """Return these fields of several tasks."""
    task_ids, asked = list(dict.fromkeys(ids_of(pointers, tenant))), check_fields(fields)

    def operation() -> Operation[FoundTasks[TaskFields]]:
        found = yield from read_fields(lambda wanted: queries.get_many(task_ids, wanted), asked)
        rows = {row.id: row for row in found}
        there = {task_id: rows[task_id] for task_id in task_ids if task_id in rows}
        return FoundTasks(there, [task_id for task_id in task_ids if task_id not in rows])

    return operation()


def find(
    criteria: Mapping[str, Any], limit: int, after: After = None, tenant: str | None = None
) -> Operation[list[Task]]:
    """Search, newest first."""
    most, begin = views.check_limit(limit), _begin(after, tenant)

    def operation() -> Operation[list[Task]]:
        wanted = yield from encode.criteria(criteria)
        return views.tasks_of((yield from queries.find(wanted, most, None, (yield from begin))))

    return operation()


def count(criteria: Mapping[str, Any]) -> Operation[int]:
    """Count the tasks that match."""
    return (yield from queries.count((yield from encode.criteria(criteria))))


def find_fields(
    criteria: Mapping[str, Any], limit: int, fields: Sequence[str], after: After = None, tenant: str | None = None
) -> Operation[list[TaskFields]]:
    """Search, newest first. Return only these fields of each task."""
    most, begin, asked = views.check_limit(limit), _begin(after, tenant), check_fields(fields)

    def operation() -> Operation[list[TaskFields]]:
        wanted, after_task = (yield from encode.criteria(criteria)), (yield from begin)
        return (yield from read_fields(lambda names: queries.find(wanted, most, names, after_task), asked))

    return operation()


def _begin(after: After, tenant: str | None) -> Operation[tuple[datetime, str] | None]:
    """Check `after` and return the operation that finds the position where a search goes on."""
    given = position_of(after) if isinstance(after, Task | TaskFields) else None
    task_id = None if after is None else id_of(after, tenant)

    def operation() -> Operation[tuple[datetime, str] | None]:
        if given is not None or task_id is None:
            return given
        return position_of(TaskFields(task_id, (yield from queries.created(task_id)), {}))

    return operation()


def result_of(task: Task) -> Any:
    """Return what the handler of a finished task returned.

    Raises ResultLost, DecryptionFailed, TaskFailed or TaskCanceled.
    """
    if task.status is TaskStatus.SUCCESS:
        if task.returns_lost is not None:
            raise ResultLost(task.id, task.returns_lost)
        if isinstance(task.returns, Sealed) and task.returns.is_final:
            raise task.returns.error  # as a text it could be taken for what the handler returned
        return task.returns
    if task.status is TaskStatus.CANCELED:
        raise TaskCanceled(task.id, task.fail_reason)
    raise TaskFailed(task.id, task.fail_reason)


def cancel(task_id: str, if_match: str | None = None) -> Operation[Task]:
    """Cancel a task."""
    return matching(task_id, if_match, lambda also: _changed(task_id, queries.cancel(task_id, also)))


def matching(
    task_id: str, if_match: str | None, change: Callable[[filters.Filter | None], Operation[T]]
) -> Operation[T]:
    """Make a change only if the task still is of the version `if_match`; else raise PreconditionFailed.

    The change tests the version in its own write, so no other change can come between.
    """
    if if_match is None:
        return change(None)
    if not isinstance(if_match, str):
        raise InvalidInput(f"if_match is text from client.etag, not {type(if_match).__name__}.", field="if_match")

    def operation() -> Operation[T]:
        for _ in range(_RACES):
            document = yield from queries.get(task_id)
            if not is_etag_of((yield from _readable(document)), if_match):
                break
            try:
                return (yield from change(filters.unchanged(document)))
            except (TaskNotFound, TaskNotFinished) as error:
                now = yield from queries.get(task_id)
                if isinstance(error, TaskNotFinished) and is_etag_of((yield from _readable(now)), if_match):
                    raise  # this is the version that the caller means, and it has not finished
        raise PreconditionFailed(task_id)

    return operation()


def _readable(document: queries.Document) -> Operation[Task]:
    task = views.task_of(document)
    codec: Codec = yield GET_CODEC
    yield from codec.open_tasks([task])
    return task


def _changed(task_id: str, change: Operation[queries.Document]) -> Operation[Task]:
    """Make the change and return the changed task. If the document prevents the change, raise MalformedTask."""
    try:
        document = yield from change
        yield from settle_marked(relays.RELAYS, document)
        return views.task_of(document)
    except (OperationFailed, KeyError, TypeError):
        views.task_of((yield from queries.get(task_id)))
        raise


def run_again(
    task: TaskRef,
    task_id: str,
    *,
    everything: bool,
    params: Any = UNCHANGED,
    if_match: str | None = None,
    known: Declarations | None = None,
) -> Operation[Task]:
    """Open a finished task for a new round, perhaps with other params. `known` tells what handlers declare."""
    if params is UNCHANGED:
        return _opened_again(task_id, [], if_match, everything=everything)
    preparation = Preparation(lambda known: new_params(task, params, known), [TaskSpec(task)], known)

    def operation() -> Operation[Task]:
        new = yield from preparation.complete()
        return (yield from _opened_again(task_id, [new], if_match, everything=everything))

    return operation()


def _opened_again(task_id: str, new: Sequence[NewParams], if_match: str | None, *, everything: bool) -> Operation[Task]:
    def change(also: filters.Filter | None) -> Operation[Task]:
        return _opened(task_id, _run_again(task_id, new, also, everything=everything))

    return matching(task_id, if_match, change)


def _run_again(
    task_id: str, new: Sequence[NewParams], also: filters.Filter | None, *, everything: bool
) -> Operation[queries.Document]:
    waits = yield from flow_operating.check_dependencies(task_id)
    codec: Codec = yield GET_CODEC
    if new and not codec.is_plain:
        # They are encoded for the queue in which the task is now, or for its tenant.
        document = yield from queries.get(task_id)
        encoded = yield from encode.params((yield from _readable(document)), new[0].params)
        new = [encoded._replace(declared=new[0].declared, version=new[0].version)]
        also = {**(also or {}), "queue": document["queue"], "lookup": document.get("lookup")}
    return (yield from queries.run_again(task_id, everything=everything, waits=waits, params=new, also=also))


def _opened(task_id: str, change: Operation[queries.Document]) -> Operation[Task]:
    opened = yield from _changed(task_id, change)
    if opened.status is not TaskStatus.WAITING:
        return opened
    now = yield from get(task_id)
    if now.status.is_final and now.flow is not None and now.flow.held_by is not None:
        raise DependencyFailed(task_id, now.flow.held_by)
    return now


def remove(task_id: str, if_match: str | None = None) -> Operation[bool]:
    """Remove a task. A step of a flow is canceled first. The others that its end concerns are told."""
    if if_match is None:
        return _removed(task_id, None)
    return matching(task_id, if_match, partial(_removed, task_id))


def _removed(task_id: str, also: filters.Filter | None) -> Operation[bool]:
    if (yield from queries.remove(task_id) if also is None else queries.remove_unchanged(task_id, also)):
        return True
    try:
        canceled = yield from _changed(task_id, queries.cancel(task_id, also))
    except TaskNotFound:
        if also is not None:
            raise
        return False
    yield from settle_all(relays.RELAYS, [task_id])
    if (yield from queries.remove_step(task_id)):
        if canceled.flow is not None and canceled.flow.head is not None:
            yield from retention.appoint_head(canceled.flow.key)
        return True
    raise TaskRunning(canceled.id)


def update_option(task_id: str, changes: Mapping[str, Any], if_match: str | None = None) -> Operation[Task]:
    """Change options."""
    if not changes:
        raise InvalidInput("name at least one option to change.", field="option")
    return matching(task_id, if_match, lambda also: _changed(task_id, queries.update_option(task_id, changes, also)))


def list_workers(*, live_only: bool) -> Operation[list[WorkerDocument]]:
    """Return workers on record."""
    return views.workers_of((yield from workers.live() if live_only else workers.every()))


def control_worker(worker_id: str, change: Mapping[str, Any]) -> Operation[WorkerDocument]:
    """Send a worker the order to stop or to change its concurrency."""
    checked = check_text("worker_id", worker_id)
    concurrency = change.get("concurrency")
    if concurrency is not None and (isinstance(concurrency, bool) or not isinstance(concurrency, int)):
        raise InvalidInput(f"concurrency {shown(concurrency)}: use a whole number, 0 to pause.", field="concurrency")
    if concurrency is not None and not 0 <= concurrency <= 10_000:
        raise InvalidInput(f"concurrency {shown(concurrency)}: use 0 (pause) to 10000.", field="concurrency")
    try:
        return views.worker_of((yield from workers.control(checked, change)))
    except OperationFailed:  # the worker's `control` may be malformed
        views.worker_of((yield from workers.find(checked)) or {"_id": checked})
        raise


@dataclass(slots=True)
class WaitPolicy:
    """How a client waits for a task. It reads the task every 10 to 500 ms. After 1 s, it follows the task's events."""

    task_id: str
    timeout: timedelta | None
    pause: float = _FIRST_PAUSE
    can_follow: bool = True
    #: The creation time of the awaited task. It distinguishes this task from a later one with the same key.
    create_time: datetime | None = None
    is_removed: bool = False
    #: Whether the task had ended when it was last read, and its handler was still to return its value. No event tells
    #: of that value, and mostly it comes at once.
    is_value_owed: bool = False

    def same(self, found: Task) -> Task:
        """Return the task that was read. Raise TaskNotFound if the awaited task was removed or replaced."""
        first, self.create_time = self.create_time, found.task_state.create_time
        if self.is_removed or first not in (None, self.create_time):
            raise TaskNotFound(self.task_id)
        is_owed = found.status.is_final and not found.is_complete
        if is_owed and not self.is_value_owed:
            self.hurry()
        self.is_value_owed = is_owed
        return found

    def hurry(self) -> None:
        """Let the next pauses be as short as the first ones."""
        self.pause = _FIRST_PAUSE

    def note(self, event: TaskEvent | None) -> None:
        """If the event is the removal of the task, set `is_removed`."""
        self.is_removed |= event is not None and event.kind is events.EventKind.REMOVED

    @property
    def is_hurrying(self) -> bool:
        """Whether the pauses are still shorter than the longest one."""
        return self.pause < _LONGEST_PAUSE

    def next_pause(self, elapsed: float) -> float | None:
        """Return the seconds to wait before the next read, or None when time is up."""
        pause, self.pause = self.pause, min(self.pause * 1.5, _LONGEST_PAUSE)
        if self.timeout is None:
            return pause
        left = self.timeout.total_seconds() - elapsed
        return None if left <= 0 else min(pause, left)

    def patience(self, elapsed: float) -> float | None:
        """Return the seconds to wait for an event before the next read. None: do not wait for an event."""
        if self.is_value_owed or not self.can_follow or elapsed < _LASTS:
            return None
        left = inf if self.timeout is None else self.timeout.total_seconds() - elapsed
        return None if left < 2 * _EVENT_WAIT else min(left - _EVENT_WAIT, _READ_EVERY)


def wait_policy(task_id: str, timeout: timedelta | float | None) -> WaitPolicy:
    """Return the policy of one wait; raise InvalidInput."""
    if timeout is None:
        return WaitPolicy(task_id, None)
    try:
        wait = timeout if isinstance(timeout, timedelta) else timedelta(seconds=timeout)
    except (TypeError, ValueError, OverflowError):
        wait = timedelta(-1)
    if isinstance(timeout, bool) or wait < timedelta(0):
        raise InvalidInput(f"timeout {shown(timeout)} is no length of time; use None for no limit.", field="timeout")
    return WaitPolicy(task_id, wait)
