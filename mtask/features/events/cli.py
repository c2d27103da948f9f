"""`mtask tail` prints the events of tasks as they occur."""

from __future__ import annotations

import sys
from typing import Annotated

import typer
from rich.text import Text

from mtask.arguments.criteria import NameCriteria
from mtask.cli import failures, values
from mtask.cli.context import Cli
from mtask.cli.options import commands
from mtask.cli.output import clean, moment, write_json
from mtask.features.events.task_events import EventKind, TaskEvent

_STYLES = {
    EventKind.SUCCEEDED: "green",
    EventKind.FAILED: "red",
    EventKind.TIMED_OUT: "red",
    EventKind.CANCELED: "yellow",
    EventKind.CLAIMED: "cyan",
}


def tail(
    cli: Cli,
    named: NameCriteria,
    key: Annotated[
        list[str], typer.Option("--key", "-k", metavar="KEY", help="Key; repeatable.", show_default=False)
    ] = [],  # noqa: B006 typer reads it
    since: Annotated[
        str | None,
        typer.Option("--since", metavar="DURATION", help="Begin this long ago, at most as far as the oplog reaches."),
    ] = None,
    after: Annotated[
        str | None, typer.Option("--after", metavar="TOKEN", help="Begin after the event with this token.")
    ] = None,
    count: Annotated[int, typer.Option("--count", "-c", min=0, help="End after this many events; 0 = never.")] = 0,
) -> int:
    """Print the events of tasks as they occur, until Ctrl-C.

    With --json, each event is one line of JSON. It contains the event's token, which --after takes.
    """
    client = cli.client(reads_only=True)
    begin = None if since is None else client.server_time() - values.duration(since, "since")
    shown = 0
    with client.events(**named, key=key or None, after=after, since=begin) as happening:
        cli.notice(f"events of tasks in database {client.database_name!r}; Ctrl-C ends it")
        for event in happening:
            if cli.is_json:
                write_json(_document(event), indent=None)
                sys.stdout.flush()
            else:
                cli.say(_line(event))
            shown += 1
            if shown == count:
                break
    return failures.OK


def _document(event: TaskEvent) -> dict[str, object]:
    fields = ("run_id", "worker_id", "attempt", "reason", "progress", "message")
    document: dict[str, object] = {"kind": event.kind.value, "task_id": event.task_id, "time": event.time}
    document |= {"name": event.name, "key": event.key, "queue": event.queue, "task_status": event.task_status}
    document |= {field: getattr(event, field) for field in fields if getattr(event, field) is not None}
    return {**document, "token": event.token}


def _line(event: TaskEvent) -> Text:
    text = Text(f"{moment(event.time)}  ")
    text.append(f"{event.kind.value:<10}", style=_STYLES.get(event.kind, ""))
    text.append(f"  {clean(event.task_id)}")
    if event.worker_id is not None:
        text.append(f"  {clean(event.worker_id)}", style="bright_black")
    if event.progress is not None:
        text.append(f"  {event.progress:.0%}")
    for text_part in (event.message, event.reason):
        if text_part:
            text.append(f"  {clean(text_part)}")
    if event.is_end and event.kind.value != _ENDS.get(str(event.task_status)):
        text.append(f"  task {event.task_status}")
    return text


_ENDS = {"SUCCESS": EventKind.SUCCEEDED.value, "CANCELED": EventKind.CANCELED.value}


register = commands("Tasks", {"tail": tail})
