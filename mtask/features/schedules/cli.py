"""`mtask schedule` manages schedules, which publish tasks again and again."""

from __future__ import annotations

from datetime import UTC, datetime, tzinfo
from typing import TYPE_CHECKING, Annotated, Any
from zoneinfo import ZoneInfo

import typer
from rich.text import Text

from mtask.arguments.criteria import LookupCriteria
from mtask.cli import failures, values
from mtask.cli.context import Cli
from mtask.cli.options import YesFlag, command_group, is_confirmed
from mtask.cli.output import Column, clean, compact, iso, listing, moment, relative
from mtask.errors import InvalidInput, ScheduleNotFound
from mtask.features.schedules.client import TIMES, TimesArguments, When
from mtask.features.schedules.rules import Schedule, ScheduleState
from mtask.features.schedules.triggers import Cron
from mtask.kernel.document.options import TaskOptions
from mtask.kernel.driver.extended_json import extended

if TYPE_CHECKING:
    from mtask.client.sync import Client

_Id = Annotated[str, typer.Argument(metavar="ID", help="The schedule's id.", show_default=False)]


def add(
    cli: Cli,
    schedule_id: _Id,
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the task to publish.", show_default=False)],
    params: Annotated[
        str | None,
        typer.Argument(metavar="PARAMS", help="Params for the handler, as MongoDB extended JSON.", show_default=False),
    ] = None,
    cron: Annotated[
        str | None,
        typer.Option(
            "--cron", metavar="CRONTAB", help="Minute, hour, day, month, weekday: '*/5 * * * *'.", rich_help_panel=TIMES
        ),
    ] = None,
    every: Annotated[
        str | None,
        typer.Option("--every", metavar="DURATION", help="Interval between two firings.", rich_help_panel=TIMES),
    ] = None,
    at: Annotated[
        str | None,
        typer.Option("--at", metavar="INSTANT", help="Fire once, then: 2030-01-31T08:00:00Z.", rich_help_panel=TIMES),
    ] = None,
    *,
    times: TimesArguments,
    paused: Annotated[bool, typer.Option("--paused", help="Add the schedule paused.")] = False,
    queue: Annotated[str | None, typer.Option("--queue", help="Queue of the tasks. Else 'default'.")] = None,
    options: TaskOptions,
    lookup: LookupCriteria,
    params_file: Annotated[
        str | None, typer.Option("--params-file", metavar="FILE", help="Read the params from a file; '-' is stdin.")
    ] = None,
    if_exists: Annotated[
        str,
        typer.Option("--if-exists", metavar="update|keep|reject", help="What to do if a schedule with this id exists."),
    ] = "reject",
) -> None:
    """Add a schedule, or change one with --if-exists update.

    Workers fire the schedule. Each firing publishes one task under the key ID/INSTANT, however many workers there are.
    """
    read = values.params_from(params, params_file)
    client = cli.client()
    schedule = client.add_schedule(  # type: ignore[call-overload]  # Typer gives no literals
        schedule_id,
        name,
        _when(cron, every, at),
        read,
        if_exists=if_exists,
        paused=paused or None,
        queue=queue,
        **times,
        **lookup,
        **options,
    )
    _report(cli, schedule)
    if (told := client.unknown_name(name)) is not None:
        cli.notice(str(told), style="yellow")


def _when(cron: str | None, every: str | None, at: str | None) -> When:
    if sum(given is not None for given in (cron, every, at)) != 1:
        raise InvalidInput("give one of --cron, --every and --at.", field="cron")
    if cron is not None:
        return cron
    return values.duration(every, "every") if every is not None else values.instant(at or "", "at")


def _report(cli: Cli, schedule: Schedule) -> None:
    following = schedule.schedule_state.next_fire_time
    remark = "paused" if schedule.paused else "over" if following is None else f"next {_shown(schedule, following)}"
    cli.answer(schedule_document(schedule), f"{clean(schedule.id)}  {clean(schedule.trigger)}  {remark}")


def schedule_document(schedule: Schedule) -> dict[str, Any]:
    """Return the schedule's document. Its params are extended JSON, which keeps BSON types."""
    return {**schedule.model_dump(by_alias=True), "params": extended(schedule.params)}


def _zone(schedule: Schedule) -> tzinfo:
    return ZoneInfo(schedule.trigger.timezone) if isinstance(schedule.trigger, Cron) else UTC


def _shown(schedule: Schedule, instant: datetime) -> str:
    """Return an instant for people: in UTC, and in the schedule's time zone if that is another."""
    zone = _zone(schedule)
    if isinstance(schedule.trigger, Cron) and schedule.trigger.timezone != "UTC":
        return f"{moment(instant)} ({instant.astimezone(zone):%H:%M:%S} {schedule.trigger.timezone})"
    return moment(instant)


def list_schedules(cli: Cli) -> None:
    """List the schedules."""
    client = cli.client(reads_only=True)
    found = client.schedules()
    if cli.is_json:
        cli.json([schedule_document(schedule) for schedule in found])
        return
    if not found:
        cli.notice(f"database {client.database_name!r} has no schedules; `mtask schedule add` adds one")
        return
    now = client.server_time()
    columns = (
        Column("SCHEDULE", is_id=True),
        Column("TASK", leaves=2),
        Column("WHEN", wraps=True),
        Column("NEXT", leaves=1),
        Column("LAST", leaves=3),
        Column("FIRED", right=True, leaves=4),
        Column("SKIPPED", right=True, leaves=6),
        Column("BY", leaves=5),
    )
    cli.say(*listing(columns, [_row(schedule, now) for schedule in found], cli.out.width))


