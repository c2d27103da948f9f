"""`mtask publish` publishes one task, or many tasks from a file of JSON lines."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from mtask.arguments.publish import TaskSpec, policy
from mtask.cli import values
from mtask.cli.context import Cli
from mtask.cli.options import LookupFlag, command
from mtask.cli.output import clean
from mtask.cli.tasks import publish_many
from mtask.cli.tasks.find import separated
from mtask.errors import InvalidInput

PANEL = "Tasks"
EXISTING = "A task that exists"
GATHERING = "Calls under one key"


def register(app: typer.Typer) -> None:
    """Add the command."""
    command(app, "publish", panel=PANEL)(publish)


def publish(
    cli: Cli,
    options: dict[str, Any],
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="Name of the task. It selects the handler.", show_default=False)
    ] = None,
    params: Annotated[
        str | None,
        typer.Argument(metavar="PARAMS", help="Params for the handler, as MongoDB extended JSON.", show_default=False),
    ] = None,
    key: Annotated[
        str | None, typer.Option("--key", "-k", help="The idempotency key, unique per name. Else a fresh key.")
    ] = None,
    queue: Annotated[str | None, typer.Option("--queue", help="Queue. Else 'default'.")] = None,
    delay: Annotated[
        str | None,
        typer.Option("--delay", metavar="DURATION", help="Earliest start, from now: 90s, 5m, 1h30m."),
    ] = None,
    start_time: Annotated[
        str | None,
        typer.Option("--start-time", metavar="INSTANT", help="Earliest start, ISO 8601: 2030-01-31T08:00:00Z."),
    ] = None,
    lookup: LookupFlag = [],  # noqa: B006 typer reads it
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
            help="Publish a task per line: JSON objects with name, key, params, queue, delay, start_time, lookup, "
            "callback, tenant and task_option. A field that a line omits comes from the flags. '-' is stdin.",
        ),
    ] = None,
    if_exists: Annotated[
        str,
        typer.Option(
            "--if-exists",
            metavar="keep|update|reject",
            help="keep: untouched. update: params, options, queue, lookup and start_time replaced. reject: an error.",
            rich_help_panel=EXISTING,
        ),
    ] = "keep",
    clean_failed: Annotated[
        bool,
        typer.Option("--clean-failed", help="Drop its failed runs, so that it runs again.", rich_help_panel=EXISTING),
    ] = False,
    clean_success: Annotated[
        bool,
        typer.Option("--clean-success", help="Drop its successes, so that it runs again.", rich_help_panel=EXISTING),
    ] = False,
    not_update_running: Annotated[
        bool,
        typer.Option("--not-update-running", help="Fail while a live run holds it.", rich_help_panel=EXISTING),
    ] = False,
    debounce: Annotated[
        str | None,
        typer.Option(
            "--debounce",
            metavar="DURATION",
            help="Start this long after the newest call. Its params win.",
            rich_help_panel=GATHERING,
        ),
    ] = None,
    max_wait: Annotated[
        str | None,
        typer.Option(
            "--max-wait", metavar="DURATION", help="Start this long after the first call.", rich_help_panel=GATHERING
        ),
    ] = None,
    collect: Annotated[
        bool,
        typer.Option("--collect", help="The handler gets the params of all calls.", rich_help_panel=GATHERING),
    ] = False,
    again: Annotated[
        bool,
        typer.Option("--again", help="Run at once, or once more after a live run.", rich_help_panel=GATHERING),
    ] = False,
    window: Annotated[
        str | None,
        typer.Option(
            "--window",
            metavar="DURATION",
            help="Publish anew only this long after a success.",
            rich_help_panel=GATHERING,
        ),
    ] = None,
    call_id: Annotated[
        str | None,
        typer.Option(
            "--call-id", metavar="TEXT", help="A call sent again under this id counts once.", rich_help_panel=GATHERING
        ),
    ] = None,
) -> int | None:
    """Publish a task. A second publish with the same key adds no second task."""
    existing: dict[str, Any] = {"clean_failed": clean_failed, "clean_success": clean_success}
    existing |= {"not_update_running": not_update_running, "collect": collect}
    existing |= {"if_running": "again" if again else "keep"}
    durations = {"debounce": debounce, "max_wait": max_wait, "window": window}
    existing |= {name: values.duration(text, name) for name, text in durations.items() if text is not None}
    if call_id is not None:
        existing["call_id"] = call_id
    checked = policy(if_exists, named=values.flag_of_argument, **existing)  # type: ignore[arg-type]
    defaults: dict[str, Any] = {"queue": queue, "lookup": values.lookup_from_pairs(lookup)}
    told = _callback(callback_url, callback_on, callback_secret)
    if told is not None:
        defaults["callback"] = told
    if delay is not None:
        defaults["delay"] = values.duration(delay, "delay")
    if start_time is not None:
        defaults["start_time"] = values.instant(start_time, "start_time")
    if many_file is not None:
        if key is not None or params is not None or params_file is not None:
            raise InvalidInput("with --many, give keys and params in the file.", field="many")
        if call_id is not None:
            raise InvalidInput("with --many, drop --call-id: it is the id of one call.", field="call_id")
        specs = publish_many.read(values.read_text(many_file, "many"), name, defaults, options, checked)
        with_policy = {"if_exists": if_exists, **existing}
        return publish_many.publish(cli, specs, with_policy)
    if name is None:
        raise InvalidInput("give the NAME of the task, or --many FILE.", field="name")
    read = values.params_from(params, params_file)
    spec = TaskSpec(name, read, key=key, **defaults, **options)
    # A wrong task raises an error before the client connects.
    spec.prepare(checked, values.flag_of_argument, cli.flags.tenant)
    if params is None and params_file is None:
        publish_many.check_no_params(checked, "PARAMS")
    client = cli.client()
    result = client.publish(name, read, key=key, **defaults, **options, if_exists=if_exists, **existing)  # type: ignore[arg-type]
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
    given = {"url": url, "on": None if on is None else separated([on.upper()]), "secret": secret}
    return {name: value for name, value in given.items() if value is not None}
