"""scale: one, two and four worker processes on one backlog: throughput, claims lost to each other, and costs."""

from __future__ import annotations

from benchmarks.measuring.counters import Cost, cost_figures, cpu_parts
from benchmarks.measuring.draining import Drained, drain_raw, drain_together, insert_backlog
from benchmarks.measuring.server import Server
from benchmarks.options import Options
from benchmarks.report.figures import RAW, Figure, Result, Target, figure, turns

TASKS = 20_000
WORKERS = (1, 2, 4)
_MOST_LOST = Target.at_most(5.0, "value", "%")


def measure(server: Server, options: Options) -> Result:
    """Drain equal backlogs by the raw loop in one process, and by one, two and four workers, in turn."""
    count = options.tasks_or(TASKS)
    sizes = [n for n in WORKERS if options.workers is None or n <= options.workers]
    raw: list[Cost] = []
    drained: dict[int, list[Drained]] = {workers: [] for workers in sizes}
    for run in range(options.runs):
        for workers in turns([0, *sizes], run):
            server.say(f"scale: run {run + 1} of {options.runs}, {_named(workers)}")
            with server.scratch() as scratch:
                if workers == 0:
                    raw.append(drain_raw(server, scratch, insert_backlog(scratch, "noop", count)))
                else:
                    drained[workers].append(drain_together(server, scratch, "noop", count, workers))
    figures = [f for workers, found in drained.items() for f in _figures(workers, found, raw)]
    by_size = {_named(workers): [d.cost for d in found] for workers, found in drained.items()}
    return Result(
        "scale",
        f"{', '.join(map(str, sizes))} worker processes, {count:,} tasks that come due at one instant",
        figures,
        {"tasks": count, "workers": sizes, "runs": options.runs},
        cpu={side: cpu_parts(costs) for side, costs in {RAW: raw, **by_size}.items()},
        notes=["Raw is the loop of `drain` in one process, which has the backlog to itself."],
    )


def _named(workers: int) -> str:
    if workers == 0:
        return RAW
    return "1 worker" if workers == 1 else f"{workers} workers"


def _figures(workers: int, drained: list[Drained], raw: list[Cost]) -> list[Figure]:
    name = _named(workers)
    lost = [100 * found.claims.lost / max(1, found.claims.won) for found in drained]
    busy = [found.cost.server.cpu / found.cost.seconds for found in drained]
    return [
        *cost_figures(name, [found.cost for found in drained], raw, None),
        figure(f"{name}: claims lost to others, of those won", "%", lost, _MOST_LOST),
        figure(f"{name}: cores that the server keeps busy", "", busy),
    ]
