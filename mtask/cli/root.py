"""The command `mtask` with its flags, as typer reads them. `mtask.cli.main` runs it."""

from __future__ import annotations

from typing import Annotated

import typer

from mtask.cli import failures
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


@callback(app, lists_flags=True)
def root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    """A task queue on MongoDB: publish and inspect tasks, and manage their workers."""
