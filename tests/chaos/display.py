"""A run under faults while it lasts: a live picture on a terminal, one line every ten seconds elsewhere."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import TracebackType
from typing import NamedTuple, Self

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

#: How a state is drawn; what is not listed is drawn as something out of the ordinary.
_STATE_STYLES = {
    "up": "green",
    "starting": "cyan",
    "stopping": "cyan",
    "stopped": "bright_black",
    "frozen": "bold yellow",
    "down": "bold red",
}
_ODD_STATE = "magenta"
_BLOCKS = " ▁▂▃▄▅▆▇█"
_LINE_INTERVAL = 10.0
#: A rate is taken over so many seconds: a sample more or less at its edges should not show.
_RATE_SPAN = 5.0
#: Counts may come less often than statuses; unchanged for so long, they say that nothing happens.
_SILENCE = 6.0
_SPARKLINE = 60

#: A worker or publisher: its name, its kind ("process", "proxied", "sync", ...) and its state ("up", "frozen", ...).
Actor = tuple[str, str, str]


@dataclass(frozen=True, slots=True)
class Status:
    """The run at one instant. Counts are of tasks, since the run began."""

    elapsed: float
    minutes: float
    seed: int
    published: int = 0
    finished: int = 0
    succeeded: int = 0
    failed: int = 0
    backlog: int = 0
    workers: Sequence[Actor] = ()
    publishers: Sequence[Actor] = ()
    #: The faults under way, then those that are over, the newest first.
    faults: Sequence[str] = ()
    recent: Sequence[str] = ()
    #: The primary's address; empty while there is none, and None where nobody has looked.
    primary: str | None = None
    #: What the run is doing beside its work: "starting", "letting everything recover", "checking the history".
    message: str = ""
    #: What was seen to be wrong already; the checker has the last word.
    violations: Sequence[str] = ()
    running: int | None = None


class _Count(NamedTuple):
    elapsed: float
    published: int
    finished: int


class Display:
    """Shows each status that it is given; as a context manager it leaves the terminal as it was."""

    def __init__(
        self, console: Console | None = None, *, live: bool | None = None, line_interval: float = _LINE_INTERVAL
    ) -> None:
        self._console = console or Console()
        self._is_live = self._console.is_terminal if live is None else live
        self._line_interval = line_interval
        self._live: Live | None = None
        self._status: Status | None = None
        self._counts: deque[_Count] = deque(maxlen=2_000)
        self._last_line: float | None = None
        self._said_message = ""
        self._said_violations: set[str] = set()

    def __enter__(self) -> Self:
        if self._is_live:
            self._live = Live(self, console=self._console, refresh_per_second=4, vertical_overflow="crop")
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None
        elif self._status is not None and self._last_line != self._status.elapsed:
            self._say_status(self._status)

    def show(self, status: Status) -> None:
        """Show the run as it stands; call it as often as there is something new, about once a second."""
        counts = self._counts
        count = _Count(status.elapsed, status.published, status.finished)
        if not counts or (int(count.elapsed) > int(counts[-1].elapsed) and count[1:] != counts[-1][1:]):
            counts.append(count)
        self._status = status
        if not self._is_live:
            self._notify(status)

    def say(self, line: str) -> None:
        """Print a line that stays, above the live picture."""
        self._console.print(Text(line), soft_wrap=True)

    # --- lines ------------------------------------------------------------------------------------------------

    def _notify(self, status: Status) -> None:
        if status.message != self._said_message:
            self._said_message = status.message
            if status.message:
                self.say(f"{clock(status.elapsed)}  {status.message}")
        for violation in status.violations:
            if violation not in self._said_violations:
                self._said_violations.add(violation)
                self.say(f"{clock(status.elapsed)}  VIOLATION  {violation}")
        if self._last_line is None or status.elapsed >= self._last_line + self._line_interval:
            self._say_status(status)

    def _say_status(self, status: Status) -> None:
        self._last_line = status.elapsed
        published, finished = self.rates()
        parts = [
            f"{clock(status.elapsed)} of {clock(status.minutes * 60)}",
            f"published {status.published:,} ({published:,.0f}/s)",
            f"finished {status.finished:,} ({finished:,.0f}/s)",
            f"backlog {status.backlog:,}",
            f"workers {states(status.workers)}",
        ]
        if status.primary is not None:
            parts.append(f"primary {status.primary or 'none'}")
        if status.violations:
            parts.append(_violations(status))
        if status.faults:
            parts.append(f"faults: {'; '.join(status.faults)}")
        self.say("  ".join(parts))

    # --- rates ------------------------------------------------------------------------------------------------

    def rates(self) -> tuple[float, float]:
        """Return how many tasks a second were published and finished of late."""
        counts = list(self._counts)
        now = self._status.elapsed if self._status is not None else 0.0
        if not counts or now > counts[-1].elapsed + _SILENCE:
            return 0.0, 0.0
        last = counts[-1]
        first = next(count for count in counts if count.elapsed >= last.elapsed - _RATE_SPAN)
        if first is last and len(counts) > 1:
            first = counts[-2]
        span = last.elapsed - first.elapsed
        if span <= 0:
            return 0.0, 0.0
        return (last.published - first.published) / span, (last.finished - first.finished) / span

    def history(self, width: int) -> tuple[list[float], list[float]]:
        """Return both rates for each of the last seconds, the latest last."""
        published: list[float] = []
        finished: list[float] = []
        counts = list(self._counts)
        now = self._status.elapsed if self._status is not None else 0.0
        if counts and now > counts[-1].elapsed + _SILENCE:
            counts.append(counts[-1]._replace(elapsed=now))
        for before, after in pairwise(counts):
            span = max(1e-3, after.elapsed - before.elapsed)
            # The seconds between two counts share what was counted.
            for _ in range(int(before.elapsed), int(after.elapsed)):
                published.append((after.published - before.published) / span)
                finished.append((after.finished - before.finished) / span)
        return published[-width:], finished[-width:]

    # --- picture ----------------------------------------------------------------------------------------------

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        status = self._status
        if status is None:
            yield Text("starting", style="cyan")
            return
        title = Text.assemble(
            ("mtask under faults", "bold"), f"   seed {status.seed}", (f"   {status.message}", "cyan"), no_wrap=True
        )
        parts: list[RenderableType] = [title, _progress(status)]
        if status.violations:
            loud = f"{_violations(status)}: {status.violations[0]}"
            parts.append(Text(loud, style="bold white on red", no_wrap=True, overflow="ellipsis"))
        parts += [Text(), self._flow(status, options), Text()]
        used = len(parts) + 3
        parts.append(_columns(status, console.width, max(3, console.height - used)))
        yield Group(*parts)

    def _flow(self, status: Status, options: ConsoleOptions) -> Table:
        width = min(_SPARKLINE, max(8, options.max_width - 34))
        rates, histories = self.rates(), self.history(width)
        top = max([1.0, *histories[0], *histories[1]])
        table = Table.grid(padding=(0, 2, 0, 0))
        table.add_column()
        table.add_column(justify="right")
        table.add_column(justify="right")
        table.add_column(no_wrap=True, overflow="crop")
        rows = (("published", status.published, "blue"), ("finished", status.finished, "green"))
        for (name, count, style), rate, history in zip(rows, rates, histories, strict=True):
            line = "" if options.ascii_only else sparkline(history, top)
            table.add_row(name, f"{count:,}", f"{rate:,.0f}/s", Text(line, style=style))
        running = "" if status.running is None else f"{status.running:,} running, "
        table.add_row(
            "backlog",
            Text(f"{status.backlog:,}", style="bold"),
            "",
            Text(f"{running}{status.succeeded:,} succeeded, {status.failed:,} failed", overflow="ellipsis"),
        )
        return table


def _progress(status: Status) -> RenderableType:
    total = status.minutes * 60
    row = Table.grid(padding=(0, 2, 0, 0))
    left = max(0.0, total - status.elapsed)
    row.add_row(
        ProgressBar(total=total, completed=min(status.elapsed, total), width=30, finished_style="green"),
        Text(f"{clock(status.elapsed)} of {clock(total)}", style="bold"),
        Text(f"{clock(left)} left"),
        Text() if status.primary is None else Text.assemble("primary ", _primary(status.primary)),
    )
    return row


def _violations(status: Status) -> str:
    count = len(status.violations)
    return f"{count} VIOLATION" if count == 1 else f"{count} VIOLATIONS"


def _primary(address: str) -> tuple[str, str]:
    return (address, "bold") if address else ("none", "bold red")


def _columns(status: Status, width: int, rows: int) -> Table:
    left = max(24, min(44, width // 2))
    table = Table.grid(padding=(0, 3, 0, 0), expand=True)
    table.add_column(min_width=left, max_width=left, no_wrap=True)
    table.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
    table.add_row(_actors([*status.workers, *status.publishers], rows), _faults(status, rows))
    return table


def _actors(actors: Sequence[Actor], rows: int) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bright_black")
    for name, column, most in (("process", 0, 14), ("state", 2, 10)):
        widest = max([len(name), *(len(actor[column]) for actor in actors)])
        table.add_column(name, no_wrap=True, min_width=min(most, widest), overflow="ellipsis")
    table.add_column("kind", no_wrap=True, overflow="ellipsis")
    limit = len(actors) if len(actors) < rows else max(0, rows - 2)
    for name, kind, state in actors[:limit]:
        table.add_row(name, Text(state, style=_STATE_STYLES.get(state, _ODD_STATE)), kind)
    if limit < len(actors):
        table.add_row(Text(f"and {len(actors) - limit} more", style="bright_black"))
    return table


def _faults(status: Status, rows: int) -> Group:
    lines = [Text("faults", style="bright_black")]
    lines += [Text(f"● {fault}", style="bold red") for fault in status.faults]
    lines += [Text(f"  {fault}", style="bright_black") for fault in status.recent]
    if not status.faults:
        lines.insert(1, Text("none under way", style="green"))
    for line in lines:
        line.no_wrap, line.overflow = True, "ellipsis"
    return Group(*lines[:rows])


def states(actors: Sequence[Actor]) -> str:
    """Return how many are in each state, those that are up first: "5 up, 1 frozen"."""
    counts = Counter(state for _, _, state in actors)
    ordered = sorted(counts.items(), key=lambda entry: (entry[0] != "up", entry[0]))
    return ", ".join(f"{count} {state}" for state, count in ordered) or "none"


def sparkline(values: Sequence[float], top: float) -> str:
    """Return the values as blocks, `top` as the highest; what is not nothing can be seen."""
    highest = len(_BLOCKS) - 1
    return "".join(
        _BLOCKS[min(highest, max(1, round(value / top * highest)))] if value > 0 else _BLOCKS[0] for value in values
    )


def clock(seconds: float) -> str:
    """Return a duration as minutes and seconds: "3:07"."""
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes}:{rest:02}"
