"""Waits for several tasks: which of them to read next, how long to pause, and which have ended."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from itertools import islice

from mtask.arguments.pointers import TaskPointer, ids_of
from mtask.client import views
from mtask.client.requests import WaitPolicy, wait_policy
from mtask.errors import InvalidInput, TaskNotFound, WaitTimeout
from mtask.features.events.task_events import EventKind, TaskEvent
from mtask.kernel.document.status import FINAL
from mtask.kernel.document.task import Task
from mtask.kernel.driver.operation import Operation
from mtask.kernel.operations import change as queries
from mtask.search.partial import fields_of

#: The number of further tasks that are read when an event has told that one has ended.
_MORE = 200
#: The interval at which a task is read whose handler goes on for long after its SUCCESS, in seconds.
_VALUE_EVERY = 1.0


@dataclass(slots=True)
class WaitForMany:
    """How a client waits for several tasks: as `WaitPolicy` for one, with one stream of events for all."""

    task_ids: list[str]  #: as the caller gave them
    timing: WaitPolicy
    #: The tasks that have not ended, with their creation times. A creation time distinguishes a task from a later one
    #: with the same key. None: the task was not read yet.
    pending: dict[str, datetime | None]
    #: Whether the next read is of all pending tasks. Else it is of those that an event has ended, and a few more.
    is_to_read_all: bool = True
    told: set[str] = field(default_factory=set)
    statuses: dict[str, str] = field(default_factory=dict)
    removed: set[str] = field(default_factory=set)
    #: The tasks that have ended, and whose handlers are still to return their values. No event tells of these.
    owing: set[str] = field(default_factory=set)

    def read_all(self) -> None:
        """Let the next read be of all pending tasks."""
        self.is_to_read_all = True

    def note(self, event: TaskEvent | None) -> None:
        """Let the next read be of the task that the event ended. Without an event, let it be of all tasks."""
        if event is None and self.owing:
            self.read_owing()
        elif event is None:
            self.read_all()
        elif event.task_id in self.pending and (event.is_end or event.kind is EventKind.REMOVED):
            self.told.add(event.task_id)
            if event.kind is EventKind.REMOVED:
                self.removed.add(event.task_id)

    def is_value_near(self) -> bool:
        """Whether a task has just ended, and its handler is still to return its value. Mostly that comes at once."""
        return bool(self.owing) and self.timing.is_hurrying

    def read_owing(self) -> None:
        """Let the next read be of the tasks whose handlers are still to return their values."""
        self.told |= self.owing

    def patience(self, elapsed: float) -> float | None:
        """Return the seconds to wait for an event before the next read. None: do not wait for an event."""
        patience = self.timing.patience(elapsed)
        return min(patience, _VALUE_EVERY) if self.owing and patience is not None else patience

    def next_to_read(self) -> list[str]:
        """Return the tasks to read next. Tasks often end together, so some are read before their events come."""
        told, self.told = self.told, set()
        if self.is_to_read_all:
            self.is_to_read_all = False
            return list(self.pending)
        return list({**dict.fromkeys(told), **dict.fromkeys(islice(self.pending, _MORE))}) if told else []

    def give_up(self) -> WaitTimeout:
        """Return the error for a wait whose time is up."""
        first, *others = self.pending
        return WaitTimeout(first, self.statuses.get(first, "INIT"), self.timing.timeout or timedelta(0), others)


def wait_for_many(
    pointers: Iterable[TaskPointer], timeout: timedelta | float | None, tenant: str | None = None
) -> WaitForMany:
    """Check the arguments of a wait; raise InvalidInput."""
    task_ids = ids_of(pointers, tenant)
    timing = wait_policy("", timeout)
    pending: dict[str, datetime | None] = dict.fromkeys(task_ids)
    return WaitForMany(task_ids, timing, pending)


def wait_for_any(
    pointers: Iterable[TaskPointer], timeout: timedelta | float | None, tenant: str | None = None
) -> WaitForMany:
    """Check the arguments of a wait for the first of several tasks; raise InvalidInput if there are no tasks."""
    waiting = wait_for_many(pointers, timeout, tenant)
    if not waiting.task_ids:
        raise InvalidInput("give at least one task to wait for.", field="tasks")
    return waiting


def ended(waiting: WaitForMany) -> Operation[list[Task]]:
    """Read the tasks that are to be read next. Return those that have ended, in the order in which they ended.

    Raises TaskNotFound if a task does not exist, or was removed or replaced during the wait.
    """
    is_of_all = waiting.is_to_read_all
    asked = waiting.next_to_read()
    if is_of_all:
        yield from _look_at(waiting, asked)
        asked = [task_id for task_id in asked if waiting.statuses[task_id] in FINAL]
    tasks: list[Task] = []
    owing, waiting.owing = waiting.owing, waiting.owing.difference(asked)
    for document in (yield from queries.get_ended(asked)):
        task = views.task_of(document)
        _check_same(waiting, task.id, task.task_state.create_time)
        if not task.is_complete:
            waiting.owing.add(task.id)
            if task.id not in owing:
                waiting.timing.hurry()
            continue
        tasks.append(task)
        del waiting.pending[task.id]
    gone = [task_id for task_id in asked if task_id in waiting.removed]
    if gone:
        raise TaskNotFound(gone[0])
    return sorted(tasks, key=lambda task: task.task_state.finish_time or task.task_state.create_time)


def _look_at(waiting: WaitForMany, task_ids: list[str]) -> Operation[None]:
    """Read the statuses of these tasks."""
    rows = {row.id: row for row in fields_of((yield from queries.get_many(task_ids, ["status"])), ["status"])}
    for task_id in task_ids:
        if task_id not in rows:
            raise TaskNotFound(task_id)
        _check_same(waiting, task_id, rows[task_id].create_time)
        waiting.statuses[task_id] = str(rows[task_id]["status"])


def _check_same(waiting: WaitForMany, task_id: str, create_time: datetime | None) -> None:
    first = waiting.pending[task_id]
    if task_id in waiting.removed or first not in (None, create_time):
        raise TaskNotFound(task_id)
    waiting.pending[task_id] = create_time
