"""The printed summary."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from statistics import median

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from mtask.demo.display import abridged, kill_line, rescues_table
from mtask.demo.scene import Scene
from mtask.demo.summary import Summary

_SHOWN = 10
_DIGEST = 16


def closing_lines(summary: Summary, scene: Scene, width: int, *, with_rescues: bool) -> Iterator[RenderableType]:
    """Yield the lines to print at the end. With `with_rescues`, they include the killed worker's tasks."""
    if with_rescues and scene.kill is not None:
        yield from (Text(), Text(kill_line(scene)), rescues_table(summary.rescues, width))
    yield Text()
    yield _totals(summary)
    yield Text()
    yield from _verdict(summary)
    yield from _failures(summary)
    yield Text()
    yield _figures(summary)
    yield Text()
    yield from _documents(summary)


def _totals(summary: Summary) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="bright_black")
    table.add_column("totals")
    table.add_column("by the tasks", justify="right")
    table.add_column("directly", justify="right")
    table.add_column("")
    tasks, direct = summary.tasks.rows(), summary.direct.rows()
    names = {name for name, _ in summary.tasks.top} | {name for name, _ in summary.direct.top}
    for index in range(max(len(tasks), len(direct))):
        name, ours = tasks[index] if index < len(tasks) else ("", "")
        other, theirs = direct[index] if index < len(direct) else ("", "")
        is_equal = (name, ours) == (other, theirs)
        mark = Text("equal", style="green") if is_equal else Text("DIFFERENT", style="bold red")
        label = Text.assemble(("identifier " if name in names else "", "bright_black"), abridged(name or other, 30))
        table.add_row(label, _number(ours), _number(theirs), mark)
    return table


def _number(value: int | str) -> str:
    return f"{value:,}" if isinstance(value, int) else value[:_DIGEST]


def _verdict(summary: Summary) -> Iterator[Text]:
    if summary.is_equal:
        yield Text("equal: every file was counted, none was counted twice", style="bold green")
        return
    found = summary.differences
    yield Text("NOT equal: the tasks' totals are not those of the direct computation", style="bold red")
    yield from (Text(f"  {line}", style="red") for line in found[:_SHOWN])
    if len(found) > _SHOWN:
        yield Text(f"  and {len(found) - _SHOWN} more", style="red")
    yield Text("  Files that change while the demo runs can cause this: call it again, or choose another folder.")


def _failures(summary: Summary) -> Iterator[Text]:
    failures = sorted(summary.tasks.failures.items())
    if failures:
        yield Text(f"{len(failures)} tasks ended as FAIL:", style="yellow")
    for key, reason in failures[:_SHOWN]:
        yield Text(f"  {abridged(key, 60)}: {abridged(reason, 120)}", style="yellow")
    if len(failures) > _SHOWN:
        yield Text(f"  and {len(failures) - _SHOWN} more", style="yellow")


def _figures(summary: Summary) -> Table:
    publication = summary.publication
    table = Table.grid(padding=(0, 3, 0, 0))
    total = len(summary.direct.hashes) + len(summary.direct.failures)
    rows = [
        (
            "published",
            f"{publication.created:,} created, {publication.kept:,} kept; "
            f"again: {publication.created_again:,} created, {publication.kept_again:,} kept",
        ),
        (
            "tasks",
            f"{total:,} in {summary.seconds:.1f} s, {summary.tasks_per_second:,.0f} tasks/s "
            f"with {len(summary.workers)} workers",
        ),
        ("runs", f"{summary.runs:,}, {summary.timeouts:,} of them lapsed"),
    ]
    if summary.kill is not None:
        rows.append(("rescued", rescue_words(summary)))
    for name, words in rows:
        table.add_row(Text(name, style="bright_black"), Text(words))
    return table


def rescue_words(summary: Summary) -> str:
    """Return one line that tells how soon the killed worker's tasks were preempted."""
    assert summary.kill is not None
    delays = [delay / timedelta(milliseconds=1) for delay in summary.delays]
    if not delays:
        return f"none: {summary.kill.worker_id} had written its last results when it was killed"
    tasks = "1 task" if len(delays) == 1 else f"{len(delays)} tasks"
    spread = f"{delays[0]:,.0f} to {delays[-1]:,.0f} ms after the lease lapsed, median {median(delays):,.0f} ms"
    return f"{tasks} of {summary.kill.worker_id}, {spread}"


def _documents(summary: Summary) -> Iterator[RenderableType]:
    database = summary.database
    if not database.is_kept:
        yield Text("Nothing is left behind. To look into the documents: mtask demo --keep", style="bright_black")
        return
    yield Text.assemble(f"The documents are kept in the database {database.name} at ", (database.shown_uri, "bold"))
    yield Text("Look into them:")
    yield from (_command(line) for line in summary.commands)
    yield Text("Remove them:")
    yield from (_command(line) for line in database.ending)


def _command(line: str) -> Text:
    return Text.assemble("  ", (line, "cyan"))
