"""`mtask init`, `mtask roles` and `mtask schema`."""

from __future__ import annotations

import json
from typing import Annotated, Any, cast

import typer

from mtask.cli.context import Cli
from mtask.cli.options import commands
from mtask.database.schema import LAYOUTS
from mtask.errors import InvalidInput
from mtask.kernel.document.task import SCHEMA_REVISION, SCHEMA_VERSION
from mtask.kernel.driver import roles as rights
from mtask.kernel.driver.indexes import HEAD_INDEX
from mtask.kernel.driver.operation import Collection

COLLECTIONS: tuple[str, ...] = tuple(LAYOUTS)
FORMATS = ("mongo", "json-schema")


def init(
    cli: Cli,
    with_roles: Annotated[
        bool,
        typer.Option("--roles", help="Also make the roles that `mtask roles` lists; needs an administrator of users."),
    ] = False,
) -> None:
    """Make the collections with their validators and indexes, or repair them.

    Tasks are not changed.
    """
    client = cli.client()
    client.init(roles=with_roles)
    made = [rights.role_name(client.database_name, role) for role in rights.ROLES] if with_roles else []
    indexes = {name: layout.index_names for name, layout in LAYOUTS.items()}
    # Only a collection that is sharded by another field than `_id` lacks the index of heads.
    indexes["tasks"].append(HEAD_INDEX)
    document = {
        "database": client.database_name,
        "schema_version": SCHEMA_VERSION,
        "schema_revision": SCHEMA_REVISION,
        "collections": [{"name": name, "validator": True, "indexes": names} for name, names in indexes.items()],
        "roles": made,
    }
    lines = [
        f"{name:9} validator" + (f", indexes {', '.join(names)}" if names else "") for name, names in indexes.items()
    ]
    lines += [f"role {name}" for name in made]
    version = f"schema_version {SCHEMA_VERSION}, revision {SCHEMA_REVISION}"
    cli.answer(document, f"database {client.database_name} is ready: {version}", *lines)


def list_roles(
    cli: Cli,
    shell: Annotated[
        bool, typer.Option("--shell", help="Print the commands that make them, for mongosh as an administrator.")
    ] = False,
) -> None:
    """Print the roles for mtask's users, each with only the rights that it needs.

    The command does not connect to a database. `mtask init --roles` makes the roles.
    """
    database = cli.database()
    document: list[dict[str, Any]] = [
        {
            "role": role,
            "name": rights.role_name(database, role),
            "db": "admin",
            "purpose": rights.PURPOSES[role],
            "privileges": rights.privileges(database, role),
        }
        for role in rights.ROLES
    ]
    if shell and not cli.is_json:
        cli.say(*_shell_lines(document))
        return
    lines: list[str] = []
    for entry in document:
        lines += [*([""] if lines else []), f"{entry['name']}: {entry['purpose']}"]
        for privilege in entry["privileges"]:
            resource = privilege["resource"]
            where = "the server" if resource.get("cluster") else resource["collection"] or "every collection"
            lines.append(f"  {where:16}  {', '.join(privilege['actions'])}")
    cli.answer(document, *lines)


def _shell_lines(document: list[dict[str, Any]]) -> list[str]:
    lines = ['var admin = db.getSiblingDB("admin");']
    for entry in document:
        name = json.dumps(entry["name"])
        rights = json.dumps({"privileges": entry["privileges"], "roles": []})
        lines += [
            f"var rights = {rights};",
            f"admin.getRole({name}) ? admin.updateRole({name}, rights) : "
            f"admin.createRole(Object.assign({{role: {name}}}, rights));",
        ]
    return lines


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
            help="mongo: the rules of the collection's validator, with bsonType. json-schema: JSON Schema 2020-12.",
        ),
    ] = "mongo",
) -> None:
    """Print the schema of a collection's documents, for services in other languages.

    The command does not connect to a database.
    """
    _check(collection, COLLECTIONS, "collection")
    _check(form, FORMATS, "format")
    layout = LAYOUTS[cast(Collection, collection)]
    document: dict[str, Any]
    if form == "mongo":
        document = layout.rules
    else:
        document = {
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            **layout.model.model_json_schema(by_alias=True),
        }
    cli.json(document)


def _check(given: str, known: tuple[str, ...], field: str) -> None:
    if given not in known:
        raise InvalidInput(f"{field} {given!r}: use {' or '.join(known)}.", field=field)


register = commands("Database", {"init": init, "roles": list_roles, "schema": schema})
