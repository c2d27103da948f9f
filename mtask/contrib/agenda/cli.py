"""`mtask migrate agenda` moves the jobs of Agenda to mtask."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import typer

from mtask.cli.context import Cli
from mtask.cli.options import command_group
from mtask.cli.output import Column, counted, listing
from mtask.contrib.agenda.jobs import Jobs
from mtask.contrib.agenda.migration import Migration, Result
from mtask.errors import InvalidInput, shown
from mtask.features.schedules.triggers import zone
from mtask.kernel.document.identity import check_name


def agenda(
    cli: Cli,
    place: Annotated[
        str,
        typer.Option(
            "--from",
            metavar="DATABASE.COLLECTION",
            help="Agenda's jobs, on the same server: shop.agendaJobs.",
            show_default=False,
        ),
    ],
    name: Annotated[
        list[str],
        typer.Option(
            "--name",
            metavar="JOB=TASK",
            help="The name of the tasks of a job: 'send email=send_email'; repeatable. Else the same name.",
            show_default=False,
        ),
    ] = [],  # noqa: B006 typer reads it
    timezone: Annotated[
        str,
        typer.Option(
            "--timezone",
            metavar="NAME",
            help="Time zone of repeating jobs that name none: that of the machine on which Agenda ran.",
        ),
    ] = "UTC",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Move nothing, and tell what would be moved.")] = False,
) -> None:
    """Move the jobs of Agenda that wait: each becomes a task, and a repeating one a schedule, under the key agenda/ID.

    A job is disabled in the transaction that publishes it, so it runs here or there, and once. What stays is listed
    with the reason. A second call moves nothing twice.
    """
    client = cli.client()
    migration = Migration(client, Jobs(client, place), _names(name), _zone(timezone))
    result = migration.run(dry_run=dry_run)
    answer = {"from": place, "database": client.database_name, "dry_run": dry_run, **_document(result)}
    cli.answer(answer, *_lines(result, cli.out.width), _summary(result, place, client.database_name, dry_run=dry_run))
    if result.zoneless:
        cli.notice(
            f"{counted(result.zoneless, 'schedule')} in {timezone}, as the jobs name no time zone; Agenda took that of "
            "its machine: --timezone names another",
            style="yellow",
        )
    for became in {one.name for one in result.moved.values()}:
        if (told := client.unknown_name(became)) is not None:
            cli.notice(str(told), style="yellow")


def _names(given: Sequence[str]) -> dict[str, str]:
    """Return the names of tasks by those of jobs; raise InvalidInput."""
    names: dict[str, str] = {}
    for text in given:
        job, separator, task = text.rpartition("=")
        if not job or not separator:
            raise InvalidInput(f"--name {shown(text)}: give JOB=TASK, such as 'send email=send_email'.", field="name")
        if names.setdefault(job, check_name(task)) != task:
            raise InvalidInput(f"--name: the job {shown(job)} is given two names: {names[job]}, {task}.", field="name")
    return names


def _zone(name: str) -> str:
    """Return the name of a time zone; raise InvalidInput."""
    try:
        zone(name)
    except ValueError as error:
        raise InvalidInput(f"--timezone {shown(name)}: {error}.", field="timezone") from None
    return name


def _document(result: Result) -> dict[str, Any]:
    return {
        "moved": [
            {"name": name, "task": one.name, "tasks": one.tasks, "schedules": one.schedules}
            for name, one in sorted(result.moved.items())
        ],
        "left": [
            {"name": name, "reason": reason, "count": one.count, "ids": one.ids}
            for (name, reason), one in sorted(result.left.items())
        ],
    }


def _lines(result: Result, width: int) -> list[Any]:
    moved = [[name, one.name, str(one.tasks), str(one.schedules)] for name, one in sorted(result.moved.items())]
    left = [[name, str(one.count), reason] for (name, reason), one in sorted(result.left.items())]
    lines: list[Any] = []
    if moved:
        became = (Column("JOB"), Column("BECOMES"), Column("TASKS", right=True), Column("SCHEDULES", right=True))
        lines += [*listing(became, moved, width), ""]
    if left:
        stays = (Column("STAYS"), Column("JOBS", right=True), Column("WHY", wraps=True))
        lines += [*listing(stays, left, width), ""]
    return lines


def _summary(result: Result, place: str, database: str, *, dry_run: bool) -> str:
    verb = "would be moved" if dry_run else "moved"
    stay = f"; {result.left_cnt} stay" if result.left_cnt else ""
    return f"{counted(result.moved_cnt, 'job')} of {place} {verb} to database {database}{stay}"


register = command_group("migrate", "Database", "Move what another task queue holds to mtask.", {"agenda": agenda})
