"""`mtask init` and `mtask schema`."""

from __future__ import annotations

from typing import Annotated, Any, cast

import typer

from mtask.cli.context import Cli
from mtask.cli.options import command
from mtask.errors import InvalidInput
from mtask.model.documents import SCHEMA_REVISION, SCHEMA_VERSION
from mtask.store.operation import Collection
from mtask.store.schema import LAYOUTS

PANEL = "Database"
COLLECTIONS: tuple[str, ...] = tuple(LAYOUTS)
FORMATS = ("mongo", "json-schema")


def register(app: typer.Typer) -> None:
    """Add the commands."""
    command(app, "init", panel=PANEL)(init)
    command(app, "schema", panel=PANEL)(schema)


def init(cli: Cli) -> None:
    """Make the collections with their validators and indexes, or make them anew.

    Tasks stay as they are.
    """
    client = cli.client()
    client.init()
    document = {
        "database": client.database_name,
        "schema_version": SCHEMA_VERSION,
        "schema_revision": SCHEMA_REVISION,
        "collections": [
            {"name": name, "validator": True, "indexes": layout.index_names} for name, layout in LAYOUTS.items()
        ],
    }
    lines = [
        f"{name:9} validator" + (f", indexes {', '.join(layout.index_names)}" if layout.index_names else "")
        for name, layout in LAYOUTS.items()
    ]
    version = f"schema_version {SCHEMA_VERSION}, revision {SCHEMA_REVISION}"
    cli.answer(document, f"database {client.database_name} is ready: {version}", *lines)


def schema(
    cli: Cli,
    collection: Annotated[
        str, typer.Argument(metavar="|".join(COLLECTIONS), help="Which collection's documents.", show_default=False)
    ] = "tasks",
    form: Annotated[
        str,
        typer.Option(
            "--format",
            metavar="mongo|json-schema",
            help="mongo: the collection's validator, with bsonType. json-schema: JSON Schema 2020-12.",
        ),
    ] = "mongo",
) -> None:
    """Print the schema of the documents, for services in other languages.

    Needs no database.
    """
    _check(collection, COLLECTIONS, "collection")
    _check(form, FORMATS, "format")
    layout = LAYOUTS[cast(Collection, collection)]
    document: dict[str, Any]
    if form == "mongo":
        document = layout.validator()
    else:
        document = {
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            **layout.model.model_json_schema(by_alias=True),
        }
    cli.json(document)


def _check(given: str, known: tuple[str, ...], field: str) -> None:
    if given not in known:
        raise InvalidInput(f"{field} {given!r}: use {' or '.join(known)}.", field=field)
