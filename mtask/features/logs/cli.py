"""`mtask logs` prints the kept lines of a task's runs."""

from __future__ import annotations

import sys
import time
from datetime import UTC, datetime
from typing import Annotated, Any

import typer
from rich.text import Text

from mtask.cli import failures
from mtask.cli.context import Cli
from mtask.cli.options import KeyArgument, TaskArgument, commands, name_and_key
from mtask.cli.output import clean, counted, hanging, iso, write_json
from mtask.client import Client
from mtask.errors import InvalidInput, TaskNotFound
from mtask.features.logs.rules import LogLine, RunLog

#: The time between two looks of --follow, in seconds. Workers write the lines of a run every three seconds.
_LOOK = 1.0
#: The columns before the further lines of a message, and before a traceback.
_INDENT = 4
#: The looks after the end of a task that wait for the last lines of its runs.
_PATIENCE = 3
_STYLES = {"WARNING": "yellow", "ERROR": "red", "CRITICAL": "bold red", "DEBUG": "bright_black"}


def logs(
    cli: Cli,
    name: TaskArgument,
    key: KeyArgument = None,
    run: Annotated[
        str | None, typer.Option("--run", metavar="RUN_ID", help="Lines of this run only; 'last' = the last one.")
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Print further lines as they come, until the task has ended.")
    ] = False,
) -> int:
    """Print the lines that the handler of a task has logged: the last ones of each run that are kept.

    Workers keep them with --keep-logs. With --json and --follow, each line is one line of JSON.
    """
    client = cli.client(reads_only=True)
    named = name_and_key(cli, name, key)
    if run == "":
        raise InvalidInput("--run is empty: give the id of a run, or 'last'.", field="run")
    found = _read(client, named, run)
    if follow:
        _follow(cli, client, named, run, found)
        return failures.OK
    if cli.is_json:
        cli.json([_document(log) for log in found])
        return failures.OK
    if not found:
        cli.notice(
            "no lines are kept of this task: its handler has logged none, or the worker runs without --keep-logs"
        )
    for log in found:
        cli.say(*_heading(log))
        _say_lines(cli, log.lines)
    return failures.OK


def _read(client: Client, named: tuple[str, str], run: str | None) -> list[RunLog]:
    found = client.logs(*named, run_id=None if run == "last" else run)
    return found[-1:] if run == "last" else found


def _follow(cli: Cli, client: Client, named: tuple[str, str], run: str | None, found: list[RunLog]) -> None:
    """Print lines as they come. It ends when the task has ended and its last lines are there."""
    printed: dict[str, int] = {}
    looks_after_end = 0
    while True:
        for log in found:
            _say_new(cli, log, printed)
        # A worker writes the last lines of a run a moment after its end. One that was killed never does.
        if looks_after_end and (all(log.is_over for log in found) or looks_after_end > _PATIENCE):
            return
        time.sleep(_LOOK)
        try:
            # The status is read first: so the lines of a task that has ended are read after its end.
            looks_after_end += client.get(*named).status.is_final
            found = _read(client, named, run)
        except TaskNotFound:
            return


def _say_new(cli: Cli, log: RunLog, printed: dict[str, int]) -> None:
    before = printed.get(log.run_id)
    lines = log.after(before or 0)
    if before is None or lines:
        printed[log.run_id] = max(before or 0, log.first + len(log.lines))
    if cli.is_json:
        for line in lines:
            said = {"run_id": log.run_id, "worker_id": log.worker_id, "attempt": log.attempt, **_line(line)}
            write_json(said, indent=None)
        sys.stdout.flush()
        return
    if before is None:
        cli.say(*_heading(log))
    elif log.first > before:
        cli.say(Text(f"  ({counted(log.first - before, 'line')} not kept)", style="bright_black"))
    _say_lines(cli, lines)


def _heading(log: RunLog) -> list[Text]:
    head = Text(f"try {log.attempt} ", style="bold")
    day = f"{log.begin_time.astimezone(UTC):%Y-%m-%d} UTC"
    head.append(f"of {clean(log.worker_id)}, run {clean(log.run_id)}, {day}", style="bright_black")
    if log.trace_id is not None:
        head.append(f", trace {clean(log.trace_id)}", style="bright_black")
    if not log.first:
        return [head]
    return [head, Text(f"  ({counted(log.first, 'earlier line')} not kept)", style="bright_black")]


def _say_lines(cli: Cli, lines: list[LogLine]) -> None:
    for line in lines:
        head = Text(f"  {clock(line.time)}  ")
        head.append(f"{clean(line.level, 8):<8} ", style=_STYLES.get(line.level, ""))
        first, *others = _parts(line)
        cli.say(*hanging(cli.out.width, head, first))
        for part in others:
            cli.say(*hanging(cli.out.width, Text(" " * _INDENT), part))


def clock(instant: datetime) -> str:
    """Return the time of the day, in UTC, to the millisecond. The heading tells the day."""
    return f"{instant.astimezone(UTC):%H:%M:%S.%f}"[:-3]


def _parts(line: LogLine) -> list[str]:
    texts = [line.message, *([] if line.exception is None else [line.exception])]
    return [clean(part) for text in texts for part in text.split("\n")]


def _document(log: RunLog) -> dict[str, Any]:
    return {
        "run_id": log.run_id,
        "task_id": log.task_id,
        "worker_id": log.worker_id,
        "attempt": log.attempt,
        "trace_id": log.trace_id,
        "first": log.first,
        "is_over": log.is_over,
        "lines": [_line(line) for line in log.lines],
    }


def _line(line: LogLine) -> dict[str, Any]:
    made = {"time": iso(line.time), "level": line.level, "logger": line.logger, "message": line.message}
    return made if line.exception is None else {**made, "exception": line.exception}


register = commands("Tasks", {"logs": logs})
