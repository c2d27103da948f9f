"""`mtask breaker` holds back a queue after failures in a row."""

from __future__ import annotations

from typing import Annotated

import typer

from mtask.cli import values
from mtask.cli.context import Cli
from mtask.cli.options import commands
from mtask.cli.output import clean
from mtask.errors import InvalidInput


def breaker(
    cli: Cli,
    queue: Annotated[str, typer.Argument(metavar="QUEUE", help="A queue.", show_default=False)],
    failures: Annotated[
        int | None, typer.Option("--failures", metavar="NUMBER", help="Failures in a row, in one worker.")
    ] = None,
    wait: Annotated[str, typer.Option("--wait", metavar="DURATION", help="Time until one task is tried.")] = "30s",
    none: Annotated[bool, typer.Option("--none", help="Remove the breaker of the queue.")] = False,
    timeout: Annotated[
        str,
        typer.Option("--timeout", "-t", metavar="DURATION", help="Wait this long for every worker; else exit code 6."),
    ] = "60s",
) -> None:
    """Hold back a queue after failures in a row.

    After --wait, one task is tried: its success lets all go on, its failure doubles the wait, up to ten minutes.
    `mtask resume --queue QUEUE` lets all go on at once. `mtask controls` shows which breakers have opened.
    """
    if none == (failures is not None):
        raise InvalidInput("give --failures, or --none, and not both.", field="failures")
    read = values.duration(wait, "wait")
    control = cli.client().set_breaker(queue, failures, wait=read, timeout=values.duration(timeout, "timeout"))
    cli.answer(control.model_dump(by_alias=True), f"queue {clean(control.target)}  {control.breaker or 'no breaker'}")


register = commands("Workers", {"breaker": breaker})
