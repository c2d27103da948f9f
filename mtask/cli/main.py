"""The command `mtask`."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable, Sequence
from functools import cache
from typing import Annotated, Any

import typer

from mtask.cli import failures, interrupts
from mtask.cli.commands import Commands
from mtask.cli.flags import callback

_CODES = "\n".join(f"- {code}: {meaning}" for code, meaning in failures.EXIT_CODES.items())
EPILOG = (
    "Flags win over the environment (MTASK_URI, MTASK_DATABASE, MTASK_LOCAL_FOLDER, ...), and the environment over "
    "`.env` in the working folder. MTASK_MONGOD names a program, so it is not read from `.env`. Put a URI with a "
    f"password into MTASK_URI: every user of the machine can read command lines.\n\nExit codes:\n\n{_CODES}"
)

app = typer.Typer(
    name="mtask",
    cls=Commands,
    help="A task queue on MongoDB: publish and inspect tasks, and manage their workers.",
    epilog=EPILOG,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from mtask.version import __version__

        typer.echo(f"mtask {__version__}")
        raise typer.Exit


@callback(app)
def root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    """A task queue on MongoDB: publish and inspect tasks, and manage their workers."""


@cache
def _command() -> Callable[..., Any]:
    """Build the command. It keeps the subcommands that were asked for, so it is built once."""
    return typer.main.get_command(app)


def run(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code. This is the entry point."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    flags = given[: given.index("--")] if "--" in given else given
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # escape letters that the terminal lacks
    try:
        with interrupts.ending():
            code = _command()(given or ["--help"], prog_name="mtask", standalone_mode=False)
            sys.stdout.flush()
    except (KeyboardInterrupt, typer.Abort):
        return failures.INTERRUPTED
    except (BrokenPipeError, SystemExit) as error:
        if isinstance(error, SystemExit) and not isinstance(error.__context__, BrokenPipeError):
            raise
        # The program that reads the output has closed the pipe. The rest of the buffer goes to /dev/null, so that it
        # raises no error at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return failures.OK
    except Exception as error:
        from mtask.cli import reporting

        return reporting.report(
            error, as_json="--json" in flags, no_color="--no-color" in flags, debug="--debug" in flags
        )
    return code if isinstance(code, int) else failures.OK


def run_web() -> int:
    """Run `mtask web` with the arguments of this process. This is the entry point of `mtask-web`."""
    return run(["web", *sys.argv[1:]])


if __name__ == "__main__":
    sys.exit(run())
