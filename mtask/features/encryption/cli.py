"""`mtask keys` looks after the data keys of encrypted tasks."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.text import Text

from mtask.cli import failures
from mtask.cli.context import Cli
from mtask.cli.options import YesFlag, command_group, is_confirmed
from mtask.cli.output import Column, clean, listing, relative
from mtask.features.encryption.vault import KeyRow

_Queue = Annotated[str | None, typer.Option("--queue", metavar="QUEUE", help="The queue of the key.")]


def create(cli: Cli, queue: _Queue = None) -> None:
    """Make the data key of a queue, with --queue, or of a tenant, with --tenant.

    Tasks that are published from now on are encrypted. Tasks that exist stay as they are. Running clients and workers
    that have the master key notice the new data key within a few seconds.
    """
    made = cli.client().create_data_key(queue=queue, tenant=cli.flags.tenant)
    cli.answer(_document(made), f"made  {clean(made.name)}  {made.key_id}")


def list_keys(cli: Cli) -> None:
    """List the data keys, also removed ones."""
    client = cli.client(reads_only=True)
    found = client.data_keys()
    if cli.is_json:
        cli.json([_document(row) for row in found])
        return
    if not found:
        cli.notice("there are no data keys; `mtask keys create` makes one")
        return
    now = client.server_time()
    columns = (
        Column("KEY", is_id=True),
        Column("ID", is_id=True),
        Column("MASTER KEY", leaves=2),
        Column("MADE", leaves=1),
        Column("STATE"),
    )
    rows: list[list[str | Text]] = []
    for row in found:
        made = "-" if row.create_time is None else relative(row.create_time, now)
        state = Text("in use") if row.remove_time is None else Text("removed", style="yellow")
        rows.append([row.name, str(row.key_id), row.provider or "-", made, state])
    cli.say(*listing(columns, rows, cli.out.width))


def remove(
    cli: Cli,
    queue: _Queue = None,
    yes: YesFlag = False,
) -> int:
    """Remove the data key of --queue or --tenant: nobody can read again what it has encrypted.

    Running clients and workers still use the key for up to a minute. Backups of the key vault still hold it. The
    command asks for confirmation. In a script, give --yes.
    """
    tenant = cli.flags.tenant
    which = f"queue {queue!r}" if tenant is None else f"tenant {tenant!r}"
    question = f"Remove the data key of {clean(which)}, and lose what it encrypted?"
    risk = f"all that the data key of {clean(which)} has encrypted would be lost"
    if not yes and not is_confirmed(cli, question, risk=risk):
        return failures.OTHER
    gone = cli.client().remove_data_key(queue=queue, tenant=tenant)
    cli.answer(_document(gone), f"removed  {clean(gone.name)}  {gone.key_id}")
    return failures.OK


def _document(row: KeyRow) -> dict[str, Any]:
    return {**asdict(row), "key_id": str(row.key_id), "provider": row.provider or None}


register = command_group(
    "keys",
    "Database",
    "Data keys, with which the tasks of a queue or of a tenant are encrypted.",
    {"create": create, "list": list_keys, "remove": remove},
)
