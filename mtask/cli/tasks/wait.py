"""`mtask wait`."""

from __future__ import annotations

import typer
from rich.text import Text

from mtask.cli import failures, values
from mtask.cli.context import Cli
from mtask.cli.options import KeyArgument, TaskArgument, TimeoutFlag, command, name_and_key
from mtask.cli.output import clean, compact, status_text, task_document
from mtask.kernel.document.status import TaskStatus
from mtask.kernel.document.task import Task

PANEL = "Tasks"
CODES = {
    TaskStatus.SUCCESS: failures.OK,
    TaskStatus.FAIL: failures.TASK_FAILED,
    TaskStatus.CANCELED: failures.TASK_CANCELED,
}


def register(app: typer.Typer) -> None:
    """Add the command."""
    command(app, "wait", panel=PANEL)(wait)


def wait(
    cli: Cli,
    name: TaskArgument,
    key: KeyArgument = None,
    timeout: TimeoutFlag = None,
) -> int:
    """Wait until a task has ended.

    The exit code is 0 for SUCCESS, 8 for FAIL, 9 for CANCELED, 6 after the timeout, and 4 if no such task exists.
    """
    limit = None if timeout is None else values.duration(timeout, "timeout")
    named = name_and_key(cli, name, key)
    client = cli.client(reads_only=True)
    if cli.flags.verbose:
        cli.notice(f"{clean(cli.task_id(*named))} is {client.get(*named).status}; waiting until it ends")
    task = client.wait(*named, timeout=limit)
    cli.answer(task_document(task), ended(task))
    return CODES.get(task.status, failures.OTHER)


def ended(task: Task) -> Text:
    """Return a line that describes a finished task."""
    line = Text.assemble(status_text(task.status), "  ", clean(task.id))
    if task.status is TaskStatus.SUCCESS and task.returns is not None:
        line.append(f"  returns {compact(task.returns, 200)}")
    elif task.status is TaskStatus.SUCCESS and task.returns_lost is not None:
        line.append(f"  its result is lost: {clean(task.returns_lost, 200)}", style="yellow")
    elif task.status is not TaskStatus.SUCCESS and task.fail_reason:
        line.append(f"  {clean(task.fail_reason)}", style="red")
    return line
