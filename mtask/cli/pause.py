"""`mtask pause`, `resume` and `controls`: what holds for a queue or a task name."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.text import Text

from mtask.cli import values
from mtask.cli.context import Cli
from mtask.cli.options import command
from mtask.cli.output import Column, clean, listing, relative
from mtask.model.controls import Control

PANEL = "Workers"
_Queue = Annotated[str | None, typer.Option("--queue", metavar="QUEUE", help="A queue.", show_default=False)]
_Name = Annotated[str | None, typer.Option("--name", "-n", metavar="NAME", help="A task name.", show_default=False)]
_Timeout = Annotated[
    str,
    typer.Option(
        "--timeout", "-t", metavar="DURATION", help="How long to wait until every worker goes by it; else exit code 6."
    ),
]


def register(app: typer.Typer) -> None:
    """Add the commands."""
    command(app, "pause", panel=PANEL)(pause)
    command(app, "resume", panel=PANEL)(resume)
    command(app, "controls", panel=PANEL)(controls)


def pause(cli: Cli, queue: _Queue = None, name: _Name = None, timeout: _Timeout = "60s") -> None:
    """Have no worker claim from a queue, or tasks of a name; what runs goes on.

    Returns when every live worker goes by it. It stays so until `mtask resume`.
    """
    limit = values.duration(timeout, "timeout")
    _told(cli, cli.client().pause(queue=queue, name=name, timeout=limit))


def resume(cli: Cli, queue: _Queue = None, name: _Name = None, timeout: _Timeout = "60s") -> None:
    """Let workers claim from a paused queue, or tasks of a paused name, again."""
    limit = values.duration(timeout, "timeout")
    _told(cli, cli.client().resume(queue=queue, name=name, timeout=limit))


def _told(cli: Cli, control: Control) -> None:
    word = "paused" if control.paused else "resumed"
    cli.answer(control.model_dump(by_alias=True), f"{word}  {control.kind} {clean(control.target)}")


def controls(cli: Cli) -> None:
    """List the queues and task names that are paused, or were."""
    client = cli.client(reads_only=True)
    found = client.controls()
    if cli.is_json:
        cli.json([control.model_dump(by_alias=True) for control in found])
        return
    if not found:
        cli.notice("nothing is paused, nor was")
        return
    now = client.server_time()
    columns = (Column("STATE"), Column("KIND"), Column("TARGET", gives_way=True), Column("SINCE"))
    rows: list[list[str | Text]] = [
        [
            Text("paused", style="yellow") if control.paused else "open",
            control.kind,
            control.target,
            relative(control.update_time, now),
        ]
        for control in found
    ]
    cli.say(*listing(columns, rows, cli.out.width))
