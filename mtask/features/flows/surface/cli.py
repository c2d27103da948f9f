"""`mtask flow` shows, lists, cancels, retries and awaits flows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from datetime import datetime
from typing import Annotated, Any

import typer
from rich.text import Text

from mtask.cli import failures, values
from mtask.cli.context import Cli
from mtask.cli.options import TimeoutFlag, callback, command
from mtask.cli.output import Column, clean, counted, hanging, lasting, listing, moment, relative, status_text
from mtask.features.flows.change import ChangedFlow
from mtask.features.flows.surface.drawing import draw
from mtask.features.flows.views import FlowRow, FlowState
from mtask.kernel.document.status import TaskStatus

PANEL = "Tasks"
#: The most reasons of failures below a drawing.
MAX_REASONS = 5
_FlowKey = Annotated[str, typer.Argument(metavar="KEY", help="Key of the flow.", show_default=False)]

app = typer.Typer(name="flow", invoke_without_command=True)


def register(parent: typer.Typer) -> None:
    """Add the commands."""
    about = "Flows: tasks that were published together and that wait for each other."
    parent.add_typer(app, name="flow", rich_help_panel=PANEL, help=about)


@callback(app)
def group(context: typer.Context) -> None:
    """Flows: tasks that were published together and that wait for each other."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def show(
    cli: Cli,
    key: _FlowKey,
    full: Annotated[bool, typer.Option("--full", help="Draw each step on a line of its own.")] = False,
    limit: Annotated[int, typer.Option("--limit", "-l", min=0, help="Largest number of lines to draw; 0 = all.")] = 100,
) -> None:
    """Draw the steps of a flow, with their statuses and times.

    A step is drawn below a step on which it depends. Steps that are alike are folded into one line.
    """
    flow = cli.client(reads_only=True).flow(key)
    if cli.is_json:
        cli.json(flow_document(flow))
        return
    is_ascii = not cli.out.encoding.lower().startswith("utf")
    cli.say(*_heading(flow), "", *draw(flow, cli.out.width, limit=limit, is_full=full, is_ascii=is_ascii))
    cli.say(*_reasons(cli, flow))


def flow_document(flow: FlowState) -> dict[str, Any]:
    """Return the flow for JSON."""
    document = asdict(flow)
    server_time = document.pop("now")
    return {**document, "progress": flow.progress, "server_time": server_time}


def _heading(flow: FlowState) -> list[Text]:
    ended = f"{flow.ended_cnt} of {counted(len(flow.steps), 'step')} ended"
    lines = [Text.assemble((clean(flow.key), "bold"), f"  {ended}"), statuses_text(flow.counts)]
    if flow.create_time is not None and flow.now is not None:
        lines.append(Text(f"created {_when(flow.create_time, flow.now)}", style="bright_black"))
        if flow.end_time is not None:
            took = f", after {lasting(flow.end_time - flow.create_time)}"
            lines.append(Text(f"ended {_when(flow.end_time, flow.now)}{took}", style="bright_black"))
    return lines


def _when(instant: datetime, now: datetime) -> str:
    return f"{moment(instant)} ({relative(instant, now)})"


def statuses_text(counts: Mapping[str, int]) -> Text:
    """Return the numbers of steps by status, in colour."""
    parts = [Text.assemble(f"{count} ", status_text(clean(status, 20))) for status, count in counts.items()]
    return Text(", ").join(parts)


def _reasons(cli: Cli, flow: FlowState) -> list[Text]:
    """Return the reasons of the steps whose failure no other step caused."""
    own = [step for step in flow.failed if step.held_by is None and step.reason is not None]
    lines = []
    for step in own[:MAX_REASONS]:
        head = Text.assemble("  ", (clean(step.step, 24), "bold"), "  ")
        lines += hanging(cli.out.width, head, Text(clean(step.reason), style="red"))
    if len(own) > MAX_REASONS:
        lines.append(Text(f"  and {len(own) - MAX_REASONS} more: --json prints all", style="bright_black"))
    return [Text(""), Text("failed", style="bold"), *lines] if lines else []


