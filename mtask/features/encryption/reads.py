"""Decrypts what a client has read, in place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from mtask.features.encryption import decrypt as unsealing
from mtask.features.schedules.rules import Schedule
from mtask.kernel.document.task import Task
from mtask.kernel.driver.operation import Operation
from mtask.search.partial import FoundTasks, TaskFields, fields_of

Document = dict[str, Any]


def opening(result: Any) -> Operation[None] | None:
    """Return the operation that decrypts the tasks or schedules in a result; None: it holds neither."""
    several = _several(result)
    tasks = [one for one in several if isinstance(one, Task)]
    if tasks:
        return unsealing.open_tasks(tasks)
    schedules = [one for one in several if isinstance(one, Schedule)]
    return unsealing.open_schedules(schedules) if schedules else None


def _several(result: Any) -> Sequence[Any]:
    if isinstance(result, Task | Schedule):
        return [result]
    if isinstance(result, list):
        return result
    if isinstance(result, FoundTasks):
        return list(result.tasks.values())
    inner = getattr(result, "tasks", None) or getattr(result, "task", None)
    return inner if isinstance(inner, list | tuple) else [inner]


def read_fields(
    read: Callable[[list[str]], Operation[list[Document]]], asked: Sequence[str]
) -> Operation[list[TaskFields]]:
    """Read these fields of tasks with the query `read`, and decrypt them."""
    extra = yield from unsealing.extra_fields(asked)
    wanted = [*asked, *extra]
    rows = fields_of((yield from read(wanted)), wanted)
    if not extra:
        return rows
    found = []
    for row in rows:
        values = yield from unsealing.open_fields(row.id, dict(row), asked)
        found.append(TaskFields(row.id, row.create_time, values))
    return found
