"""`mtask result`."""

from __future__ import annotations

import typer

from mtask.cli import values
from mtask.cli.context import Cli
from mtask.cli.options import KeyArgument, TaskArgument, TimeoutFlag, command, name_and_key
from mtask.cli.output import compact
from mtask.kernel.driver.extended_json import extended

PANEL = "Tasks"


def register(app: typer.Typer) -> None:
    """Add the command."""
    command(app, "result", panel=PANEL)(result)


def result(
    cli: Cli,
    name: TaskArgument,
    key: KeyArgument = None,
    timeout: TimeoutFlag = None,
) -> None:
    """Wait until a task has ended, and print what its handler returned, as JSON.

    The exit code is 8 if the task ended as FAIL, 9 if it was CANCELED, 6 after the timeout, and 4 if no such task
    exists.
    """
    limit = None if timeout is None else values.duration(timeout, "timeout")
    named = name_and_key(cli, name, key)
    returns = cli.client(reads_only=True).result(*named, timeout=limit)
    cli.answer({"task_id": cli.task_id(*named), "returns": extended(returns)}, compact(returns))
