"""`mtask purge`: removes many finished tasks."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from mtask.cli import failures, values
from mtask.cli.context import Cli
from mtask.cli.options import command
from mtask.cli.tasks.find import separated
from mtask.errors import InvalidInput

PANEL = "Tasks"
#: Between two remarks on how far it has come.
_TOLD_EVERY = 10_000


def register(app: typer.Typer) -> None:
    """Add the command."""
    command(app, "purge", panel=PANEL)(purge)


def purge(
    cli: Cli,
    status: Annotated[
        list[str],
        typer.Option(
            "--status",
            "-s",
            metavar="STATUS",
            help="SUCCESS, FAIL, CANCELED, all three by default, or INIT; repeatable.",
            show_default=False,
        ),
    ] = [],  # noqa: B006 typer reads it
    name: Annotated[
        list[str], typer.Option("--name", "-n", metavar="NAME", help="Name; repeatable.", show_default=False)
    ] = [],  # noqa: B006
    queue: Annotated[
        list[str], typer.Option("--queue", metavar="QUEUE", help="Queue; repeatable.", show_default=False)
    ] = [],  # noqa: B006
    older_than: Annotated[
        str | None, typer.Option("--older-than", metavar="DURATION", help="Finished, or created, so long ago.")
    ] = None,
    limit: Annotated[int, typer.Option("--limit", "-l", min=0, help="How many at most; 0 = all.")] = 0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only count.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> int:
    """Remove finished tasks, in batches, beside workers at work.

    Asks first; in a script say --yes.
    """
    client = cli.client()
    given = {
        "status": [text.upper() for text in separated(status)] or None,
        "name": separated(name) or None,
        "queue": separated(queue) or None,
        "older_than": None if older_than is None else values.duration(older_than, "older_than"),
    }
    found = client.purge(**given, limit=limit, dry_run=True)  # type: ignore[arg-type]
    if dry_run or not found:
        cli.answer({"removed": 0, "found": found}, f"{found:,} tasks would be removed" if found else "nothing matches")
        return failures.OK
    if not yes:
        if not sys.stdin.isatty():
            raise InvalidInput(f"{found:,} tasks would be removed: say --yes where nobody can be asked.", field="yes")
        if not typer.confirm(f"Remove {found:,} tasks from {client.database_name}?", err=True):
            cli.notice("not removed")
            return failures.OTHER
    removed = 0
    while True:
        most = min(_TOLD_EVERY, limit - removed) if limit else _TOLD_EVERY
        now = client.purge(**given, limit=most)  # type: ignore[arg-type]
        removed += now
        if now < most or removed == limit:
            break
        cli.notice(f"{removed:,} of {found:,} removed")
    cli.answer({"removed": removed, "found": found}, f"{removed:,} tasks removed")
    return failures.OK
