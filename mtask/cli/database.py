"""`mtask init` and `mtask schema`."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from mtask.cli.context import Cli
from mtask.cli.options import command
from mtask.errors import InvalidInput
from mtask.model.documents import SCHEMA_REVISION, SCHEMA_VERSION, Task, WorkerDocument
from mtask.store.schema import task_indexes, task_validator, worker_indexes, worker_validator

PANEL = "Database"
COLLECTIONS = ("tasks", "workers")
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
    indexes = {
        name: [str(index.document["name"]) for index in made]
        for name, made in (("tasks", task_indexes()), ("workers", worker_indexes()))
    }
    document = {
        "database": client.database_name,
        "schema_version": SCHEMA_VERSION,
        "schema_revision": SCHEMA_REVISION,
        "collections": [{"name": name, "validator": True, "indexes": indexes[name]} for name in COLLECTIONS],
    }
    lines = [f"{name:8} validator, indexes {', '.join(indexes[name])}" for name in COLLECTIONS]
    version = f"schema_version {SCHEMA_VERSION}, revision {SCHEMA_REVISION}"
    cli.answer(document, f"database {client.database_name} is ready: {version}", *lines)


def schema(
    cli: Cli,
    collection: Annotated[
        str, typer.Argument(metavar="tasks|workers", help="Which collection's documents.", show_default=False)
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
    document: dict[str, Any]
    if form == "mongo":
        document = task_validator() if collection == "tasks" else worker_validator()
    else:
        model = Task if collection == "tasks" else WorkerDocument
        document = {
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            **model.model_json_schema(by_alias=True),
        }
    cli.json(document)


def _check(given: str, known: tuple[str, ...], field: str) -> None:
    if given not in known:
        raise InvalidInput(f"{field} {given!r}: use {' or '.join(known)}.", field=field)
