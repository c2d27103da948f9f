"""The output of commands and their errors: text for people, one JSON document for scripts."""

from __future__ import annotations

import io
import json
import shutil
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cache
from typing import Any, TextIO

from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.text import Text

from mtask.cli import failures
from mtask.errors import MtaskError
from mtask.kernel.document.task import Task
from mtask.kernel.driver.errors import scrubbed
from mtask.kernel.driver.extended_json import extended

#: The width of output that is not a terminal, in characters. It is so large that no line is cut.
PIPE_WIDTH = 4000
STATUS_STYLES = {
    "WAITING": "blue",
    "INIT": "cyan",
    "RUNNING": "yellow",
    "SUCCESS": "green",
    "FAIL": "bold red",
    "LAPSED": "magenta",
    "TIMEOUT": "magenta",
    "CANCELED": "bright_black",
    "OK": "green",
    "WARN": "yellow",
    "ready": "cyan",
    "running": "green",
    "stopping": "yellow",
    "stopped": "bright_black",
    "paused": "magenta",
    "gone": "bold red",
}


class _Screen(Console):
    """A console on which no text can steer the terminal, or begin a line of its own."""

    def print(self, *objects: Any, **settings: Any) -> None:
        """Print texts on one line each, with unprintable characters escaped."""
        super().print(*(_printable(one) if isinstance(one, str | Text) else one for one in objects), **settings)

    def on_broken_pipe(self) -> None:
        """Raise BrokenPipeError instead of rich's SystemExit. `mtask.cli.main.run` handles it."""
        raise BrokenPipeError


@cache
def _wrapping() -> Console:
    """Return the console that wraps text. Its own width does not count."""
    return Console(width=PIPE_WIDTH, file=io.StringIO())


def console(stream: TextIO, *, no_color: bool) -> Console:
    """Return a console that prints on the stream. Without a terminal, the console cuts no line."""
    width = None if stream.isatty() else shutil.get_terminal_size((PIPE_WIDTH, 24)).columns
    return _Screen(
        file=stream, width=width, no_color=no_color or None, highlight=False, markup=False, emoji=False, soft_wrap=False
    )


def write_json(document: Any, stream: TextIO | None = None, indent: int | None = 2) -> None:
    """Print one JSON document. If `indent` is None, print it on one line."""
    target = stream or sys.stdout
    text = json.dumps(as_json_types(document), indent=indent, ensure_ascii=False, allow_nan=False)
    # `json.dumps` does not escape all control characters. Those that are left stand inside strings, except for the line
    # breaks of the indent.
    target.write("\n".join(_escaped(line) for line in text.split("\n")) + "\n")


def _escaped(text: str) -> str:
    """Return the same JSON, with an escape for each unprintable character."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else json.dumps(c)[1:-1] for c in text)


def as_json_types(value: Any) -> Any:
    """Return the value in JSON types: a datetime as ISO 8601 text in UTC, BSON's own types as extended JSON."""
    if isinstance(value, datetime):
        return iso(value)
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, dict):
        return {str(name): as_json_types(item) for name, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [as_json_types(item) for item in value]
    if value is None or isinstance(value, bool | str):
        return str(value) if isinstance(value, str) else value
    return extended(value)


def task_document(task: Task) -> dict[str, Any]:
    """Return the task's document. Its params and returns are extended JSON, which keeps BSON types."""
    document = task.model_dump(by_alias=True, exclude_unset=True)
    document["params"] = extended(task.params)
    if task.again is not None:
        document["again"]["params"] = extended(task.again.params)
    for shown, run in zip(document["task_state"]["worker_states"], task.runs, strict=True):
        if "returns" in shown:
            shown["returns"] = extended(run.returns)
    return document


def iso(instant: datetime) -> str:
    """Return the instant as ISO 8601 in UTC, to the millisecond."""
    return instant.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def moment(instant: datetime) -> str:
    """Return the instant in the form 2030-12-31 23:59:00 UTC."""
    return f"{instant.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC"


def lasting(length: timedelta) -> str:
    """Return a length of time for people: 12ms, 3.4s, 2m 05s, 3h 20m, 4d 3h."""
    seconds = abs(length.total_seconds())
    if seconds < 0.9995:
        return f"{seconds * 1000:.0f}ms"
    if seconds < 59.95:
        return f"{seconds:.1f}s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60}m {whole % 60:02d}s"
    if whole < 86_400:
        return f"{whole // 3600}h {whole % 3600 // 60:02d}m"
    return f"{whole // 86_400}d {whole % 86_400 // 3600}h"


def relative(instant: datetime, now: datetime) -> str:
    """Return the time between the instant and now in words: "in 5.0s", "3m 20s ago"."""
    return f"in {lasting(instant - now)}" if instant > now else f"{lasting(now - instant)} ago"


def clean(text: object, limit: int | None = None) -> str:
    """Return the text on one line, with control characters escaped, shortened to `limit` cells of the terminal."""
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in str(text))
    return shown if limit is None or cell_len(shown) <= limit else set_cell_size(shown, max(limit - 1, 0)) + "…"


