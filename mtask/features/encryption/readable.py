"""Readable values in encrypted tasks: each is refused, because who may write to the database can put one there."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from mtask.kernel.document.parts import Sealed, is_sealed, refused, sealed_in

if TYPE_CHECKING:
    from mtask.kernel.document.task import Task

#: The last parts of the fields that hold what must be encrypted.
_HIDDEN = frozenset({"params", "returns", "message", "v"})


def refuse_readable(task: Task, prescribes: Callable[[str, str], bool] | None = None) -> None:
    """Refuse in place the readable values of a task that says that it is encrypted, or that must be.

    `prescribes`: whether tasks of a queue and with a key must be encrypted.
    """
    following = task.again
    if following is not None and must_be_sealed(following.sealed, following.queue, task.key, prescribes):
        refuse_content(task.id, following)
    if not must_be_sealed(task.sealed, task.queue, task.key, prescribes):
        return
    refuse_content(task.id, task)
    for former in task.former_params:
        _refuse_params(task.id, former)
    for run in task.runs:
        if run.returns is not None and not isinstance(run.returns, Sealed):
            run.returns = refused(task.id, "returns")
        if run.progress is not None and not isinstance(run.progress.message, Sealed | None):
            run.progress.message = refused(task.id, "message")


def must_be_sealed(sealed: Any, queue: str, key: str, prescribes: Callable[[str, str], bool] | None) -> bool:
    """Whether readable values are refused."""
    return sealed is not None or (prescribes is not None and prescribes(queue, key))


def refuse_content(task_id: str, part: Any) -> None:
    """Refuse the readable params and lookups of a task, of its next round or of a schedule, in place."""
    _refuse_params(task_id, part)
    for entry in part.lookup or ():
        if not isinstance(entry.v, Sealed):
            entry.v = refused(task_id, f"lookup {entry.k}")


def _refuse_params(task_id: str, part: Any) -> None:
    if isinstance(part.params, Sealed):
        return
    calls = _calls_in(part.params)
    if calls is None:
        part.params = refused(task_id, "params")
    else:
        calls[:] = _sealed_calls(task_id, calls)


def _calls_in(params: Any) -> list[Any] | None:
    """Return the collected calls, if some are encrypted and there is nothing else in these params."""
    calls = params.get("calls") if type(params) is dict and len(params) == 1 else None
    return calls if type(calls) is list and any(isinstance(call, Sealed) for call in calls) else None


def _sealed_calls(task_id: str, calls: list[Any]) -> list[Sealed]:
    return [call if isinstance(call, Sealed) else refused(task_id, "params") for call in calls]


def without_readable(task_id: str, name: str, value: Any, *, is_hidden: bool = False) -> Any:
    """Return a field of a document that must be encrypted, with a refusal in place of each value that is not."""
    if value is None or isinstance(value, Sealed) or is_sealed(value):
        return value
    last = name.rpartition(".")[2]
    if last == "params" and (calls := _calls_in(sealed_in(value))) is not None:
        return {"calls": _sealed_calls(task_id, calls)}
    is_hidden = is_hidden or last in _HIDDEN
    if isinstance(value, list):  # the values of all runs, for example
        return [without_readable(task_id, "", each, is_hidden=is_hidden) for each in value]
    if is_hidden:
        return refused(task_id, name)
    if isinstance(value, dict):
        return {inner: without_readable(task_id, inner, each) for inner, each in value.items()}
    return value
