"""`mtask purge` removes many finished tasks."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from mtask.arguments.criteria import NameCriteria
from mtask.cli import failures, values
from mtask.cli.context import Cli
from mtask.cli.options import command
from mtask.errors import InvalidInput

PANEL = "Tasks"
#: The number of tasks to remove between two messages about the progress.
_REMARK_EVERY = 10_000


def register(app: typer.Typer) -> None:
    """Add the command."""
    command(app, "purge", panel=PANEL)(purge)


def purge(
    cli: Cli,
    *,
    status: Annotated[
        list[str],
        typer.Option(
            "--status",
            "-s",
            metavar="STATUS",
            help="SUCCESS, FAIL or CANCELED (default: all three), or INIT; repeatable.",
            show_default=False,
        ),
    ] = [],  # noqa: B006 typer reads it
    named: NameCriteria,
    older_than: Annotated[
        str | None, typer.Option("--older-than", metavar="DURATION", help="Time since they finished, or were created.")
    ] = None,
    limit: Annotated[int, typer.Option("--limit", "-l", min=0, help="Largest number to remove; 0 = all.")] = 0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Count the tasks and remove none.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")] = False,
) -> int:
    """Remove finished tasks in batches. Workers may run meanwhile.

    The command asks for confirmation. In a script, give --yes.
    """
    client = cli.client()
    given = {
        **named,
        "status": [text.upper() for text in values.separated(status)] or None,
        "older_than": None if older_than is None else values.duration(older_than, "older_than"),
    }
    found = client.purge(**given, limit=limit, dry_run=True)  # type: ignore[arg-type]
    if dry_run or not found:
        cli.answer({"removed": 0, "found": found}, f"{found:,} tasks would be removed" if found else "nothing matches")
        return failures.OK
    if not yes:
        if not sys.stdin.isatty():
            raise InvalidInput(
                f"{found:,} tasks would be removed: without a terminal, confirm with --yes.", field="yes"
            )
        if not typer.confirm(f"Remove {found:,} tasks from {client.database_name}?", err=True):
            cli.notice("not removed")
            return failures.OTHER
    removed = 0
    while True:
        most = min(_REMARK_EVERY, limit - removed) if limit else _REMARK_EVERY
        now = client.purge(**given, limit=most)  # type: ignore[arg-type]
        removed += now
        if now < most or removed == limit:
            break
        cli.notice(f"{removed:,} of {found:,} removed")
    cli.answer({"removed": removed, "found": found}, f"{removed:,} tasks removed")
    return failures.OK
