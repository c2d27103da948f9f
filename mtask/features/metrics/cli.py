"""`mtask metrics` and `mtask top`: the metrics of all workers and queues, for Prometheus and for people."""

from __future__ import annotations

import os
import select
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Annotated, Any

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from mtask.cli.context import Cli
from mtask.cli.options import command
from mtask.cli.output import Column, clean, counted, lasting, listing, status_text
from mtask.cli.workers.workers import state
from mtask.client.sync import Client
from mtask.errors import DatabaseError, InvalidInput
from mtask.features.metrics.client import FleetMetrics, QueueMetrics, WorkerMetrics
from mtask.kernel.document.status import RunStatus, TaskStatus
from mtask.kernel.worker.process.counts import BOUNDS, Histogram, Pair, PairCounts, Tally

DEFAULT_HOST = "127.0.0.1"


def register(app: typer.Typer) -> None:
    """Add the commands."""
    command(app, "top", top, "Workers")
    command(app, "metrics", metrics, "Database")


def metrics(
    cli: Cli,
    port: Annotated[
        int | None,
        typer.Option("--port", metavar="PORT", help="Serve them on this port; 0 = any free one.", show_default=False),
    ] = None,
    host: Annotated[
        str | None,
        typer.Option("--host", metavar="HOST", help="Address to listen on. [127.0.0.1]", show_default=False),
    ] = None,
    allow_host: Annotated[
        list[str],
        typer.Option("--allow-host", metavar="HOST", help="A further value of the header Host; repeatable."),
    ] = [],  # noqa: B006 typer reads it
) -> None:
    """Print the metrics of all workers and queues in the text format of Prometheus, or serve them.

    Every process that serves them shows the whole database: scrape one of them. Ctrl-C or SIGTERM ends it. The metrics
    name queues, tasks and workers, and the port asks for no token: do not open it to strangers.
    """
    from mtask.features.metrics import serving

    serving.check_extra("mtask metrics")
    from mtask.features.metrics import prometheus as exposition

    if port is None and host is not None:
        raise InvalidInput("--host needs --port: without it, the metrics are printed once.", field="host")
    client, text_of = cli.client(reads_only=True), exposition.FleetText()

    def make() -> bytes:
        return text_of.of(client.metrics())

    if port is None:
        text = make().decode()
        cli.answer({"metrics": text}) if cli.is_json else sys.stdout.write(text)
        return
    address = DEFAULT_HOST if host is None else host
    with serving.serving(address, port, serving.Kept(make), exposition.CONTENT_TYPE, allow_host) as bound:
        shown = f"[{address}]" if ":" in address else address
        url = f"http://{shown}:{bound}/metrics"
        cli.answer({"url": url}, f"metrics: {url}")
        sys.stdout.flush()
        _until_signal()


def _until_signal() -> None:
    """Wait until SIGTERM comes. SIGINT raises KeyboardInterrupt in the wait."""
    import signal

    ended = threading.Event()
    former = signal.signal(signal.SIGTERM, lambda *_: ended.set())
    try:
        ended.wait()
    finally:
        signal.signal(signal.SIGTERM, former)


# --- top -------------------------------------------------------------------------------------------------

# `mtask top`: queues, workers, rates, and the names whose runs fail or take long; live, or once for scripts.

#: The names are compared with what was read this long ago, in seconds.
_WINDOW = 300.0
_LEAST_INTERVAL, _MOST_INTERVAL = 0.5, 3600.0


def top(
    cli: Cli,
    once: Annotated[bool, typer.Option("--once", help="Print the state once, and end.")] = False,
    interval: Annotated[float, typer.Option("--interval", metavar="SECONDS", help="Time between two reads.")] = 2.0,
) -> None:
    """Show queues, workers, rates, and the names whose runs fail or take long, until q or Ctrl-C.

    Workers store what they counted every 10 s. With --json, or if the output is no terminal, the state is printed once.
    Then the table of names tells of all that was ever counted; else of the last five minutes at most.
    """
    if not _LEAST_INTERVAL <= interval <= _MOST_INTERVAL:  # also false for a NaN
        raise InvalidInput(
            f"--interval {interval:g}: use {_LEAST_INTERVAL:g} to {_MOST_INTERVAL:g} seconds.", field="interval"
        )
    client = cli.client(reads_only=True)
    if cli.is_json:
        cli.json(document(client.metrics(), client.database_name))
    elif once or not cli.out.is_terminal:
        cli.say(*Picture(client.metrics(), client.database_name).lines(cli.out.width))
    else:
        _show(cli, client, interval)


