"""scale: one, two and four worker processes on one backlog: throughput, claims lost to each other, and costs.

The tasks are done at once, so that the cores are full. In a second part they take time but no CPU: the cores are not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta

from benchmarks.measuring.bare import drain_apart
from benchmarks.measuring.counters import Cost, cost_figures, cpu_parts
from benchmarks.measuring.draining import Backlog, Drained, drain_together, insert_backlog
from benchmarks.measuring.server import Scratch, Server
from benchmarks.options import Options
from benchmarks.report.figures import Figure, Result, Target, compared, figure, turns

TASKS = 20_000
WORKERS = (1, 2, 4)
_MOST_LOST = Target.at_most(5.0, "value", "%")
#: The tasks that take time: the seconds of each, how many a worker runs at once, and the number of tasks of the first
#: part for which each worker has one of them.
_HOLD, _SLOTS, _HELD_SHARE = 0.1, 20, 20


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
    held = _held(server, sizes, max(1, count // _HELD_SHARE), options.runs)
    costs, held_costs = ({n: [found.cost for found in runs[n]] for n in sizes} for runs in (drained, held))
    figures = [f for n in sizes for f in _figures(n, drained[n], raw[n])]
    figures += [f for n in sizes[1:] for f in (_of_one(_named, n, costs), _of_one(_raw, n, raw))]
    figures += [f for n in sizes for f in _held_figures(n, held[n])]
    figures += [_of_one(_held_named, n, held_costs) for n in sizes[1:]]
    by_side = {_raw(n): raw[n] for n in sizes} | {_named(n): costs[n] for n in sizes}
    return Result(
        "scale",
        f"{', '.join(map(str, sizes))} worker processes, {count:,} tasks that come due at one instant",
        figures,
        {"tasks": count, "workers": sizes, "runs": options.runs},
        cpu={side: cpu_parts(found) for side, found in by_side.items()},
        notes=[
            "Raw is the loop of `drain` in as many processes. Each has its part of the backlog to itself: the tasks of "
            "some buckets, as workers have them.",
            f"A task of {_HOLD:g} s waits for this time. A worker runs {_SLOTS} of them at once, so it does at most "
            f"{_SLOTS / _HOLD:g} a second.",
        ],
    )


def _held(server: Server, sizes: Sequence[int], count: int, runs: int) -> dict[int, list[Drained]]:
    """Drain `count` tasks that take time for each worker, in turn."""
    held: dict[int, list[Drained]] = {workers: [] for workers in sizes}
    for run in range(runs):
        for n in turns(sizes, run):
            server.say(f"scale: run {run + 1} of {runs}, {_held_named(n)}")
            with server.scratch() as scratch:
                held[n].append(_drain_held(server, scratch, n * count, n))
    return held


def _drain_held(server: Server, scratch: Scratch, count: int, workers: int) -> Drained:
    def insert(delay: timedelta) -> Backlog:
        return insert_backlog(scratch, "hold", count, params=lambda _: {"seconds": _HOLD}, delay=delay)

    return drain_together(server, scratch, "hold", count, workers, insert, _SLOTS)


def _held_named(workers: int) -> str:
    return f"{_named(workers)}, tasks of {_HOLD:g} s"


def _held_figures(workers: int, held: Sequence[Drained]) -> list[Figure]:
    name = _held_named(workers)
    slots = [100 * found.cost.rate * _HOLD / (workers * _SLOTS) for found in held]
    return [figure(f"{name}: of what their slots can do", "%", slots), _lost(name, held)]


def _named(workers: int) -> str:
    return "1 worker" if workers == 1 else f"{workers} workers"


def _raw(processes: int) -> str:
    return "raw, 1 process" if processes == 1 else f"raw, {processes} processes"


def _figures(workers: int, drained: Sequence[Drained], raw: Sequence[Cost]) -> list[Figure]:
    name = _named(workers)
    busy = [found.cost.server.cpu / found.cost.seconds for found in drained]
    return [
        *cost_figures(name, [found.cost for found in drained], raw, None),
        _lost(name, drained),
        figure(f"{name}: cores that the server keeps busy", "", busy),
    ]


def _lost(name: str, drained: Sequence[Drained]) -> Figure:
    lost = [100 * found.claims.lost / max(1, found.claims.won) for found in drained]
    return figure(f"{name}: claims lost to others, of those won", "%", lost, _MOST_LOST)


def _of_one(named: Callable[[int], str], count: int, costs: Mapping[int, Sequence[Cost]]) -> Figure:
    """Compare the throughput of several with that of one, run by run."""
    rates, rates_of_one = ([cost.rate for cost in costs[n]] for n in (count, 1))
    return compared(f"{named(count)}, to one", "tasks/s", rates, rates_of_one, against_name=named(1))
