"""scale: one, two and four worker processes on one backlog: throughput, claims lost to each other, and costs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from benchmarks.measuring.bare import drain_apart
from benchmarks.measuring.counters import Cost, cost_figures, cpu_parts
from benchmarks.measuring.draining import Drained, drain_together, insert_backlog
from benchmarks.measuring.server import Server
from benchmarks.options import Options
from benchmarks.report.figures import Figure, Result, Target, compared, figure, turns

TASKS = 20_000
WORKERS = (1, 2, 4)
_MOST_LOST = Target.at_most(5.0, "value", "%")


def measure(server: Server, options: Options) -> Result:
    """Drain equal backlogs by one, two and four workers, and by the raw loop in as many processes, in turn."""
    count = options.tasks_or(TASKS)
    sizes = [n for n in WORKERS if options.workers is None or n <= options.workers]
    raw: dict[int, list[Cost]] = {processes: [] for processes in sizes}
    drained: dict[int, list[Drained]] = {workers: [] for workers in sizes}
    sides = [(n, is_raw) for n in sizes for is_raw in (True, False)]
    for run in range(options.runs):
        for n, is_raw in turns(sides, run):
            server.say(f"scale: run {run + 1} of {options.runs}, {_raw(n) if is_raw else _named(n)}")
            with server.scratch() as scratch:
                if is_raw:
                    raw[n].append(drain_apart(server, scratch, insert_backlog(scratch, "noop", count), n))
                else:
                    drained[n].append(drain_together(server, scratch, "noop", count, n))
    costs = {n: [found.cost for found in drained[n]] for n in sizes}
    figures = [f for n in sizes for f in _figures(n, drained[n], raw[n])]
    figures += [f for n in sizes[1:] for f in (_of_one(_named, n, costs), _of_one(_raw, n, raw))]
    by_side = {_raw(n): raw[n] for n in sizes} | {_named(n): costs[n] for n in sizes}
    return Result(
        "scale",
        f"{', '.join(map(str, sizes))} worker processes, {count:,} tasks that come due at one instant",
        figures,
        {"tasks": count, "workers": sizes, "runs": options.runs},
        cpu={side: cpu_parts(found) for side, found in by_side.items()},
        notes=[
            "Raw is the loop of `drain` in as many processes. Each has its part of the backlog to itself: the tasks of "
            "some buckets, as workers have them."
        ],
    )


def _named(workers: int) -> str:
    return "1 worker" if workers == 1 else f"{workers} workers"


def _raw(processes: int) -> str:
    return "raw, 1 process" if processes == 1 else f"raw, {processes} processes"


def _figures(workers: int, drained: Sequence[Drained], raw: Sequence[Cost]) -> list[Figure]:
    name = _named(workers)
    lost = [100 * found.claims.lost / max(1, found.claims.won) for found in drained]
    busy = [found.cost.server.cpu / found.cost.seconds for found in drained]
    return [
        *cost_figures(name, [found.cost for found in drained], raw, None),
        figure(f"{name}: claims lost to others, of those won", "%", lost, _MOST_LOST),
        figure(f"{name}: cores that the server keeps busy", "", busy),
    ]


def _of_one(named: Callable[[int], str], count: int, costs: Mapping[int, Sequence[Cost]]) -> Figure:
    """Compare the throughput of several with that of one, run by run."""
    rates, rates_of_one = ([cost.rate for cost in costs[n]] for n in (count, 1))
    return compared(f"{named(count)}, to one", "tasks/s", rates, rates_of_one, against_name=named(1))