def _show(cli: Cli, client: Client, interval: float) -> None:
    history: deque[tuple[float, FleetMetrics]] = deque()
    try:
        with _keys() as keys, Live(console=cli.out, screen=True, auto_refresh=False) as live:
            while True:
                live.update(_look(cli.out, client, history), refresh=True)
                if keys.quits_within(interval):
                    return
    except KeyboardInterrupt:  # the usual way to end it
        return


def _look(screen: Console, client: Client, history: deque[tuple[float, FleetMetrics]]) -> Group:
    """Read the metrics, and return the picture of them. If the database is away, the last one stays."""
    trouble = None
    try:
        now = time.monotonic()
        history.append((now, client.metrics()))
        while len(history) > 2 and history[1][0] < now - _WINDOW:
            history.popleft()
    except DatabaseError as error:
        if not history:
            raise
        trouble = Text(clean(f"cannot be read now, tries again: {error}", screen.width), style="bold red")
    since = history[0][1] if len(history) > 1 else None
    picture = Picture(history[-1][1], client.database_name, since)
    height = screen.height - (trouble is not None)
    lines = picture.lines(screen.width, height)
    return Group(*([trouble] if trouble is not None else []), *lines)


class _Keys:
    """The keyboard. Without a terminal, there is none."""

    def __init__(self, stream: int | None) -> None:
        self._stream = stream

    def quits_within(self, seconds: float) -> bool:
        """Wait this long, but not longer than until q is typed; return whether it was."""
        if self._stream is None:
            time.sleep(seconds)
            return False
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            if select.select([self._stream], [], [], left)[0]:
                typed = os.read(self._stream, 100)
                if not typed:  # the terminal is gone
                    return True
                if typed in (b"q", b"Q", b"\x03", b"\x04"):
                    return True
        return False


@contextmanager
def _keys() -> Iterator[_Keys]:
    """Read single keys during the block, without echo."""
    if not sys.stdin.isatty():
        yield _Keys(None)
        return
    import termios
    import tty

    stream = sys.stdin.fileno()
    former = termios.tcgetattr(stream)
    tty.setcbreak(stream)
    try:
        yield _Keys(stream)
    finally:
        termios.tcsetattr(stream, termios.TCSADRAIN, former)


# --- picture ---------------------------------------------------------------------------------------------

# The picture of `mtask top`: the metrics of all workers and queues as lines, and as a document for scripts.

_STATUSES = ("INIT", "RUNNING", "WAITING", "SUCCESS", "FAIL", "CANCELED")
_BAD = (RunStatus.FAIL.value, RunStatus.TIMEOUT.value)
_HIGH = 0.95
#: On a narrower screen than this, columns that matter less are left out, in characters.
_WIDE = 78
_LEFT_OUT = frozenset({"WAITING", "CANCELED", "SLOTS", "LAPSED", "WAIT 95% <"})
#: The rows that each table has at least, and at most if all is printed.
_LEAST_ROWS, _ALL_ROWS = 3, 10_000

_QUEUES = (
    Column("QUEUE", gives_way=True, keeps_end=True),
    *(Column(status, right=True) for status in _STATUSES),
    Column("OLDEST", right=True),
)
_WORKERS = (
    Column("WORKER", gives_way=True, keeps_end=True),
    Column("STATUS"),
    Column("BUSY", right=True),
    Column("SLOTS", right=True),
    Column("RUNS/S", right=True),
    Column("RUNS", right=True),
)
_NAMES = (
    Column("NAME", gives_way=True, keeps_end=True),
    Column("QUEUE", gives_way=True, keeps_end=True),
    Column("RUNS", right=True),
    Column("FAIL", right=True),
    Column("LAPSED", right=True),
    Column("MEAN", right=True),
    Column("95% <", right=True),
    Column("WAIT 95% <", right=True),
)


