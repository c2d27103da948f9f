"""`mtask wait`, `mtask result` and `mtask position`."""

from __future__ import annotations

from dataclasses import asdict

from rich.text import Text

from mtask.cli import failures, values
from mtask.cli.context import Cli
from mtask.cli.options import KeyArgument, TaskArgument, TimeoutFlag, commands, name_and_key
from mtask.cli.output import clean, compact, counted, lasting, relative, status_text, task_document
from mtask.doctor.position import Position
from mtask.kernel.document.status import TaskStatus
from mtask.kernel.document.task import Task
from mtask.kernel.driver.extended_json import extended

CODES = {
    TaskStatus.SUCCESS: failures.OK,
    TaskStatus.FAIL: failures.TASK_FAILED,
    TaskStatus.CANCELED: failures.TASK_CANCELED,
}


def wait(
    cli: Cli,
    name: TaskArgument,
    key: KeyArgument = None,
    timeout: TimeoutFlag = None,
) -> int:
    """Wait until a task has ended.

    The exit code is 0 for SUCCESS, 8 for FAIL, 9 for CANCELED, 6 after the timeout, and 4 if no such task exists.
    """
    limit = None if timeout is None else values.duration(timeout, "timeout")
    named = name_and_key(cli, name, key)
    client = cli.client(reads_only=True)
    if cli.flags.verbose:
        cli.notice(f"{clean(cli.task_id(*named))} is {client.get(*named).status}; waiting until it ends")
    task = client.wait(*named, timeout=limit)
    cli.answer(task_document(task), ended(task))
    return CODES.get(task.status, failures.OTHER)


def ended(task: Task) -> Text:
    """Return a line that describes a finished task."""
    line = Text.assemble(status_text(task.status), "  ", clean(task.id))
    if task.status is TaskStatus.SUCCESS and task.returns is not None:
        line.append(f"  returns {compact(task.returns, 200)}")
    elif task.status is TaskStatus.SUCCESS and task.returns_lost is not None:
        line.append(f"  its result is lost: {clean(task.returns_lost, 200)}", style="yellow")
    elif task.status is not TaskStatus.SUCCESS and task.fail_reason:
        line.append(f"  {clean(task.fail_reason)}", style="red")
    return line


# --- result ----------------------------------------------------------------------------------------------


def result(
    cli: Cli,
    name: TaskArgument,
    key: KeyArgument = None,
    timeout: TimeoutFlag = None,
) -> None:
    """Wait until a task has ended, and print what its handler returned, as JSON.

    The exit code is 8 if the task ended as FAIL, 9 if it was CANCELED, 6 after the timeout, and 4 if no such task
    exists.
    """
    limit = None if timeout is None else values.duration(timeout, "timeout")
    named = name_and_key(cli, name, key)
    returns = cli.client(reads_only=True).result(*named, timeout=limit)
    cli.answer({"task_id": cli.task_id(*named), "returns": extended(returns)}, compact(returns))


# --- position --------------------------------------------------------------------------------------------

#: Why a task with this status has no place in its queue, and what tells more.
_NO_PLACE = {
    TaskStatus.WAITING: "waits for other tasks of its flow: it has no place in its queue before they have ended",
    TaskStatus.RUNNING: "a worker runs it: it has no place in its queue",
    TaskStatus.SUCCESS: "has ended: it has no place in its queue; `mtask result` prints what it returned",
    TaskStatus.FAIL: "has ended: it has no place in its queue; `mtask show` tells why, `mtask retry` runs it again",
    TaskStatus.CANCELED: "has ended: it has no place in its queue; `mtask show` tells why, `mtask retry` runs it again",
}


def position(cli: Cli, name: TaskArgument, key: KeyArgument = None) -> None:
    """Show the place of a task among the due tasks of its queue, and when it will probably start.

    Interrupted tasks go before it, then those of a higher priority, then those that have been due for longer. Only
    tasks that the same workers may take are counted, up to nearly 10,000. Where the tenants of the queue take turns,
    the tasks of its tenant are counted, and the other tenants that have their turn first.
    """
    found = cli.client(reads_only=True).position(*name_and_key(cli, name, key))
    reasons = [{"reason": r.code, "message": r.message, "until": r.until} for r in found.reasons]
    heading = Text.assemble((clean(found.task_id), "bold"), "  ", status_text(found.status))
    cli.answer({**asdict(found), "is_due": found.is_due, "reasons": reasons}, heading, *_lines(found), *_made(found))


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


def _made(found: Position) -> list[str]:
    """Return for which version of the handler the task was made, if it is known."""
    if found.declared is None and found.version == 1:
        return []
    declared = "" if found.declared is None else f" (declared: {clean(found.declared)})"
    return [f"made for version {found.version} of its handler{declared}"]


def _reasons(found: Position) -> list[Text]:
    return [Text(clean(reason.message), style="yellow") for reason in found.reasons]


register = commands("Tasks", {"wait": wait, "result": result, "position": position})
