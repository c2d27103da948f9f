"""The command `mtask-worker`: one worker process, or several under a supervisor."""

from __future__ import annotations

import gc
import inspect
import sys
from collections.abc import Iterator
from typing import Annotated, Any

import typer

from mtask.cli import failures
from mtask.cli.flags import describe, keyword
from mtask.errors import MtaskError
from mtask.settings import Settings

_HELP = """Run tasks: find due tasks, claim them, call their handlers, write the results.

APP is package.module:app, an mtask.App with handlers. On SIGTERM, SIGINT or SIGHUP the worker claims nothing more,
finishes its runs within --shutdown-timeout, hands back the rest and exits with 0. A second signal ends it at once.

Each flag can be set in the environment (MTASK_URI, MTASK_CONCURRENCY, ...) or in .env; flags win.

Exit codes: 0 stopped in order, 2 wrong usage, 3 database not usable, 5 worker_id in use, 1 any other error.
"""

cli = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


def _show_version(wanted: bool) -> None:
    if wanted:
        from mtask.version import __version__

        typer.echo(f"mtask {__version__}")
        raise typer.Exit


def main(app: str | None, *, supervised: bool, version: bool, **given: Any) -> None:
    """Start the worker."""
    # Neither help nor the version needs a worker. What an import makes stays, so a collection of garbage amid it finds
    # nothing: those were a tenth of its time.
    gc.disable()
    try:
        from mtask.cli.workers import serving
    finally:
        gc.enable()

    told = {"app": app, **given}
    serving.start({name: value for name, value in told.items() if value is not None}, is_supervised=supervised)


def _parameters() -> Iterator[inspect.Parameter]:
    """Yield what typer reads: the app, and a flag for each setting that is one."""
    yield keyword("app", Annotated[str | None, typer.Argument(help="package.module:app", show_default=False)], None)
    for name, said in Settings.flags().items():
        made = typer.Option(*(said.flag or "").split(), help=said.help)
        yield keyword(name, Annotated[Settings.model_fields[name].annotation | None, made], None)  # type: ignore[operator]
    yield keyword("supervised", Annotated[bool, typer.Option(hidden=True)], False)
    version = typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version.")
    yield keyword("version", Annotated[bool, version], False)


describe(main, main, list(_parameters()))
cli.command(help=_HELP)(main)


def run() -> None:
    """Run `mtask-worker`. For an error of mtask, print the error's message and exit with the error's exit code."""
    try:
        cli(prog_name="mtask-worker", standalone_mode=True)
    except MtaskError as error:
        from mtask.cli.output import clean  # no other path of a worker prints with rich
        from mtask.kernel.driver.errors import scrubbed

        lines = "\n".join(clean(line) for line in scrubbed(str(error)).splitlines())
        print(f"mtask-worker: {lines}", file=sys.stderr)  # noqa: T201 a command prints
        sys.exit(error.exit_code)
    finally:
        failures.leave_lost()