@dataclass(frozen=True, slots=True)
class Picture:
    """What `mtask top` shows: the metrics, and those of some minutes ago with which the names are compared."""

    fleet: FleetMetrics
    database: str
    since: FleetMetrics | None = None

    def lines(self, width: int, height: int | None = None) -> list[Text]:
        """Return the lines, as they fit. `height`: None shows all."""
        fleet = self.fleet
        queues = [_queue_row(queue, width) for queue in fleet.queues]
        workers = [_worker_row(worker, fleet) for worker in fleet.workers]
        names = [_name_row(pair, counts, width) for pair, counts in worst(self._window())]
        rows = _shares([len(queues), len(workers), len(names)], None if height is None else height - 10)
        made: list[Text] = [self._head(width)]
        titles = ("queues", "workers", f"names, {self._words()}")
        tables = ((_QUEUES, queues), (_WORKERS, workers), (_NAMES, names))
        for title, (columns, found), shown in zip(titles, tables, rows, strict=True):
            kept = [column for column in columns if width >= _WIDE or column.title not in _LEFT_OUT]
            made += [Text(), *_table(title, kept, found, shown, width)]
        return made

    def _head(self, width: int) -> Text:
        fleet = self.fleet
        busy, slots = sum(one.busy_cnt for one in fleet.workers), sum(one.worker.concurrency for one in fleet.workers)
        head = Text.assemble(
            (f"mtask top {clean(self.database)}", "bold"),
            f"  {counted(len(fleet.workers), 'worker')}, {busy} of {counted(slots, 'slot')} busy, "
            f"{_rate(sum(one.rate for one in fleet.workers))} runs/s",
        )
        head.truncate(width, overflow="ellipsis")
        return head

    def _window(self) -> Tally:
        made = Tally()
        made.add(self.fleet.tally)
        if self.since is not None:
            made.add(self.since.tally, -1)
        return made

    def _words(self) -> str:
        if self.since is None:
            return "since counting began"
        return f"in the last {lasting(self.fleet.time - self.since.time)}"


def _shares(wanted: Sequence[int], room: int | None) -> list[int]:
    """Divide the lines of the screen: each table gets what it needs, as long as there is room for all."""
    if room is None:
        return [_ALL_ROWS] * len(wanted)
    shares = [min(count, _LEAST_ROWS) for count in wanted]
    while sum(shares) < room and any(share < count for share, count in zip(shares, wanted, strict=True)):
        for index, count in enumerate(wanted):
            if shares[index] < count and sum(shares) < room:
                shares[index] += 1
    return shares


def _table(
    title: str, columns: Sequence[Column], rows: Sequence[dict[str, str | Text]], shown: int, width: int
) -> list[Text]:
    if not rows:
        return [Text(f"{title}: none", style="bright_black")]
    cells = [[row[column.title] for column in columns] for row in rows[:shown]]
    made = listing(columns, cells, width)
    heading = Text(title if len(rows) <= shown else f"{title}: {shown} of {len(rows)}", style="bright_black")
    return [heading, *made]


def _queue_row(queue: QueueMetrics, width: int) -> dict[str, str | Text]:
    row: dict[str, str | Text] = {"QUEUE": queue.queue}
    for status in _STATUSES:
        count = queue.counts.get(TaskStatus(status))
        number = "0" if count is None else str(count) if width >= _WIDE + 20 else _short(count.count, count.is_more)
        is_bad = status == "FAIL" and count is not None and count.count
        row[status] = Text(number, style="bold red" if is_bad else "")
    row["OLDEST"] = "-" if queue.oldest_due_age is None else lasting(queue.oldest_due_age)
    return row


