"""backlog: drain and latency in a collection full of finished and delayed tasks."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from benchmarks.cases.latency import latency_figures
from benchmarks.measuring import raw
from benchmarks.measuring.arrivals import NAME, Arrivals, through_chain, through_workers
from benchmarks.measuring.counters import Cost, cost_figures, cpu_parts
from benchmarks.measuring.draining import drain_raw, drain_with, insert_backlog
from benchmarks.measuring.fleet import Fleet
from benchmarks.measuring.server import Scratch, Server
from benchmarks.options import Options
from benchmarks.report.figures import Result, Target, compared, turns

Document = dict[str, Any]
TASKS = 20_000
LATENCY_TASKS = 250
RATE = 50.0
EMPTY, FULL = "empty", "full"
RAW_EMPTY, RAW_FULL = "raw, empty", "raw, full"
_INSERTERS = 4
_DELAY = timedelta(days=1)
#: At most a tenth worse than in the empty collection.
_RATE = Target.at_least(0.9)
_LATENCY = Target.at_most(1.1)


def measure(server: Server, options: Options) -> Result:
    """Drain and publish in an empty collection and in a full one, by mtask and by bare calls, in turn."""
    count = options.tasks_or(TASKS)
    arriving, rate = min(count, LATENCY_TASKS), options.rate_or(RATE)
    costs: dict[str, list[Cost]] = {side: [] for side in (RAW_EMPTY, RAW_FULL, EMPTY, FULL)}
    arrivals: dict[str, list[Arrivals]] = {side: [] for side in costs}
    with server.scratch() as full:
        server.say(f"backlog: inserting {options.finished:,} finished and {options.delayed:,} delayed tasks")
        fill(full, options.finished, options.delayed)
        for run in range(options.runs):
            for side in turns(list(costs), run):
                server.say(f"backlog: run {run + 1} of {options.runs}, {side}")
                label = f"{_letters(side)}{run}"
                with _database_of(server, full, side) as scratch:
                    costs[side].append(_drain(server, scratch, side, label, count))
                with _database_of(server, full, side) as scratch:
                    arrivals[side].append(_arrive(server, scratch, side, label, arriving, rate))
    rates = {side: [cost.rate for cost in found] for side, found in costs.items()}
    return Result(
        "backlog",
        f"{options.finished:,} finished and {options.delayed:,} delayed tasks in the collection",
        [
            compared("drain, full", "tasks/s", rates[FULL], rates[EMPTY], _RATE, against_name=EMPTY),
            *latency_figures("latency, full", arrivals[FULL], arrivals[EMPTY], _LATENCY, against_name=EMPTY),
            compared("raw drain, full", "tasks/s", rates[RAW_FULL], rates[RAW_EMPTY], against_name=EMPTY),
            *latency_figures("raw latency, full", arrivals[RAW_FULL], arrivals[RAW_EMPTY], against_name=EMPTY),
            *cost_figures("drain, both full", costs[FULL], costs[RAW_FULL], None),
        ],
        {
            "finished": options.finished,
            "delayed": options.delayed,
            "tasks": count,
            "latency_tasks": arriving,
            "rate": rate,
            "runs": options.runs,
        },
        samples={side: [one for found in several for one in found.latencies] for side, several in arrivals.items()},
        cpu={side: cpu_parts(found) for side, found in costs.items()},
        notes=["What the raw work loses in a full collection is the database's own; it bounds what mtask can keep."],
    )


def fill(scratch: Scratch, finished: int, delayed: int, name: str = "noop") -> None:
    """Insert finished tasks of this name, and tasks that are due tomorrow."""

    def part(first: int) -> None:
        raw.insert(scratch.tasks, _old(scratch, first, finished, delayed, name))

    with ThreadPoolExecutor(_INSERTERS) as inserters:
        list(inserters.map(part, range(_INSERTERS)))
    scratch.settle()


def _old(scratch: Scratch, first: int, finished: int, delayed: int, name: str) -> Iterator[Document]:
    for number in range(first, finished, _INSERTERS):
        yield raw.finished_document(name, f"finished/{number:08}", scratch.now)
    for number in range(first, delayed, _INSERTERS):
        yield raw.document(name, f"delayed/{number:08}", scratch.now, delay=_DELAY)


@contextmanager
def _database_of(server: Server, full: Scratch, side: str) -> Iterator[Scratch]:
    """Give the full database, or a new empty one."""
    if side in (FULL, RAW_FULL):
        yield full
    else:
        with server.scratch() as empty:
            yield empty


def _drain(server: Server, scratch: Scratch, side: str, label: str, count: int) -> Cost:
    backlog = insert_backlog(scratch, "noop", count, label)
    if side in (RAW_EMPTY, RAW_FULL):
        return drain_raw(server, scratch, backlog)
    return drain_with(server, scratch, backlog).cost


def _arrive(server: Server, scratch: Scratch, side: str, label: str, count: int, rate: float) -> Arrivals:
    if side in (RAW_EMPTY, RAW_FULL):
        arrivals = through_chain(server, scratch, count, rate, label)
        # The chain finishes no task: workers must not claim them after their leases lapse.
        scratch.tasks.delete_many({"_id": {"$gte": f"{NAME}:", "$lt": f"{NAME};"}})
        return arrivals
    with Fleet(server, scratch) as fleet:
        return through_workers(server, scratch, fleet, count, rate, label)


def _letters(side: str) -> str:
    return "".join(letter for letter in side if letter.isalpha())
