"""The demo's display: a live picture on a terminal, or lines if the output is not a terminal. Then the summary."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from mtask.demo.app import Totals, differences
from mtask.demo.database import DemoDatabase
from mtask.demo.watch import WORKING, Kill, Rescue, Scene, WorkerRow, task_name

_STATUS_STYLES = {"running": "green", "killed": "bold red", "stopped": "bright_black"}
_LINE_INTERVAL = 1.0
#: The least width of a terminal that shows all columns of the rescued tasks, in characters. On a narrower terminal, the
#: least important column is left out.
_WIDE = 100


@contextmanager
def shown(scene: Scene, console: Console, *, live: bool) -> Iterator[Callable[[], None]]:
    """Show the scene during the block; yield the function to call when the scene may have changed."""
    if not live:
        yield Lines(scene, console).notify
        return
    picture = Picture(scene)
    with Live(picture, console=console, refresh_per_second=10, vertical_overflow="crop"):
        yield lambda: None


class Lines:
    """The scene as lines: one line for each finished step, and one line a second for the current step."""

    def __init__(self, scene: Scene, console: Console) -> None:
        self._scene = scene
        self._console = console
        self._shown_steps = 0
        self._is_kill_shown = False
        self._last = time.monotonic()
        self._say(scene.title)

    def notify(self) -> None:
        """Print the changes."""
        scene = self._scene
        for line in scene.done[self._shown_steps :]:
            self._shown_steps += 1
            self._say(line)
        if scene.kill is not None and not self._is_kill_shown:
            self._is_kill_shown = True
            self._say(kill_line(scene))
        if scene.doing and time.monotonic() >= self._last + _LINE_INTERVAL:
            self._say(doing_line(scene))

    def _say(self, line: str) -> None:
        self._last = time.monotonic()
        self._console.print(Text(line), soft_wrap=True)


class Picture:
    """The current scene, drawn again at each refresh."""

    def __init__(self, scene: Scene) -> None:
        self._scene = scene
        self._spinner = Spinner("dots", style="cyan")

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        scene = self._scene
        parts: list[RenderableType] = [Text(scene.title, style="bold"), Text()]
        done = "ok" if options.ascii_only else "✓"
        parts += [Text.assemble((f"{done} ", "green"), line, overflow="ellipsis", no_wrap=True) for line in scene.done]
        if scene.doing:
            words = working_words(scene) if scene.doing == WORKING else doing_line(scene)
            self._spinner.update(text=Text(words, overflow="ellipsis", no_wrap=True))
            parts.append(self._spinner)
        if scene.work_began is not None:
            parts += [Text(), _progress(scene), Text(), workers_table(scene)]
        if scene.kill is not None:
            # During the work, the table fills the rest of the screen, minus two lines and its heading. At the end, it
            # has all rows.
            rows = max(1, console.height - len(parts) - len(scene.workers) - 3) if scene.doing else None
            parts += [Text(), Text(kill_line(scene), style="red", no_wrap=True, overflow="ellipsis")]
            parts.append(rescues_table(scene.rescues, console.width, rows))
        yield Group(*parts)


def _progress(scene: Scene) -> RenderableType:
    finished = scene.look.finished
    row = Table.grid(padding=(0, 2, 0, 0))
    row.add_row(
        ProgressBar(total=scene.total, completed=finished, width=30, finished_style="green"),
        Text(f"{finished:,} of {scene.total:,} finished", style="bold"),
        Text(f"{scene.elapsed:.1f} s"),
        Text(f"{scene.rate:,.0f} tasks/s" if scene.work_ended is None else ""),
    )
    return row


def doing_line(scene: Scene) -> str:
    """Return the current step in words."""
    if scene.step is not None:
        return f"{scene.doing}: {scene.step[0]:,} of {scene.step[1]:,}"
    if scene.doing != WORKING:
        return f"{scene.doing} ..."
    rescue = f", {rescued_words(scene)}" if scene.kill else ""
    return f"{scene.look.finished:,} of {scene.total:,} finished, {scene.rate:,.0f} tasks/s{rescue}"


def working_words(scene: Scene) -> str:
    """Return the state of the work in words."""
    if scene.kill is not None:
        return f"the leases lapse, and the others preempt: {rescued_words(scene)}"
    return "working; one worker will be killed while it holds tasks" if scene.has_kill else "working"


def rescued_words(scene: Scene) -> str:
    """Return a phrase that tells how many of the killed worker's tasks have been preempted."""
    assert scene.kill is not None
    preempted = sum(rescue.preempt_time is not None for rescue in scene.rescues)
    return f"{preempted} of {len(scene.rescues)} tasks of {scene.kill.worker_id} preempted"