def _printable(line: str | Text) -> str | Text:
    if isinstance(line, str):
        return clean(line)
    if line.plain.isprintable():
        return line
    made = Text(style=line.style)
    for letter in line.divide(range(1, len(line))):
        if not letter.plain.isprintable():
            letter.plain = clean(letter.plain)
        made.append_text(letter)
    return made


def compact(value: Any, limit: int | None = None) -> str:
    """Return a BSON value as one line of extended JSON, shortened to `limit` cells."""
    return clean(json.dumps(extended(value), ensure_ascii=False), limit)


def status_text(status: str) -> Text:
    """Return the status in its colour."""
    return Text(status, style=STATUS_STYLES.get(status, ""))


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a listing. The fields tell what becomes of it where the terminal is too narrow for all columns."""

    title: str
    right: bool = False
    #: The column is left out: the one with the highest number first. 0: it stays.
    leaves: int = 0
    #: Its cells go below their rows: on one line each, so that an id can be copied, ...
    is_id: bool = False
    #: ... or wrapped.
    wraps: bool = False
    #: It is narrowed, and its cells are cut. For pictures, in which the numbers matter more than the names.
    gives_way: bool = False
    #: A cell that is too long is cut in its middle, so that texts that begin alike can be told apart.
    keeps_end: bool = False

    @property
    def goes_below(self) -> bool:
        """Whether its cells may go below their rows."""
        return self.is_id or self.wraps


GAP = 2
MIN_FLEXIBLE = 12


def listing(columns: Sequence[Column], rows: Sequence[Sequence[str | Text]], width: int) -> list[Text]:
    """Return the headings and the rows as lines that fit into the width. Only a single long id may be wider."""
    cells = [[cell if isinstance(cell, Text) else Text(clean(cell)) for cell in row] for row in rows]
    headings = [Text(clean(column.title), style="bold") for column in columns]
    lines = [headings, *cells]
    widths = [max(line[index].cell_len for line in lines) for index in range(len(columns))]
    empty = {index for index, column in enumerate(columns) if column.wraps and not any(row[index] for row in cells)}
    beside, below = _divided(columns, widths, empty, width)
    shown = [columns[index] for index in beside]
    kept = _narrowed(shown, [widths[index] for index in beside], width)
    made = []
    for number, line in enumerate(lines):
        made.append(_fitted([line[index] for index in beside], kept, shown, width))
        if number:
            made += [one for index in below for one in _under(columns[index], line[index], len(below) > 1, width)]
    return made


def _divided(
    columns: Sequence[Column], widths: Sequence[int], empty: set[int], width: int
) -> tuple[list[int], list[int]]:
    """Return the columns that stand beside each other, and those whose cells go below the rows."""
    beside = {index for index, column in enumerate(columns) if not (column.leaves or column.wraps)}

    def fits(chosen: set[int]) -> bool:
        return sum(widths[index] for index in chosen) + GAP * (len(chosen) - 1) <= width

    below = {index for index, column in enumerate(columns) if column.wraps} - empty
    for index in sorted(beside, key=lambda index: -widths[index]):
        if columns[index].is_id and len(beside) > 1 and not fits(beside):
            beside.remove(index)
            below.add(index)
    others = [index for index, column in enumerate(columns) if column.leaves]
    for index in [*sorted(others, key=lambda index: columns[index].leaves), *sorted(below)]:
        if fits({*beside, index}):
            beside.add(index)
            below.discard(index)
    return sorted(beside), sorted(below)


def _narrowed(columns: Sequence[Column], widths: Sequence[int], width: int) -> list[int]:
    """Return the widths after the columns that give way have been narrowed."""
    made = list(widths)
    surplus = sum(made) + GAP * (len(columns) - 1) - width
    flexible = [index for index, column in enumerate(columns) if column.gives_way]
    while surplus > 0 and any(made[index] > MIN_FLEXIBLE for index in flexible):
        widest = max(flexible, key=lambda index: made[index])
        made[widest] -= 1
        surplus -= 1
    return made


def _fitted(line: Sequence[Text], widths: Sequence[int], columns: Sequence[Column], whole: int) -> Text:
    made = Text()
    for index, (cell, width, column) in enumerate(zip(line, widths, columns, strict=True)):
        cut = without_middle(cell, width) if column.keeps_end else cell
        made.append_text(fit(cut, width, right=column.right))
        if index < len(widths) - 1:
            made.append(" " * GAP)
    made.rstrip()
    if not any(column.is_id for column in columns):
        made.truncate(whole, overflow="ellipsis")
    return made


def _under(column: Column, cell: Text, is_named: bool, width: int) -> list[Text]:
    """Return the lines of a cell below its row."""
    if not cell:
        return []
    head = Text(" " * GAP)
    if is_named:
        head.append(f"{column.title.lower()}  ", style="bright_black")
    return [Text.assemble(head, cell)] if column.is_id else hanging(width, head, cell)


def fit(text: Text, width: int, *, right: bool = False) -> Text:
    """Cut or pad the text to a width in terminal cells, and return it."""
    fitted = text.copy()
    fitted.truncate(width, overflow="ellipsis")
    missing = max(width - fitted.cell_len, 0)
    if right:
        fitted.pad_left(missing)
    else:
        fitted.pad_right(missing)
    return fitted


def without_middle(text: Text, width: int) -> Text:
    """Cut the middle out of a text that is wider than `width`. A third of the width is left for its end."""
    if text.cell_len <= width:
        return text
    begin = len(text)
    while begin and text[begin - 1 :].cell_len <= width // 3:
        begin -= 1
    end = text[begin:]
    head = text[:begin]
    head.truncate(width - end.cell_len, overflow="ellipsis")
    return head + end


def hanging(width: int, head: Text, body: str | Text) -> list[Text]:
    """Return lines with the head on the left and the wrapped body to its right."""
    text = body if isinstance(body, Text) else Text(body)
    wrapped = text.wrap(_wrapping(), max(width - head.cell_len, MIN_FLEXIBLE))
    indent = " " * head.cell_len
    lines = [Text.assemble(head if index == 0 else indent, line) for index, line in enumerate(wrapped)]
    for line in lines:
        line.rstrip()
    return lines or [head]


def counted(number: int, noun: str) -> str:
    """Return the number with its noun: "1 task", "2 tasks"."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


