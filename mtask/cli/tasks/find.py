"""`mtask find`, which is also `mtask list`, and `mtask stats`."""

from __future__ import annotations

import shlex
from collections import defaultdict
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Annotated, Any

import typer
from rich.text import Text

from mtask.arguments.criteria import FindCriteria, NameCriteria, PageArguments
from mtask.cli import values
from mtask.cli.context import Cli
from mtask.cli.options import commands
from mtask.cli.output import Column, clean, compact, lasting, listing, moment, relative, status_text, task_document
from mtask.client.sync import Client
from mtask.client.views import StatRow
from mtask.errors import InvalidInput
from mtask.kernel.document import rules
from mtask.kernel.document.status import TaskStatus
from mtask.kernel.document.task import Task
from mtask.kernel.driver.extended_json import extended
from mtask.says import split
from mtask.search.pages import MAX_PAGE, TaskPage
from mtask.search.partial import TaskFields

#: The greatest width of a value in a list that is no text, in characters.
_FIELD_WIDTH = 80
#: The counts that a narrow terminal does not show.
_LEAVES: Mapping[str, int] = {TaskStatus.CANCELED: 3, TaskStatus.SUCCESS: 2}


def list_tasks(
    cli: Cli,
    criteria: PageArguments,
    fields: Annotated[
        list[str],
        typer.Option(
            "--fields",
            metavar="FIELD,FIELD",
            help="Read and print only these: returns, status, fail_reason, params.user_id, task_state.finish_time, ...",
            show_default=False,
        ),
    ] = [],  # noqa: B006 typer reads it
    after: Annotated[
        str | None,
        typer.Option("--after", metavar="NAME:KEY", help="Continue after this task, the newest first."),
    ] = None,
    limit: Annotated[int, typer.Option("--limit", "-l", min=0, help="Largest number to list; 0 = all.")] = 50,
) -> None:
    """List tasks. `mtask find` and `mtask list` are the same command.

    The newest comes first; with only --status SUCCESS, FAIL or CANCELED, the last finished; with only --status INIT or
    RUNNING, the one that is due first. A flag that is given several times matches tasks with any of its values. An
    index finds tasks by --lookup. --after and --limit 0 list the newest first.
    """
    asked = values.separated(fields)
    plain, paged = split(FindCriteria, criteria)
    wanted: dict[str, Any] = {**plain, "fields": asked or None}
    client = cli.client(reads_only=True)
    page: TaskPage[Any]
    more = None
    if after is None and 0 < limit <= MAX_PAGE:
        page = client.find_page(**wanted, **paged, limit=limit)
    elif paged:
        raise InvalidInput(
            "--cursor, --key-prefix, --param, --since and --before list pages: give no --after, and --limit 1 to "
            f"{MAX_PAGE}.",
            field="limit",
        )
    else:
        found: list[Any] = client.find(**wanted, after=after, limit=limit + 1 if limit else 0)
        page = TaskPage(found[:limit] if limit else found, None)
        if limit and len(found) > limit:
            more = f"more: --after {shlex.quote(page.tasks[-1].id)}"
    shown = page.tasks
    if page.looked_to is not None:
        more = f"looked to {moment(page.looked_to)}; on: --cursor {page.next_cursor}"
    elif page.next_cursor is not None:
        more = f"more: --cursor {page.next_cursor}"
    if cli.is_json:
        cli.json([fields_document(row) if isinstance(row, TaskFields) else task_document(row) for row in shown])
    elif not shown:
        nothing_found(cli, client)
    elif asked:
        lines = [[row.id, *(_shown(row[field]) for field in asked)] for row in shown]
        headings = [Column("TASK", is_id=True), *(Column(field.upper(), wraps=True) for field in asked)]
        cli.say(*listing(headings, lines, cli.out.width))
    else:
        _list(cli, client, shown)
    if more is not None:
        cli.notice(more)


def _shown(value: object) -> str:
    """Return a value of a list. Text is not cut: it may be a reason, or an id."""
    return clean(value) if type(value) is str else compact(value, _FIELD_WIDTH)


def fields_document(row: TaskFields) -> dict[str, Any]:
    """Return the fields of a partial read. Values that are no JSON become extended JSON, which keeps BSON types."""
    return {"_id": row.id, **{field: extended(value) for field, value in row.items()}}


