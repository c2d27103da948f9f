"""`mtask log` prints the action log."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer
from rich.text import Text

from mtask.cli import values
from mtask.cli.context import Cli
from mtask.cli.options import commands
from mtask.cli.output import Column, clean, listing, moment
from mtask.features.audit_log.client import Action
from mtask.features.audit_log.rules import DONE


def log(
    cli: Cli,
    who: Annotated[
        list[str],
        typer.Option("--who", metavar="NAME", help="User, service or token; repeatable.", show_default=False),
    ] = [],  # noqa: B006 typer reads it
    what: Annotated[
        list[str],
        typer.Option("--what", metavar="INTENT", help="pause, retry, 'stop worker', ...; repeatable."),
    ] = [],  # noqa: B006
    target: Annotated[
        list[str],
        typer.Option(
            "--target",
            metavar="KIND:ID",
            help="task:NAME:KEY, queue:mail, name:send_email, worker:ID, schedule:ID, flow:KEY or tasks; repeatable.",
            show_default=False,
        ),
    ] = [],  # noqa: B006
    since: Annotated[
        str | None, typer.Option("--since", metavar="DURATION", help="Not older than this: 90s, 2h, 7d.")
    ] = None,
    after: Annotated[
        str | None, typer.Option("--after", metavar="ID", help="Continue after this action, the last of a page.")
    ] = None,
    limit: Annotated[int, typer.Option("--limit", "-l", min=0, help="Largest number to list; 0 = all.")] = 50,
) -> None:
    """List who changed what, newest first: by Python, the command line and the web server. It goes back 90 days.

    Publishing tasks and the work of workers are not in this log.
    """
    client = cli.client(reads_only=True)
    begin = None if since is None else client.server_time() - values.duration(since, "since")
    found = client.actions(
        actor=who or None,
        intent=values.separated(what) or None,
        target=target or None,
        since=begin,
        limit=limit + 1 if limit else 0,
        after=after,
    )
    shown = found[:limit] if limit else found
    if cli.is_json:
        cli.json([asdict(action) for action in shown])
        return
    if not shown:
        cli.notice(f"the action log of database {client.database_name!r} holds no such action")
        return
    columns = (
        Column("TIME"),
        Column("WHO"),
        Column("VIA", leaves=1),
        Column("WHAT"),
        Column("TARGET", is_id=True),
        Column("DETAIL", wraps=True),
        Column("RESULT", wraps=True),
    )
    cli.say(*listing(columns, [_row(action) for action in shown], cli.out.width))
    if limit and len(found) > limit:
        cli.notice(f"more: --after {shown[-1].id}")


def _row(action: Action) -> list[str | Text]:
    result = Text("not known", style="yellow") if action.result is None else Text(clean(action.result))
    if action.result is not None and not action.result.startswith(DONE):
        result.stylize("red")
    return [moment(action.time), action.actor, action.via, action.intent, action.target, action.detail, result]


register = commands("Database", {"log": log})