def _row(schedule: Schedule, now: datetime) -> list[str | Text]:
    state = schedule.schedule_state
    following: str | Text = "-" if state.next_fire_time is None else relative(state.next_fire_time, now)
    return [
        schedule.id,
        schedule.name,
        str(schedule.trigger),
        Text("paused", style="yellow") if schedule.paused else following,
        "-" if state.last_fire_time is None else relative(state.last_fire_time, now),
        str(state.fired_cnt),
        str(state.skipped_cnt),
        schedule.source,
    ]


def show(cli: Cli, schedule_id: _Id) -> None:
    """Show a schedule."""
    client = cli.client(reads_only=True)
    schedule = client.get_schedule(schedule_id)
    if cli.is_json:
        cli.json(schedule_document(schedule))
        return
    now, state = client.server_time(), schedule.schedule_state
    lines = [
        ("schedule", schedule.id),
        ("task", f"{schedule.name}, queue {schedule.queue}"),
        ("params", compact(schedule.params, 200)),
        ("when", str(schedule.trigger)),
        ("from", None if schedule.start_time is None else _shown(schedule, schedule.start_time)),
        ("until", None if schedule.end_time is None else _shown(schedule, schedule.end_time)),
        ("jitter", f"{schedule.jitter_ms} ms" if schedule.jitter_ms else None),
        ("catch up", schedule.catch_up + (f", {schedule.catch_up_limit}" if schedule.catch_up == "all" else "")),
        ("overlap", schedule.overlap),
        ("expires", f"{schedule.expires_ms} ms" if schedule.expires_ms else None),
        ("paused", "yes" if schedule.paused else None),
        ("next", None if state.next_fire_time is None else _at(schedule, state.next_fire_time, now)),
        ("last", None if state.last_fire_time is None else _at(schedule, state.last_fire_time, now)),
        ("last task", _last_task(client, state)),
        ("fired", f"{state.fired_cnt:,}" + (f", {state.skipped_cnt:,} skipped" if state.skipped_cnt else "")),
        ("made by", "the app that declares it" if schedule.source == "app" else "a client"),
    ]
    cli.say(*(Text(f"{label:<10}{clean(text)}") for label, text in lines if text is not None))


def _last_task(client: Client, state: ScheduleState) -> str | None:
    """Return the task of the last firing, and whether somebody else has published it."""
    task_id, fired = state.last_task_id, state.last_fire_time
    if task_id is None or fired is None:
        return task_id
    try:
        found = client.get_many([task_id], fields=["status"]).tasks.get(task_id)
    except InvalidInput:  # somebody has written something else there
        return task_id
    is_taken = found is not None and found.create_time is not None and found.create_time < fired
    return f"{task_id}, published before the firing by somebody else" if is_taken else task_id


def _at(schedule: Schedule, instant: datetime, now: datetime) -> str:
    return f"{_shown(schedule, instant)}, {relative(instant, now)}"


def next_firings(
    cli: Cli,
    schedule_id: _Id,
    count: Annotated[int, typer.Option("--count", "-n", metavar="NUMBER", help="Number of firings to print.")] = 5,
) -> None:
    """Print the next firings of a schedule."""
    client = cli.client(reads_only=True)
    found = client.next_firings(schedule_id, count)
    schedule = client.get_schedule(schedule_id)
    if cli.is_json:
        cli.json([iso(firing) for firing in found])
        return
    if not found:
        cli.notice(f"schedule {clean(schedule_id)!r} is {'paused' if schedule.paused else 'over'}")
        return
    now = client.server_time()
    cli.say(*(Text(_at(schedule, firing, now)) for firing in found))


def pause(cli: Cli, schedule_id: _Id) -> None:
    """Stop firing a schedule until it is resumed."""
    _report(cli, cli.client().pause_schedule(schedule_id))


def resume(cli: Cli, schedule_id: _Id) -> None:
    """Let a paused schedule fire again.

    Firings that were missed during the pause are not made up.
    """
    _report(cli, cli.client().resume_schedule(schedule_id))


def remove(
    cli: Cli,
    schedule_id: _Id,
    yes: YesFlag = False,
) -> int:
    """Remove a schedule.

    The tasks that the schedule has published stay. On a terminal, the command asks for confirmation.
    """
    if not yes and not is_confirmed(cli, f"Remove schedule {clean(schedule_id)}?"):
        return failures.OTHER
    if not cli.client().remove_schedule(schedule_id):
        raise ScheduleNotFound(schedule_id)
    cli.answer({"schedule_id": schedule_id, "removed": True}, f"removed  {clean(schedule_id)}")
    return failures.OK


register = command_group(
    "schedule",
    "Tasks",
    "Tasks that are published again and again: at times of a crontab, at intervals, or once.",
    {
        "add": add,
        "list": list_schedules,
        "show": show,
        "next": next_firings,
        "pause": pause,
        "resume": resume,
        "remove": remove,
    },
)
