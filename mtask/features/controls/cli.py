"""`mtask pause`, `resume`, `limit`, `fair`, `keep` and `controls` of a queue, a name or a tenant. And `mtask purge`."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Annotated

import typer
from rich.text import Text

from mtask.arguments.criteria import NameCriteria
from mtask.cli import failures, values
from mtask.cli.context import Cli
from mtask.cli.options import YesFlag, command, is_confirmed
from mtask.cli.output import Column, clean, listing, moment, relative
from mtask.errors import InvalidInput
from mtask.features.controls.rules import Control

PANEL = "Workers"
_FAIR = "tenants take turns"
_Queue = Annotated[str | None, typer.Option("--queue", metavar="QUEUE", help="A queue.", show_default=False)]
_Name = Annotated[str | None, typer.Option("--name", "-n", metavar="NAME", help="A task name.", show_default=False)]
_Timeout = Annotated[
    str,
    typer.Option(
        "--timeout", "-t", metavar="DURATION", help="Wait this long for every worker to confirm; else exit code 6."
    ),
]


def register(app: typer.Typer) -> None:
    """Add the commands."""
    command(app, "purge", purge, "Tasks")
    command(app, "pause", pause, PANEL)
    command(app, "resume", resume, PANEL)
    command(app, "limit", limit, PANEL)
    command(app, "fair", fair, PANEL)
    command(app, "keep", keep, PANEL)
    command(app, "controls", controls, PANEL)


def pause(
    cli: Cli,
    queue: _Queue = None,
    name: _Name = None,
    lasts: Annotated[
        str | None, typer.Option("--for", metavar="DURATION", help="It ends by itself after this time: 30m, 2h.")
    ] = None,
    until: Annotated[
        str | None, typer.Option("--until", metavar="INSTANT", help="It ends by itself then: 2030-01-31T08:00:00Z.")
    ] = None,
    timeout: _Timeout = "60s",
) -> None:
    """Stop workers from claiming the tasks of a queue, a task name, or a --tenant. Current runs continue.

    The command returns once every live worker has confirmed. The pause lasts until `mtask resume`, or ends by the
    server's clock with --for or --until.
    """
    limit = values.duration(timeout, "timeout")
    if lasts is not None and until is not None:
        raise InvalidInput("give --for or --until, not both.", field="until")
    end = None if until is None else values.instant(until, "until")
    given = end if lasts is None else values.duration(lasts, "for")
    _report(cli, cli.client().pause(queue=queue, name=name, tenant=cli.flags.tenant, until=given, timeout=limit))


def resume(cli: Cli, queue: _Queue = None, name: _Name = None, timeout: _Timeout = "60s") -> None:
    """Let workers claim the tasks of a paused queue, task name or --tenant again."""
    limit = values.duration(timeout, "timeout")
    _report(cli, cli.client().resume(queue=queue, name=name, tenant=cli.flags.tenant, timeout=limit))


def limit(
    cli: Cli,
    queue: Annotated[
        str | None, typer.Argument(metavar="QUEUE", help="A queue. Else give --tenant.", show_default=False)
    ] = None,
    concurrency: Annotated[int | None, typer.Option("--concurrency", metavar="NUMBER", help="Runs at once.")] = None,
    rate: Annotated[
        str | None,
        typer.Option("--rate", metavar="STARTS/WINDOW", help="Starts in any window of this length: 100/1s, 5/s."),
    ] = None,
    key_concurrency: Annotated[
        int | None, typer.Option("--key-concurrency", metavar="NUMBER", help="Runs at once for each limit_key.")
    ] = None,
    key_rate: Annotated[
        str | None, typer.Option("--key-rate", metavar="STARTS/WINDOW", help="Starts in any window for each limit_key.")
    ] = None,
    tenant_concurrency: Annotated[
        int | None, typer.Option("--tenant-concurrency", metavar="NUMBER", help="Runs at once for each tenant.")
    ] = None,
    tenant_rate: Annotated[
        str | None,
        typer.Option("--tenant-rate", metavar="STARTS/WINDOW", help="Starts in any window for each tenant."),
    ] = None,
    none: Annotated[bool, typer.Option("--none", help="Remove all limits of the queue, or of the tenant.")] = False,
    timeout: _Timeout = "60s",
) -> None:
    """Limit the runs of a queue's tasks, or of a --tenant's tasks in all queues, counted over all workers.

    The command replaces all limits of the queue or the tenant: a limit that is not given is removed. It returns once
    every live worker has confirmed.
    """
    given = (concurrency, rate, key_concurrency, key_rate, tenant_concurrency, tenant_rate)
    if none == any(value is not None for value in given):
        raise InvalidInput("give at least one limit, or --none, and not both.", field="rate")
    control = cli.client().limit(
        queue,
        concurrency=concurrency,
        rate=_rate(rate, "rate"),
        key_concurrency=key_concurrency,
        key_rate=_rate(key_rate, "key_rate"),
        tenant_concurrency=tenant_concurrency,
        tenant_rate=_rate(tenant_rate, "tenant_rate"),
        tenant=cli.flags.tenant,
        timeout=values.duration(timeout, "timeout"),
    )
    cli.answer(
        control.model_dump(by_alias=True), f"{control.kind} {clean(control.target)}  {_limits(control) or 'no limits'}"
    )


def fair(
    cli: Cli,
    queue: Annotated[str, typer.Argument(metavar="QUEUE", help="A queue.", show_default=False)],
    turns: Annotated[str, typer.Argument(metavar="on|off", help="Whether its tenants take turns.", show_default=False)],
    timeout: _Timeout = "60s",
) -> None:
    """Let the tenants of a queue take turns, or let them no longer.

    With fair turns, a tenant with very many waiting tasks starts no more of them than each other tenant that has tasks.
    Priorities then order the tasks within one tenant. The command returns once every live worker has confirmed.
    """
    if turns not in ("on", "off"):
        raise InvalidInput(f"{turns!r}: say on or off.", field="turns")
    control = cli.client().set_fair(queue, turns == "on", timeout=values.duration(timeout, "timeout"))
    told = _FAIR if control.fair else "in the order of priority and age"
    cli.answer(control.model_dump(by_alias=True), f"queue {clean(control.target)}  {told}")


def keep(
    cli: Cli,
    queue: Annotated[str, typer.Argument(metavar="QUEUE", help="A queue.", show_default=False)],
    success: Annotated[
        int | None, typer.Option("--success", metavar="NUMBER", help="Number of SUCCESS tasks to keep.")
    ] = None,
    fail: Annotated[
        int | None, typer.Option("--fail", metavar="NUMBER", help="Number of FAIL and CANCELED tasks to keep.")
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Keep all tasks again.")] = False,
    timeout: _Timeout = "60s",
) -> None:
    """Keep only the newest finished tasks of a queue.

    The command replaces both numbers of the queue. 0 keeps no task. If a number is not given, all tasks with its
    statuses are kept. The workers that serve the queue remove the other finished tasks. The command returns once every
    live worker has confirmed.
    """
    if everything == (success is not None or fail is not None):
        raise InvalidInput("give --success or --fail, or --all, and not both.", field="success")
    limit = values.duration(timeout, "timeout")
    control = cli.client().keep(queue, success=success, fail=fail, timeout=limit)
    cli.answer(control.model_dump(by_alias=True), f"queue {clean(control.target)}  {_kept(control) or 'keeps all'}")


def _kept(control: Control) -> str:
    kept = (("SUCCESS", control.keep_success), ("FAIL and CANCELED", control.keep_fail))
    parts = [f"{count:,} {statuses}" for statuses, count in kept if count is not None]
    return f"keeps the newest {', '.join(parts)}" if parts else ""


def _rate(text: str | None, field: str) -> tuple[int, timedelta] | None:
    if text is None:
        return None
    starts, slash, window = text.partition("/")
    window = window.strip()
    if not slash or not starts.strip().isdecimal() or not window:
        raise InvalidInput(f"{values.flag_of(field)} {text!r}: use STARTS/WINDOW, such as 100/1s or 5/s.", field=field)
    # A unit alone means one of it.
    return int(starts), values.duration(f"1{window}" if window[0].isalpha() else window, field)


def _state(control: Control) -> str:
    return "paused" if control.paused else "waits" if control.limited_until is not None else "tripped"


def _limits(control: Control) -> str:
    parts = [] if control.breaker is None else [str(control.breaker)]
    parts += [] if control.limit is None else [str(control.limit)]
    if control.key_limit is not None:
        parts.append(f"each key {control.key_limit}")
    if control.tenant_limit is not None:
        parts.append(f"each tenant {control.tenant_limit}")
    return "; ".join(parts)


def _report(cli: Cli, control: Control) -> None:
    word = "paused" if control.paused else "resumed"
    end = f"  until {moment(control.until)}" if control.paused and control.until is not None else ""
    cli.answer(control.model_dump(by_alias=True), f"{word}  {control.kind} {clean(control.target)}{end}")


def _holds(control: Control, now: datetime) -> list[str]:
    """Return what of a control ends by itself, in words."""
    parts = []
    if control.paused and control.until is not None:
        parts.append(f"resumes {relative(control.until, now)}")
    if control.limited_until is not None:
        parts.append(f"rate limited, goes on {relative(control.limited_until, now)}")
    if control.limited_keys:
        count = len(control.limited_keys)
        parts.append(f"{count:,} limit_key{'s' if count > 1 else ''} rate limited")
    if control.opened is not None:
        parts.append(
            f"too many failures: {clean(control.opened.by)} tries one task {relative(control.opened.until, now)}"
        )
    return parts


def controls(cli: Cli) -> None:
    """List the controls of queues, task names and tenants: pauses, limits, turns and the number of tasks to keep."""
    client = cli.client(reads_only=True)
    found = client.controls()
    if cli.is_json:
        cli.json([control.model_dump(by_alias=True) for control in found])
        return
    if not found:
        cli.notice("no queue, task name or tenant has a control: nothing is paused or limited, and all tasks are kept")
        return
    now = client.server_time()
    columns = (
        Column("STATE"),
        Column("KIND"),
        Column("TARGET", is_id=True),
        Column("BOUNDS", wraps=True),
        Column("SINCE", leaves=1),
    )
    rows: list[list[str | Text]] = [
        [
            Text(_state(control), style="yellow") if control.is_held else "open",
            control.kind,
            control.target,
            "; ".join(
                filter(None, (*_holds(control, now), _limits(control), _FAIR if control.fair else "", _kept(control)))
            )
            or "-",
            relative(control.update_time, now),
        ]
        for control in (stored.at(now) for stored in found)
    ]
    cli.say(*listing(columns, rows, cli.out.width))


# --- purge -----------------------------------------------------------------------------------------------

# `mtask purge` removes many finished tasks.

#: The number of tasks to remove between two messages about the progress.
_REMARK_EVERY = 10_000


def purge(
    cli: Cli,
    *,
    status: Annotated[
        list[str],
        typer.Option(
            "--status",
            "-s",
            metavar="STATUS",
            help="SUCCESS, FAIL or CANCELED (default: all three), or INIT; repeatable.",
            show_default=False,
        ),
    ] = [],  # noqa: B006 typer reads it
    named: NameCriteria,
    older_than: Annotated[
        str | None, typer.Option("--older-than", metavar="DURATION", help="Time since they finished, or were created.")
    ] = None,
    limit: Annotated[int, typer.Option("--limit", "-l", min=0, help="Largest number to remove; 0 = all.")] = 0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Count the tasks and remove none.")] = False,
    yes: YesFlag = False,
) -> int:
    """Remove finished tasks in batches. Workers may run meanwhile.

    The command asks for confirmation. In a script, give --yes.
    """
    client = cli.client()
    given = {
        **named,
        "status": [text.upper() for text in values.separated(status)] or None,
        "older_than": None if older_than is None else values.duration(older_than, "older_than"),
    }
    found = client.purge(**given, limit=limit, dry_run=True)  # type: ignore[arg-type]
    if dry_run or not found:
        cli.answer({"removed": 0, "found": found}, f"{found:,} tasks would be removed" if found else "nothing matches")
        return failures.OK
    question, risk = f"Remove {found:,} tasks from {client.database_name}?", f"{found:,} tasks would be removed"
    if not yes and not is_confirmed(cli, question, risk=risk):
        return failures.OTHER
    removed = 0
    while True:
        most = min(_REMARK_EVERY, limit - removed) if limit else _REMARK_EVERY
        now = client.purge(**given, limit=most)  # type: ignore[arg-type]
        removed += now
        if now < most or removed == limit:
            break
        cli.notice(f"{removed:,} of {found:,} removed")
    cli.answer({"removed": removed, "found": found}, f"{removed:,} tasks removed")
    return failures.OK