def workers_table(scene: Scene) -> Table:
    """Return a table of the workers."""
    table = _table()
    for name in ("worker", "pid", "status"):
        table.add_column(name)
    for name in ("holds", "finished"):
        table.add_column(name, justify="right", min_width=8)
    for worker in scene.workers:
        style = _STATUS_STYLES.get(worker.status, "")
        table.add_row(
            worker.worker_id,
            str(worker.pid),
            Text(worker.status, style=style),
            str(worker.running),
            f"{worker.finished:,}",
        )
    return table


def kill_line(scene: Scene) -> str:
    """Return a line with the killed worker, the time of the kill, and the number of tasks that the worker held."""
    kill = scene.kill
    assert kill is not None
    tasks = "task" if len(scene.rescues) == 1 else "tasks"
    return (
        f"{kill.worker_id} killed with SIGKILL at {clock(kill.time)} UTC, "
        f"holding the leases of {len(scene.rescues)} {tasks}"
    )


def rescues_table(rescues: list[Rescue], width: int, rows: int | None = None) -> Table:
    """Return a table of the killed worker's tasks, of at most `rows` rows: the times of lapse and preemption."""
    table = _table()
    is_wide = width >= _WIDE
    preempted = ["preempted"] if is_wide else []
    for name in ("task", "lease lapsed", *preempted, "after", "by", "status"):
        table.add_column(name, justify="right" if name == "after" else "left", no_wrap=True)
    keys = max(12, width - (66 if is_wide else 52))
    limit = len(rescues) if rows is None or len(rescues) <= rows else max(0, rows - 1)
    for rescue in rescues[:limit]:
        is_waiting = rescue.preempt_time is None
        moment = Text("waiting", style="yellow") if rescue.preempt_time is None else Text(clock(rescue.preempt_time))
        table.add_row(
            abridged(rescue.key, keys),
            clock(rescue.lapse_time),
            *([moment] if is_wide else []),
            Text("-" if rescue.delay is None else f"{rescue.delay / timedelta(milliseconds=1):,.0f} ms", style="bold"),
            rescue.preempted_by or "-",
            Text("waiting" if is_waiting else rescue.status, style="green" if rescue.status == "SUCCESS" else "yellow"),
        )
    if limit < len(rescues):
        table.add_row(Text(f"and {len(rescues) - limit} more", style="bright_black"))
    return table


def _table() -> Table:
    return Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bright_black")


def clock(instant: datetime) -> str:
    """Return the time of day in UTC, to the millisecond."""
    return f"{instant.astimezone(UTC):%H:%M:%S.%f}"[:-3]


def abridged(text: str, limit: int) -> str:
    """Return the text in printable characters. A long text loses its beginning, because the end of a path says most."""
    printable = "".join(letter if letter.isprintable() else "?" for letter in text)
    if len(printable) <= limit:
        return printable
    return f"…{printable[1 - limit :]}"


# --- closing ---------------------------------------------------------------------------------------------

# The printed summary.

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


# --- summary ---------------------------------------------------------------------------------------------

# The summary: the totals from the tasks, the totals counted directly, the rescue, and the figures.

#: The part of the tasks over which the throughput is measured. The last tasks may have to wait until the killed
#: worker's leases lapse.
_RATED_PART = 0.95