def _list(cli: Cli, client: Client, shown: Sequence[Task]) -> None:
    now = client.server_time()
    columns = (
        Column("STATUS"),
        Column("TASK", is_id=True),
        Column("QUEUE", leaves=2),
        Column("PRIO", right=True, leaves=6),
        Column("CREATED", leaves=3),
        Column("NEXT", leaves=1),
        Column("RUNS", right=True, leaves=5),
        Column("LAST WORKER", leaves=4),
        Column("REASON", wraps=True),
    )
    cli.say(*listing(columns, [_task_row(task, now) for task in shown], cli.out.width))


def _task_row(task: Task, now: datetime) -> list[str | Text]:
    return [
        status_text(task.status),
        task.id,
        task.queue,
        str(task.task_option.priority),
        relative(task.task_state.create_time, now),
        _next(task, now),
        str(len(task.runs)),
        task.runs[-1].worker_id if task.runs else "",
        Text(clean(_reason(task)), style="red"),
    ]


def nothing_found(cli: Cli, client: Client) -> None:
    """Print that nothing was found, and name the database."""
    cli.notice(f"no task in database {client.database_name!r} matches")


def _next(task: Task, now: datetime) -> str:
    """Return when the task can change next: its lease ends, or it is due."""
    if task.status.is_final:
        return ""
    live = rules.live_runs(task, now)
    if live:
        return f"lease {relative(max(run.ping_expire_time for run in live), now)}"
    if task.status is TaskStatus.WAITING:
        return "after others"
    instant = task.task_state.next_preempt_time
    if instant is None:
        return "?"
    return relative(instant, now) if instant > now else f"due {lasting(now - instant)}"


def _reason(task: Task) -> str:
    """Return why the last run failed. Without a run, return why the task ended."""
    return (task.runs[-1].fail_reason if task.runs else task.task_state.reason) or ""


def stats(cli: Cli, only: NameCriteria) -> None:
    """Count tasks by queue, name and status, and show how long the oldest task has waited."""
    queues, names = only.get("queue") or (), only.get("name") or ()
    client = cli.client(reads_only=True)
    rows = [
        found
        for found in client.stats()
        if (not queues or found.queue in queues) and (not names or found.name in names)
    ]
    now = client.server_time()
    if cli.is_json:
        cli.json([_row_document(found, now) for found in rows])
        return
    if not rows:
        nothing_found(cli, client)
        return
    grouped: dict[tuple[str, str], dict[str, StatRow]] = defaultdict(dict)
    for found in rows:
        grouped[found.queue, found.name][found.status] = found
    present = [found.status for found in rows]
    # A database without flows has no WAITING tasks, and needs no column for them.
    usual = [status for status in TaskStatus if status is not TaskStatus.WAITING or status in present]
    statuses = list(dict.fromkeys([*usual, *present]))
    columns = [Column("QUEUE", is_id=True), Column("NAME", is_id=True)]
    columns += [Column(status, right=True, leaves=_LEAVES.get(status, 0)) for status in statuses]
    columns += [Column("TOTAL", right=True, leaves=4), Column("OLDEST", right=True, leaves=1)]
    columns.append(Column("STUCK", wraps=True))
    lines: list[list[str | Text]] = []
    for (in_queue, of_name), by_status in grouped.items():
        counts = [_count(by_status.get(status), status) for status in statuses]
        total = sum(found.count for found in by_status.values())
        waiting = by_status.get(TaskStatus.INIT)
        stuck = Text(clean(waiting.stuck) if waiting and waiting.stuck else "", style="red")
        lines.append([in_queue, of_name, *counts, str(total), _oldest(waiting, now), stuck])
    cli.say(*listing(columns, lines, cli.out.width))


def _count(found: StatRow | None, status: str) -> Text:
    if found is None:
        return Text("·", style="bright_black")
    text = status_text(status)
    text.plain = str(found.count)
    return text


def _oldest(waiting: StatRow | None, now: datetime) -> str:
    if waiting is None or waiting.oldest_preempt_time is None:
        return ""
    if waiting.oldest_preempt_time > now:
        return f"due {relative(waiting.oldest_preempt_time, now)}"
    return lasting(now - waiting.oldest_preempt_time)


def _row_document(found: StatRow, now: datetime) -> dict[str, object]:
    waiting = None
    if found.status == TaskStatus.INIT and found.oldest_preempt_time is not None:
        waiting = max(0, round((now - found.oldest_preempt_time).total_seconds() * 1000))
    return {
        "queue": found.queue,
        "name": found.name,
        "status": found.status,
        "count": found.count,
        "oldest_preempt_time": found.oldest_preempt_time,
        "oldest_waiting_ms": waiting,
        "stuck": found.stuck,
    }


register = commands("Tasks", {"find": list_tasks, "list": list_tasks, "stats": stats})
