"""`mtask handlers` lists what workers have registered."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Annotated, Any

import typer
from rich.text import Text

from mtask.cli.context import Cli
from mtask.cli.options import commands
from mtask.cli.output import Column, clean, compact, counted, listing, relative
from mtask.errors import InvalidInput
from mtask.features.registry.client import RegisteredHandler, RegisteredVersion
from mtask.search.findings import listed

_MOST_WORKERS = 10


def handlers(
    cli: Cli,
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="Show this handler, with its versions.", show_default=False)
    ] = None,
) -> None:
    """List the handlers that workers have registered: versions, queues, and who serves them.

    A task that is published by name gets what the current version declares.
    """
    client = cli.client(reads_only=True)
    if name is not None:
        found = client.get_handler(name)
        if found is None:
            raise InvalidInput(
                f"no handler {name!r} is registered; `mtask handlers` lists those that are.", field="name"
            )
        if cli.is_json:
            cli.json(handler_document(found))
            return
        cli.say(*(Text(line) for line in _lines(found, client.server_time())))
        return
    every = client.handlers()
    if cli.is_json:
        cli.json([handler_document(one) for one in every])
        return
    if not every:
        cli.notice(f"database {client.database_name!r} has no handlers; a worker registers those of its app")
        return
    now = client.server_time()
    columns = (
        Column("HANDLER", is_id=True),
        Column("QUEUE", leaves=2),
        Column("VERSION"),
        Column("SINCE", leaves=3),
        Column("OTHER VERSIONS", leaves=4, wraps=True),
        Column("WORKERS", wraps=True),
    )
    cli.say(*listing(columns, [_row(one, now) for one in every], cli.out.width))


def _row(found: RegisteredHandler, now: datetime) -> list[str | Text]:
    current = found.current
    others = [f"{_shown(one)} on {counted(len(one.workers), 'worker')}" for one in found.versions if _is_other(one)]
    workers: str | Text = listed(list(found.workers), _MOST_WORKERS)
    return [
        found.name,
        "-" if current is None else current.queue,
        "-" if current is None else _shown(current),
        "-" if current is None or current.since is None else relative(current.since, now),
        listed(others),
        workers or Text("no live worker", style="yellow"),
    ]


def _is_other(version: RegisteredVersion) -> bool:
    return bool(version.workers) and not version.is_current


def _shown(version: RegisteredVersion) -> str:
    return version.hash if version.app_version is None else f"{version.app_version} ({version.hash})"


def _lines(found: RegisteredHandler, now: datetime) -> list[str]:
    lines = [f"handler   {clean(found.name)}"]
    for version in found.versions:
        since = "" if version.since is None else f", started {relative(version.since, now)}"
        is_current = " (current)" if version.is_current else ""
        lines.append(f"version   {clean(_shown(version))}{is_current}{since}")
        lines.append(f"  queue   {clean(version.queue)}")
        if version.version > 1:
            lines.append(f"  params  of version {version.version}")
        if version.options:
            lines.append(f"  options {clean(compact(dict(version.options), 200))}")
        lines.append(f"  workers {clean(listed(list(version.workers), _MOST_WORKERS)) or 'none that is live'}")
    if found.declaration is not None:
        lines.append(f"params    {clean(json.dumps(found.declaration.schema, ensure_ascii=False))}")
    return lines


def handler_document(found: RegisteredHandler) -> dict[str, Any]:
    """Return what is known of the handlers of a name, for programs."""
    return {
        "name": found.name,
        "current": None if found.current is None else found.current.hash,
        "versions": [
            {
                "hash": version.hash,
                "is_current": version.is_current,
                "app_version": version.app_version,
                "version": version.version,
                "since": version.since,
                "queue": version.queue,
                "options": dict(version.options),
                "workers": list(version.workers),
            }
            for version in found.versions
        ],
        "workers": list(found.workers),
        "schema": None if found.declaration is None else dict(found.declaration.schema),
    }


register = commands("Workers", {"handlers": handlers})