def list_flows(
    cli: Cli,
    prefix: Annotated[
        str | None, typer.Option("--prefix", metavar="TEXT", help="Only flows whose keys begin with this.")
    ] = None,
    limit: Annotated[int, typer.Option("--limit", "-l", min=0, help="Largest number to list; 0 = all.")] = 50,
) -> None:
    """List flows, newest first, with the numbers of their steps by status."""
    client = cli.client(reads_only=True)
    found = client.flows(prefix=prefix, limit=limit + 1 if limit else 0)
    shown = found[:limit] if limit else found
    if cli.is_json:
        cli.json([{**asdict(row), "is_ended": row.is_ended} for row in shown])
        return
    if not shown:
        which = "" if prefix is None else f" whose key begins with {prefix!r}"
        cli.notice(f"database {client.database_name!r} holds no flow{which}")
        return
    now = client.server_time()
    columns = (
        Column("FLOW", is_id=True),
        Column("ENDED", right=True),
        Column("CREATED", leaves=1),
        Column("STEPS", wraps=True),
    )
    cli.say(*listing(columns, [_list_row(row, now) for row in shown], cli.out.width))
    if limit and len(found) > limit:
        cli.notice(f"more: --limit {limit * 2}, or 0 for all")


def _list_row(row: FlowRow, now: datetime) -> list[str | Text]:
    created = "" if row.create_time is None else relative(row.create_time, now)
    return [row.key, f"{row.ended_cnt}/{row.step_cnt}", created, statuses_text(row.counts)]


def cancel(
    cli: Cli,
    key: _FlowKey,
    everything: Annotated[
        bool, typer.Option("--everything", help="Cancel the clean-up, too: steps with on_failed run.")
    ] = False,
) -> None:
    """Cancel the open steps of a flow, and ask the workers of its running steps to stop.

    The clean-up stays: steps with on_failed run that depend on others.
    """
    changed = cli.client().cancel_flow(key, everything=everything)
    remark = f"canceled, or asked to stop: {counted(len(changed.task_ids), 'step')}"
    _report(cli, changed, remark if changed.task_ids else "no step was open to cancel")
    if changed.counts.get(TaskStatus.WAITING) and not everything:
        cli.notice("the clean-up stays: --everything cancels it, too")


def retry(cli: Cli, key: _FlowKey) -> None:
    """Let all FAIL and CANCELED steps of a flow run again. Steps that succeeded stay."""
    changed = cli.client().retry_flow(key)
    remark = f"opened again: {counted(len(changed.task_ids), 'step')}"
    _report(cli, changed, remark if changed.task_ids else "no step is FAIL or CANCELED")


def _report(cli: Cli, changed: ChangedFlow, remark: str) -> None:
    cli.answer(
        asdict(changed), Text.assemble((clean(changed.key), "bold"), f"  {remark}"), statuses_text(changed.counts)
    )


def wait(
    cli: Cli,
    key: _FlowKey,
    timeout: TimeoutFlag = None,
) -> int:
    """Wait until all steps of a flow have ended.

    The exit code is 0 if all succeeded, 8 if a step is FAIL, 9 if none is FAIL and a step is CANCELED, 6 after the
    timeout, and 4 if no such flow exists.
    """
    limit = None if timeout is None else values.duration(timeout, "timeout")
    flow = cli.client(reads_only=True).wait_flow(key, timeout=limit)
    if cli.is_json:
        cli.json(flow_document(flow))
    else:
        cli.say(*_heading(flow), *_reasons(cli, flow))
    if flow.counts.get(TaskStatus.FAIL):
        return failures.TASK_FAILED
    return failures.TASK_CANCELED if flow.counts.get(TaskStatus.CANCELED) else failures.OK


for _name, _function in (("show", show), ("list", list_flows), ("cancel", cancel), ("retry", retry), ("wait", wait)):
    command(app, _name)(_function)