@dataclass(frozen=True, slots=True)
class Publication:
    """The numbers of tasks that the two publishes created and kept."""

    created: int
    kept: int
    created_again: int
    kept_again: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Summary:
    """The result of the demo."""

    folder: Path
    database: DemoDatabase
    publication: Publication
    workers: list[WorkerRow]
    tasks: Totals
    direct: Totals
    direct_seconds: float
    seconds: float
    tasks_per_second: float
    runs: int
    timeouts: int
    kill: Kill | None = None
    rescues: list[Rescue] = field(default_factory=list)

    @property
    def differences(self) -> list[str]:
        """The faults that the demo found; empty if the totals are equal and publishing again added nothing."""
        found = differences(self.tasks, self.direct)
        if self.publication.created_again:
            found.append(f"publishing again created {self.publication.created_again} tasks")
        return found

    @property
    def is_equal(self) -> bool:
        """Whether the demo found no faults: `differences` is empty."""
        return not self.differences

    @property
    def delays(self) -> list[timedelta]:
        """For each task of the killed worker, the time from the lapse of its lease to its preemption; sorted."""
        return sorted(rescue.delay for rescue in self.rescues if rescue.delay is not None)

    @property
    def commands(self) -> list[str]:
        """The command lines with which the user looks at the documents."""
        shown = self.rescues[0].task_id if self.rescues else f"{task_name()}:{next(iter(self.direct.hashes), '')}"
        find_one = f"db.tasks.findOne({{_id: {json.dumps(shown)}}})"
        return [self.database.mtask("show", shown), self.database.mtask("stats"), self.database.mongosh(find_one)]

    def document(self) -> dict[str, Any]:
        """Return the summary as one document, with instants as datetimes."""
        delays = [delay / timedelta(milliseconds=1) for delay in self.delays]
        database = self.database
        return {
            "equal": self.is_equal,
            "differences": self.differences,
            "folder": printable(self.folder),
            "published": asdict(self.publication),
            "workers": [asdict(worker) for worker in self.workers],
            "killed": None if self.kill is None else asdict(self.kill),
            "rescued": [_rescue_document(rescue) for rescue in self.rescues],
            "totals": self.tasks.document(),
            "direct": self.direct.document() | {"seconds": round(self.direct_seconds, 3)},
            "failures": [{"key": key, "reason": reason} for key, reason in sorted(self.tasks.failures.items())],
            "figures": {
                "seconds": round(self.seconds, 3),
                "tasks_per_second": round(self.tasks_per_second, 1),
                "runs": self.runs,
                "timeouts": self.timeouts,
                "rescued": len(delays),
                "rescue_delay_ms": (
                    {"least": delays[0], "median": median(delays), "most": delays[-1]} if delays else None
                ),
            },
            "kept": database.is_kept,
            "uri": database.shown_uri if database.is_kept else None,
            "database": database.name if database.is_kept else None,
            "look_into": self.commands if database.is_kept else [],
            "remove": database.ending if database.is_kept else [],
        }


def printable(path: Path) -> str:
    """Return a path as printable text. Bytes that are not UTF-8 become escapes."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")


def _rescue_document(rescue: Rescue) -> dict[str, Any]:
    delay = rescue.delay
    return {
        "task_id": rescue.task_id,
        "lapse_time": rescue.lapse_time,
        "preempt_time": rescue.preempt_time,
        "preempted_by": rescue.preempted_by,
        "delay_ms": None if delay is None else delay / timedelta(milliseconds=1),
        "status": rescue.status,
    }


def rate_of(create_time: datetime | None, finish_times: list[datetime]) -> float:
    """Return the tasks finished per second, from the first task's creation until nearly all tasks had finished."""
    if create_time is None or not finish_times:
        return 0.0
    rated = max(1, int(len(finish_times) * _RATED_PART))
    return rated / max((finish_times[rated - 1] - create_time).total_seconds(), 1e-3)