def _short(number: int, is_more: bool) -> str:
    """Return a number in at most six characters: 9999, 12k, 100k+."""
    return f"{number if number < 10_000 else f'{number // 1000}k'}{'+' if is_more else ''}"


def _worker_row(one: WorkerMetrics, fleet: FleetMetrics) -> dict[str, str | Text]:
    return {
        "WORKER": one.worker.worker_id,
        "STATUS": status_text(state(one.worker, fleet.time)),
        "BUSY": str(one.busy_cnt),
        "SLOTS": str(one.worker.concurrency),
        "RUNS/S": _rate(one.rate),
        "RUNS": f"{one.run_cnt:,}",
    }


def _name_row(pair: Pair, counts: PairCounts, width: int) -> dict[str, str | Text]:
    failed, lapsed = (counts.runs.get(outcome, 0) for outcome in _BAD)
    return {
        "NAME": pair.name,
        "QUEUE": pair.queue,
        "RUNS": f"{sum(counts.runs.values()):,}",
        "FAIL": Text(f"{failed:,}", style="bold red" if failed else ""),
        "LAPSED": Text(f"{lapsed:,}", style="magenta" if lapsed else ""),
        "MEAN": _mean(counts.run),
        "95% <": _bound(counts.run),
        "WAIT 95% <": _bound(counts.wait),
    }


def worst(tally: Tally) -> list[tuple[Pair, PairCounts]]:
    """Return the names that ran: first those with the most failures, then those whose runs take longest."""
    ran = [(pair, counts) for pair, counts in tally.pairs.items() if sum(counts.runs.values()) or counts.wait.count]
    return sorted(ran, key=lambda entry: (-_failures(entry[1]), -_seconds(entry[1].run), entry[0]))


def _failures(counts: PairCounts) -> int:
    return sum(counts.runs.get(outcome, 0) for outcome in _BAD)


def _seconds(histogram: Histogram) -> float:
    return histogram.seconds / histogram.count if histogram.count else 0.0


def _mean(histogram: Histogram) -> str:
    return lasting(timedelta(seconds=_seconds(histogram))) if histogram.count else "-"


def _bound(histogram: Histogram) -> str:
    if not histogram.count:
        return "-"
    bound = histogram.quantile(_HIGH)
    return lasting(timedelta(seconds=bound)) if bound is not None else f">{lasting(timedelta(seconds=BOUNDS[-1]))}"


def _rate(rate: float) -> str:
    return f"{rate:,.1f}" if rate < 1000 else f"{rate:,.0f}"


def document(fleet: FleetMetrics, database: str) -> dict[str, Any]:
    """Return the state for scripts. Durations are in seconds."""
    return {
        "database": database,
        "time": fleet.time,
        "count_time": fleet.count_time,
        "rate": sum(one.rate for one in fleet.workers),
        "leases_lapsed": fleet.tally.leases_lapsed,
        "claims_lost": fleet.tally.claims_lost,
        "queues": [
            {
                "queue": queue.queue,
                "counts": {status.value: count.count for status, count in queue.counts.items()},
                "bounded": sorted(status.value for status, count in queue.counts.items() if count.is_more),
                "oldest_due_age": queue.oldest_due_age,
            }
            for queue in fleet.queues
        ],
        "workers": [
            {
                "worker_id": one.worker.worker_id,
                "host": one.worker.host,
                "status": state(one.worker, fleet.time),
                "busy": one.busy_cnt,
                "free": one.free_cnt,
                "concurrency": one.worker.concurrency,
                "runs": one.run_cnt,
                "rate": one.rate,
            }
            for one in fleet.workers
        ],
        "names": [
            {
                "queue": pair.queue,
                "name": pair.name,
                "runs": counts.runs,
                "run": _histogram(counts.run),
                "wait": _histogram(counts.wait),
            }
            for pair, counts in worst(fleet.tally)
        ],
    }


def _histogram(histogram: Histogram) -> dict[str, Any]:
    mean = _seconds(histogram) if histogram.count else None
    return {"count": histogram.count, "mean": mean, "95%": histogram.quantile(_HIGH)}
