"""The ways in which a caller points at tasks: by id, by name and key, or by what another call returned."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from typing import TypeAlias

from mtask.arguments.publish import TaskRef
from mtask.errors import InvalidInput, TaskError, shown
from mtask.kernel.document.handlers import handler_of
from mtask.kernel.document.identity import check_name, split_task_id, stored_key, task_id_of
from mtask.kernel.document.task import Task
from mtask.kernel.operations.publish import Published
from mtask.search.partial import TaskFields

#: A task: its id NAME:KEY, a pair of its handler (or name) and its key, or a result of `publish`, `publish_many`,
#: `get` or `find`.
TaskPointer: TypeAlias = str | tuple[TaskRef, str] | Published | Task | TaskFields | TaskError


def identify(task: TaskRef, key: str, tenant: str | None = None) -> str:
    """Return the task's id; raise InvalidName or InvalidKey. `tenant`: whose key it is."""
    handler = handler_of(task)
    return task_id_of(handler.name if handler else check_name(task), stored_key(tenant, key))


def id_of(pointer: object, tenant: str | None = None) -> str:
    """Return the id of the task; raise InvalidInput. `tenant`: whose key a pair of name and key holds."""
    if isinstance(pointer, Published | TaskError):
        return pointer.task_id
    if isinstance(pointer, Task | TaskFields):
        return pointer.id
    if isinstance(pointer, str):
        return task_id_of(*split_task_id(pointer))
    if isinstance(pointer, tuple) and len(pointer) == 2:
        return identify(*pointer, tenant)
    raise InvalidInput(
        f"{shown(pointer)} names no task: give NAME:KEY, a pair of name and key, or a result of publish, get or find.",
        field="tasks",
    )


def ids_of(pointers: object, tenant: str | None = None) -> list[str]:
    """Return the ids of the tasks, in order; raise InvalidInput."""
    if isinstance(pointers, str) or not isinstance(pointers, Iterable):
        raise InvalidInput(f"give a list of tasks, not {type(pointers).__name__}.", field="tasks")
    return [id_of(pointer, tenant) for pointer in pointers]


def position_of(after: Task | TaskFields) -> tuple[datetime, str]:
    """Return the position of a task in a search, newest first: its create_time and its id; raise InvalidInput."""
    created = after.task_state.create_time if isinstance(after, Task) else after.create_time
    if created is None:
        raise InvalidInput(f"task {after.id} has no create_time, so no search goes on after it.", field="after")
    return created, after.id
