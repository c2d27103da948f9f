"""The picture of `mtask top`: the metrics of all workers and queues as lines, and as a document for scripts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from rich.text import Text

from mtask.cli.output import Column, clean, counted, lasting, listing, status_text
from mtask.cli.workers.workers import state
from mtask.features.metrics.client import FleetMetrics, QueueMetrics, WorkerMetrics
from mtask.kernel.document.status import RunStatus, TaskStatus
from mtask.kernel.worker.process.tally import BOUNDS, Histogram, Pair, PairCounts, Tally

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
