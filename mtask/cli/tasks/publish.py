"""`mtask publish` publishes one task, or many tasks from a file of JSON lines."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from mtask.arguments.publish import ExistingArguments, TaskArguments, TaskSpec, policy
from mtask.cli import values
from mtask.cli.context import Cli
from mtask.cli.options import commands
from mtask.cli.output import clean
from mtask.cli.tasks import publish_many
from mtask.errors import InvalidInput
from mtask.features.gathering.client import CallArguments
from mtask.kernel.document.options import TaskOptions


def publish(
    cli: Cli,
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="Name of the task. It selects the handler.", show_default=False)
    ] = None,
    params: Annotated[
        str | None,
        typer.Argument(metavar="PARAMS", help="Params for the handler, as MongoDB extended JSON.", show_default=False),
    ] = None,
    *,
    task: TaskArguments,
    callback_url: Annotated[
        str | None,
        typer.Option(
            "--callback-url", metavar="URL", help="Tell this address when the task ends. See docs/callbacks.md."
        ),
    ] = None,
    callback_on: Annotated[
        str | None,
        typer.Option("--callback-on", metavar="STATUS,...", help="Tell only these ends: SUCCESS, FAIL, CANCELED."),
    ] = None,
    callback_secret: Annotated[
        str | None, typer.Option("--callback-secret", metavar="NAME", help="Secret that signs. Else 'default'.")
    ] = None,
    params_file: Annotated[
        str | None, typer.Option("--params-file", metavar="FILE", help="Read the params from a file; '-' is stdin.")
    ] = None,
    many_file: Annotated[
        str | None,
        typer.Option(
            "--many",
            metavar="FILE",
            help=f"Publish a task per line: JSON objects with {', '.join(publish_many.FIELDS[:-1])} and "
            "task_option. A field that a line omits comes from the flags. '-' is stdin.",
        ),
    ] = None,
    existing: ExistingArguments,
    gathering: CallArguments,
    options: TaskOptions,
) -> int | None:
    """Publish a task. A second publish with the same key adds no second task."""
    checked = policy(named=values.flag_of_argument, **existing, **gathering)
    told = _callback(callback_url, callback_on, callback_secret)
    if told is not None:
        task["callback"] = told
    if many_file is not None:
        if "key" in task or params is not None or params_file is not None:
            raise InvalidInput("with --many, give keys and params in the file.", field="many")
        if "call_id" in gathering:
            raise InvalidInput("with --many, drop --call-id: it is the id of one call.", field="call_id")
        specs = publish_many.read(values.read_text(many_file, "many"), name, task, options, checked)
        return publish_many.publish(cli, specs, {**existing, **gathering})
    if name is None:
        raise InvalidInput("give the NAME of the task, or --many FILE.", field="name")
    read = values.params_from(params, params_file)
    spec = TaskSpec(name, read, **task, **options)
    # A wrong task raises an error before the client connects.
    spec.prepare(checked, values.flag_of_argument, cli.flags.tenant)
    if params is None and params_file is None:
        publish_many.check_no_params(checked, "PARAMS")
    client = cli.client()
    result = client.publish(name, read, **task, **existing, **gathering, **options)
    document = {
        "task_id": result.task_id,
        "created": result.created,
        "updated": result.updated,
        "result": publish_many.word(result),
    }
    cli.answer(document, f"{publish_many.word(result)}  {clean(result.task_id)}")
    publish_many.warn_of_unserved(cli, client, [name])
    return None


def _callback(url: str | None, on: str | None, secret: str | None) -> dict[str, Any] | None:
    if url is None:
        if on is not None or secret is not None:
            raise InvalidInput("--callback-on and --callback-secret need --callback-url.", field="callback")
        return None
    given = {"url": url, "on": None if on is None else values.separated([on.upper()]), "secret": secret}
    return {name: value for name, value in given.items() if value is not None}


register = commands("Tasks", {"publish": publish})
