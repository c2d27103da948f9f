"""The demo's display: a live picture on a terminal, or lines if the output is not a terminal."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from mtask.demo.scene import WORKING, Scene
from mtask.demo.watch import Rescue

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
