"""`mtask cancel`, `retry`, `rerun`, `update` and `remove`: changes of one task."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Annotated

import typer
from rich.text import Text

from mtask.cli import failures
from mtask.cli.context import Cli
from mtask.cli.options import KeyArgument, TaskArgument, YesFlag, commands, is_confirmed, name_and_key
from mtask.cli.output import clean, status_text, task_document
from mtask.cli.tasks.show import changed_options
from mtask.client.sync import Client
from mtask.errors import InvalidInput, OperationFailed, TaskNotFound
from mtask.kernel.document.options import TaskOptions
from mtask.kernel.document.status import TaskStatus
from mtask.kernel.document.task import Task
from mtask.kernel.driver.extended_json import parse_extended


def _report(cli: Cli, task: Task, remark: str) -> None:
    cli.answer(task_document(task), Text.assemble(status_text(task.status), "  ", clean(task.id), "  ", remark))


def _changed(cli: Cli, named: tuple[str, str], change: Callable[[Client, str, str], Task]) -> Task:
    client = cli.client()
    try:
        return change(client, *named)
    except (OperationFailed, KeyError, TypeError):
        client.get(*named)  # if the document is malformed, this raises an error that says so
        raise


def cancel(cli: Cli, name: TaskArgument, key: KeyArgument = None) -> None:
    """Cancel a task. If a worker runs the task, ask that worker to stop.

    A finished task is not changed.
    """
    task = _changed(cli, name_and_key(cli, name, key), Client.cancel)
    if task.status is TaskStatus.CANCELED:
        remark = "canceled"
    elif task.task_state.cancel_requested:
        remark = (
            "cancel requested: the worker ends an async or isolated run; a handler in a thread goes on until it asks "
            "context.is_cancelled, and its result is dropped"
        )
    else:
        remark = "had ended before: nothing to cancel"
    _report(cli, task, remark)


def retry(
    cli: Cli,
    name: TaskArgument,
    key: KeyArgument = None,
    params: Annotated[
        str | None, typer.Option("--params", metavar="JSON", help="Run with these params; the former ones are kept.")
    ] = None,
) -> None:
    """Let a FAIL or CANCELED task run again. Its earlier failures no longer count."""
    given = {} if params is None else {"params": parse_extended(params, "params")}
    change = partial(Client.retry, **given)
    _report(cli, _changed(cli, name_and_key(cli, name, key), change), "runs again; failures so far no longer count")


def rerun(cli: Cli, name: TaskArgument, key: KeyArgument = None) -> None:
    """Let a finished task run again from the start, even if it succeeded."""
    _report(cli, _changed(cli, name_and_key(cli, name, key), Client.rerun), "runs again from the start")


def update(cli: Cli, options: TaskOptions, name: TaskArgument, key: KeyArgument = None) -> None:
    """Change some of a task's options.

    To change params, use `publish --if-exists update`.
    """
    named = name_and_key(cli, name, key)
    if not options:
        raise InvalidInput("name at least one option to change, such as --priority 5.", field="option")
    task = _changed(cli, named, partial(Client.update_option, **options))
    changed = changed_options(task.task_option)
    remark = (
        ", ".join(f"{option} {clean(value)}" for option, value in changed.items()) or "all options have their defaults"
    )
    _report(cli, task, remark)


def remove(
    cli: Cli,
    name: TaskArgument,
    key: KeyArgument = None,
    yes: YesFlag = False,
) -> int:
    """Remove a task, whatever its status. If the task runs, the run ends.

    On a terminal, the command asks for confirmation.
    """
    named = name_and_key(cli, name, key)
    task_id = cli.task_id(*named)
    if not yes and not is_confirmed(cli, f"Remove {clean(task_id)}?"):
        return failures.OTHER
    if not cli.client().remove(*named):
        raise TaskNotFound(task_id)
    cli.answer({"task_id": task_id, "removed": True}, f"removed  {clean(task_id)}")
    return failures.OK


register = commands("Tasks", {"cancel": cancel, "retry": retry, "rerun": rerun, "update": update, "remove": remove})
