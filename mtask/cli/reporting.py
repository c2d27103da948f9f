"""Prints the error that ended a command, as text or JSON."""

from __future__ import annotations

import sys
import traceback
from typing import Any

from rich.text import Text

from mtask.cli import failures
from mtask.cli.output import as_json_types, clean, console, write_json
from mtask.errors import MtaskError
from mtask.kernel.driver.errors import scrubbed


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
