"""The command `mtask-worker`, or `mtask worker`: one worker process, or several under a supervisor."""

from __future__ import annotations

import gc
import inspect
import sys
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import typer

from mtask.cli import failures
from mtask.cli.flags import describe, keyword
from mtask.errors import AppNotFound, MtaskError
from mtask.logs import traceback_of
from mtask.settings import Settings

_HELP = """Run tasks: find due tasks, claim them, call their handlers, write the results.

APP is package.module:app, an mtask.App with handlers. On SIGTERM, SIGINT or SIGHUP the worker claims nothing more,
finishes its runs within --shutdown-timeout, hands back the rest and exits with 0. A second signal ends it at once.

While you write handlers: --reload restarts the worker when you save a file. For scripts and CI: --burst runs what is
due and exits with 0, whatever became of the tasks.

Each flag can be set in the environment (MTASK_URI, MTASK_CONCURRENCY, ...) or in .env; flags win.

Exit codes: 0 stopped in order, 2 wrong usage, 3 database not usable, 5 worker_id in use, 1 any other error.
"""

#: The packages whose frames stand around those of an app, in the traceback of its import.
_IMPORTING = frozenset({"mtask", "importlib", "_frozen_importlib", "_frozen_importlib_external"})

cli = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


def _show_version(wanted: bool) -> None:
    if wanted:
        from mtask.version import __version__

        typer.echo(f"mtask {__version__}")
        raise typer.Exit


def main(app: str | None, *, supervised: int | None, version: bool, **given: Any) -> None:
    """Start the worker."""
    # Neither help nor the version needs a worker. What an import makes stays, so a collection of garbage amid it finds
    # nothing: those were a tenth of its time.
    gc.disable()
    try:
        from mtask.cli.workers import serving
    finally:
        gc.enable()

    told = {"app": app, **given}
    serving.start({name: value for name, value in told.items() if value is not None}, parent=supervised)


def _parameters() -> Iterator[inspect.Parameter]:
    """Yield what typer reads: the app, and a flag for each setting that is one."""
    yield keyword("app", Annotated[str | None, typer.Argument(help="package.module:app", show_default=False)], None)
    for name, said in Settings.flags().items():
        made = typer.Option(*(said.flag or "").split(), help=said.help)
        yield keyword(name, Annotated[Settings.model_fields[name].annotation | None, made], None)  # type: ignore[operator]
    yield keyword(
        "supervised", Annotated[int | None, typer.Option(hidden=True, help="The process that runs this one.")], None
    )
    version = typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version.")
    yield keyword("version", Annotated[bool, version], False)


describe(main, main, list(_parameters()))
_SETTINGS = {"help_option_names": ["-h", "--help"]}
cli.command(help=_HELP, context_settings=_SETTINGS)(main)


def register(app: typer.Typer) -> None:
    """Add the command to `mtask`, for its help and for completions. `mtask.cli.main` runs it."""
    app.command("worker", help=_HELP, rich_help_panel="Workers", context_settings=_SETTINGS)(main)


def run(arguments: Sequence[str] | None = None, name: str = "mtask-worker") -> None:
    """Run the command. For an error of mtask, print the error's message and exit with the error's exit code."""
    try:
        cli(arguments, prog_name=name, standalone_mode=True)
    except MtaskError as error:
        from mtask.cli.output import clean  # no other path of a worker prints with rich
        from mtask.kernel.driver.errors import scrubbed

        told = scrubbed(f"{_traceback_in_app(error)}{name}: {error}")
        print("\n".join(clean(line) for line in told.splitlines()), file=sys.stderr)  # noqa: T201 a command prints
        sys.exit(error.exit_code)
    finally:
        failures.leave_lost()


def _traceback_in_app(error: MtaskError) -> str:
    """Return the traceback of an import that failed, without the frames of mtask; empty: it is another error."""
    cause = error.__cause__
    if not isinstance(error, AppNotFound) or cause is None:
        return ""
    of_app, trace = [], cause.__traceback__
    while trace is not None:
        if str(trace.tb_frame.f_globals.get("__name__")).partition(".")[0] not in _IMPORTING:
            of_app.append(trace)
        trace = trace.tb_next
    if of_app:
        of_app[-1].tb_next = None
    return f"{traceback_of(cause.with_traceback(of_app[0] if of_app else None))}\n"
