"""`mtask local`: the embedded mongod."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from mtask import local
from mtask.cli import failures
from mtask.cli.context import Cli
from mtask.cli.options import command_group
from mtask.cli.output import clean
from mtask.local import LocalServer

_Folder = Annotated[
    Path | None,
    typer.Option(
        "--folder",
        metavar="FOLDER",
        help="Folder of its data. Else MTASK_LOCAL_FOLDER, else mtask/local in the user's data folder.",
        show_default=False,
    ),
]


def _document(server: LocalServer) -> dict[str, Any]:
    return {"running": True, **server.model_dump(mode="json"), "log": str(server.log)}


def _lines(server: LocalServer) -> list[str]:
    return [
        f"uri      {server.uri}",
        f"server   MongoDB {server.version}, pid {server.pid}",
        f"folder   {clean(server.folder)}",
        f"log      {clean(server.log)}",
    ]


def start(
    cli: Cli,
    folder: _Folder = None,
    mongod: Annotated[
        Path | None,
        typer.Option(
            "--mongod", metavar="PATH", help="The mongod to run. Else MTASK_MONGOD, else PATH, else the wheel."
        ),
    ] = None,
) -> None:
    """Start the embedded mongod if it does not run yet.

    The mongod runs until `mtask local stop`. With --quiet, the command prints only the URI.
    """
    chosen = folder or cli.settings.local_folder
    server = local.start(chosen, mongod=mongod or cli.settings.mongod)
    cli.answer(_document(server), *([server.uri] if cli.flags.quiet else _lines(server)))


def status(cli: Cli, folder: _Folder = None) -> int:
    """Print whether the embedded mongod runs, and its URI.

    The exit code is 4 if the mongod does not run.
    """
    server = local.status(folder or cli.settings.local_folder)
    if server is None:
        cli.answer({"running": False}, "not running; `mtask local start` starts it")
        return failures.NOT_FOUND
    cli.answer(_document(server), *_lines(server))
    return failures.OK


def stop(cli: Cli, folder: _Folder = None) -> None:
    """Stop the embedded mongod. Its data stay."""
    stopped = local.stop(folder or cli.settings.local_folder)
    cli.answer({"stopped": stopped}, "stopped" if stopped else "it was not running")


register = command_group(
    "local",
    "Database",
    "The embedded mongod: a real MongoDB for development, as a one-node replica set. `--uri local` uses it.",
    {"start": start, "status": status, "stop": stop},
)
