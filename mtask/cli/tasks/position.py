"""`mtask position`."""

from __future__ import annotations

from dataclasses import asdict

import typer
from rich.text import Text

from mtask.cli.context import Cli
from mtask.cli.options import KeyArgument, TaskArgument, command, name_and_key
from mtask.cli.output import clean, counted, lasting, relative, status_text
from mtask.doctor.position import Position
from mtask.kernel.document.status import TaskStatus

PANEL = "Tasks"
#: Why a task with this status has no place in its queue, and what tells more.
_NO_PLACE = {
    TaskStatus.WAITING: "waits for other tasks of its flow: it has no place in its queue before they have ended",
    TaskStatus.RUNNING: "a worker runs it: it has no place in its queue",
    TaskStatus.SUCCESS: "has ended: it has no place in its queue; `mtask result` prints what it returned",
    TaskStatus.FAIL: "has ended: it has no place in its queue; `mtask show` tells why, `mtask retry` runs it again",
    TaskStatus.CANCELED: "has ended: it has no place in its queue; `mtask show` tells why, `mtask retry` runs it again",
}


def register(app: typer.Typer) -> None:
    """Add the command."""
    command(app, "position", panel=PANEL)(position)


def position(cli: Cli, name: TaskArgument, key: KeyArgument = None) -> None:
    """Show the place of a task among the due tasks of its queue, and when it will probably start.

    Interrupted tasks go before it, then those of a higher priority, then those that have been due for longer. Only
    tasks that the same workers may take are counted, up to nearly 10,000. Where the tenants of the queue take turns,
    the tasks of its tenant are counted, and the other tenants that have their turn first.
    """
    found = cli.client(reads_only=True).position(*name_and_key(cli, name, key))
    reasons = [{"reason": r.code, "message": r.message, "until": r.until} for r in found.reasons]
    heading = Text.assemble((clean(found.task_id), "bold"), "  ", status_text(found.status))
    cli.answer({**asdict(found), "is_due": found.is_due, "reasons": reasons}, heading, *_lines(found))


def _lines(found: Position) -> list[str | Text]:
    if found.ahead is None or found.due_time is None:
        why = _NO_PLACE.get(
            found.status, "no worker can take it: it has no place in its queue; `mtask show` tells more"
        )
        held = "" if found.due_time is None else f"; its lease ends {relative(found.due_time, found.now)}"
        return [f"{why}{held}", *_reasons(found)]
    least = "at least " if found.is_more else ""
    of, turns = "", ""
    if found.tenants_ahead is not None:
        of, turns = " of its tenant", f", and {counted(found.tenants_ahead, 'tenant')} with an earlier turn"
    number = f"{least}{counted(found.ahead, 'due task')}" if found.ahead or least else "no due task"
    due = (
        f"due for {lasting(found.now - found.due_time)}"
        if found.is_due
        else f"due {relative(found.due_time, found.now)}"
    )
    lines: list[str | Text] = [f"{number}{of} before it{turns}; {due}"]
    if found.start_estimate is not None:
        by = "" if found.rate is None else f", as its queue finishes {found.rate:.3g} tasks a second"
        least = "not before " if found.is_more else "probably "
        when = relative(found.start_estimate, found.now) if found.start_estimate > found.now else "now"
        lines.append(f"starts {least}{when}{by}")
    return [*lines, *_reasons(found)]


def _reasons(found: Position) -> list[Text]:
    return [Text(clean(reason.message), style="yellow") for reason in found.reasons]