# --- reporting -------------------------------------------------------------------------------------------

# Prints the error that ended a command, as text or JSON.


def is_usage_error(error: BaseException) -> bool:
    """Whether the error is about a wrong command line.

    The error's attributes decide, because different versions of typer have the error's class in different modules.
    """
    return hasattr(error, "format_message") and hasattr(error, "exit_code")


class NotPrinted(MtaskError):
    """The command has done its work, and stdout does not take the answer."""

    exit_code = failures.OTHER

    def __init__(self, error: OSError, done: str | None = None, answer: Any = None) -> None:
        told = "" if done is None else f" The command has done its work: {done}"
        super().__init__(f"stdout cannot be written: {error.strerror}.{told}")
        self.answer = answer


def of_stdout(error: Exception) -> Exception:
    """Return the error; if it came because stdout takes no text, return one that says so."""
    return NotPrinted(error) if isinstance(error, OSError) and failures.is_lost(sys.stdout) else error


def report(error: BaseException, *, as_json: bool, no_color: bool, debug: bool) -> int:
    """Print the error on stderr and return the exit code."""
    if debug:
        sys.stderr.write(scrubbed("".join(traceback.format_exception(error))))
    kind, message, fields, code = _described(error)
    if as_json:
        write_json({"error": kind, "message": message, **fields, "exit_code": code}, sys.stderr)
        return code
    screen = console(sys.stderr, no_color=no_color)
    first, *others = message.splitlines() or [kind]
    for line in (Text.assemble(("error: ", "bold red"), clean(first)), *map(clean, others)):
        screen.print(line, soft_wrap=True)
    if is_usage_error(error):
        path = getattr(getattr(error, "ctx", None), "command_path", "mtask")
        screen.print(Text(f"`{path} --help` shows how to use it.", style="bright_black"), soft_wrap=True)
    return code


def _described(error: BaseException) -> tuple[str, str, dict[str, Any], int]:
    kind = type(error).__name__
    if isinstance(error, MtaskError):
        fields = {name: _field(value) for name, value in vars(error).items() if not name.startswith("_")}
        return kind, scrubbed(_with_notes(error)), fields, error.exit_code
    if is_usage_error(error):
        message = scrubbed(str(error.format_message()))  # type: ignore[attr-defined]
        return kind, message, {}, failures.USAGE
    hint = "this is a bug in mtask; call again with --debug for the traceback, and report it."
    return kind, f"{kind}: {scrubbed(str(error))}\n{hint}", {}, failures.OTHER


def _with_notes(error: BaseException) -> str:
    return "\n".join([str(error), *getattr(error, "__notes__", [])])


def _field(value: Any) -> Any:
    try:
        made = as_json_types(value)
    except Exception:
        return clean(repr(value), 200)
    return scrubbed(made) if isinstance(made, str) else made
