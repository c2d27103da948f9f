"""`mtask top`: queues, workers, rates, and the names whose runs fail or take long; live, or once for scripts."""

from __future__ import annotations

import os
import select
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from mtask.cli.context import Cli
from mtask.cli.options import command
from mtask.cli.output import clean
from mtask.client.sync import Client
from mtask.errors import DatabaseError, InvalidInput
from mtask.features.metrics.client import FleetMetrics
from mtask.features.metrics.picture import Picture, document

PANEL = "Workers"
#: The names are compared with what was read this long ago, in seconds.
_WINDOW = 300.0
_LEAST_INTERVAL, _MOST_INTERVAL = 0.5, 3600.0


def register(app: typer.Typer) -> None:
    """Add the command."""
    command(app, "top", panel=PANEL)(top)


def top(
    cli: Cli,
    once: Annotated[bool, typer.Option("--once", help="Print the state once, and end.")] = False,
    interval: Annotated[float, typer.Option("--interval", metavar="SECONDS", help="Time between two reads.")] = 2.0,
) -> None:
    """Show queues, workers, rates, and the names whose runs fail or take long, until q or Ctrl-C.

    Workers store what they counted every 10 s. With --json, or if the output is no terminal, the state is printed once.
    Then the table of names tells of all that was ever counted; else of the last five minutes at most.
    """
    if not _LEAST_INTERVAL <= interval <= _MOST_INTERVAL:  # also false for a NaN
        raise InvalidInput(
            f"--interval {interval:g}: use {_LEAST_INTERVAL:g} to {_MOST_INTERVAL:g} seconds.", field="interval"
        )
    client = cli.client(reads_only=True)
    if cli.is_json:
        cli.json(document(client.metrics(), client.database_name))
    elif once or not cli.out.is_terminal:
        cli.say(*Picture(client.metrics(), client.database_name).lines(cli.out.width))
    else:
        _show(cli, client, interval)


def _show(cli: Cli, client: Client, interval: float) -> None:
    history: deque[tuple[float, FleetMetrics]] = deque()
    try:
        with _keys() as keys, Live(console=cli.out, screen=True, auto_refresh=False) as live:
            while True:
                live.update(_look(cli.out, client, history), refresh=True)
                if keys.quits_within(interval):
                    return
    except KeyboardInterrupt:  # the usual way to end it
        return


def _look(screen: Console, client: Client, history: deque[tuple[float, FleetMetrics]]) -> Group:
    """Read the metrics, and return the picture of them. If the database is away, the last one stays."""
    trouble = None
    try:
        now = time.monotonic()
        history.append((now, client.metrics()))
        while len(history) > 2 and history[1][0] < now - _WINDOW:
            history.popleft()
    except DatabaseError as error:
        if not history:
            raise
        trouble = Text(clean(f"cannot be read now, tries again: {error}", screen.width), style="bold red")
    since = history[0][1] if len(history) > 1 else None
    picture = Picture(history[-1][1], client.database_name, since)
    height = screen.height - (trouble is not None)
    lines = picture.lines(screen.width, height)
    return Group(*([trouble] if trouble is not None else []), *lines)


class _Keys:
    """The keyboard. Without a terminal, there is none."""

    def __init__(self, stream: int | None) -> None:
        self._stream = stream

    def quits_within(self, seconds: float) -> bool:
        """Wait this long, but not longer than until q is typed; return whether it was."""
        if self._stream is None:
            time.sleep(seconds)
            return False
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            if select.select([self._stream], [], [], left)[0]:
                typed = os.read(self._stream, 100)
                if not typed:  # the terminal is gone
                    return True
                if typed in (b"q", b"Q", b"\x03", b"\x04"):
                    return True
        return False


@contextmanager
def _keys() -> Iterator[_Keys]:
    """Read single keys during the block, without echo."""
    if not sys.stdin.isatty():
        yield _Keys(None)
        return
    import termios
    import tty

    stream = sys.stdin.fileno()
    former = termios.tcgetattr(stream)
    tty.setcbreak(stream)
    try:
        yield _Keys(stream)
    finally:
        termios.tcsetattr(stream, termios.TCSADRAIN, former)
