"""latency: from the publish call to the handler's start in an idle worker, against the bare chain of the same steps."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.measuring.arrivals import Arrivals, through_chain, through_workers
from benchmarks.measuring.counters import cost_figures, cpu_parts
from benchmarks.measuring.fleet import Fleet
from benchmarks.measuring.server import Server
from benchmarks.options import Options
from benchmarks.report.figures import MTASK, RAW, Figure, Result, Target, compared, turns

TASKS = 500
RATE = 50.0


def measure(server: Server, options: Options) -> Result:
    """Publish at a steady rate to an idle worker, and insert at the same rate for the chain, in turn."""
    count, rate = options.tasks_or(TASKS), options.rate_or(RATE)
    found: dict[str, list[Arrivals]] = {RAW: [], MTASK: []}
    for run in range(options.runs):
        for side in turns(list(found), run):
            server.say(f"latency: run {run + 1} of {options.runs}, {side}")
            found[side].append(one_side(server, side, count, rate))
    costs = {side: [arrivals.cost for arrivals in several] for side, several in found.items()}
    return Result(
        "latency",
        f"an idle worker, {rate:g} tasks a second, from the publish call to the handler's start",
        [
            *latency_figures("latency", found[MTASK], found[RAW], Target.at_most(1.3), Target.at_most(2.0)),
            *cost_figures(f"at {rate:g} tasks/s", costs[MTASK], costs[RAW], None, has_rate=False),
        ],
        {"tasks": count, "rate": rate, "runs": options.runs},
        samples=samples(found),
        cpu={side: cpu_parts(several) for side, several in costs.items()},
        notes=[
            "Raw is a bare insert, its change stream event and one find_one_and_update; it never finishes a task.",
            "The publisher's CPU is left out.",
        ],
    )


def one_side(server: Server, side: str, count: int, rate: float) -> Arrivals:
    """Measure one side once, on a database of its own."""
    with server.scratch() as scratch:
        if side == RAW:
            return through_chain(server, scratch, count, rate, "run")
        with Fleet(server, scratch) as fleet:
            return through_workers(server, scratch, fleet, count, rate, "run")


def latency_figures(
    what: str,
    ours: Sequence[Arrivals],
    against: Sequence[Arrivals],
    median: Target | None = None,
    p99: Target | None = None,
    *,
    against_name: str = RAW,
) -> list[Figure]:
    """Return median and 99th percentile, each run against the other's of the same run."""
    return [
        compared(
            f"{what}, median",
            "ms",
            [arrivals.median for arrivals in ours],
            [arrivals.median for arrivals in against],
            median,
            against_name=against_name,
        ),
        compared(
            f"{what}, p99",
            "ms",
            [arrivals.p99 for arrivals in ours],
            [arrivals.p99 for arrivals in against],
            p99,
            against_name=against_name,
        ),
    ]


def samples(found: dict[str, list[Arrivals]]) -> dict[str, list[float]]:
    """Return all latencies of all runs by side."""
    return {side: [one for arrivals in several for one in arrivals.latencies] for side, several in found.items()}
