"""tracing: a worker drains a backlog untraced, with an SDK that samples nothing, and with one that samples all."""

from __future__ import annotations

from benchmarks.measuring.counters import Cost, cpu_parts
from benchmarks.measuring.draining import drain_with, insert_backlog
from benchmarks.measuring.fleet import APP
from benchmarks.measuring.server import Server
from benchmarks.options import Options
from benchmarks.report.figures import Result, Target, compared, turns

TASKS = 20_000
PLAIN, OFF, ON = "not traced", "samples nothing", "samples all"
_APPS = {PLAIN: APP, OFF: "benchmarks.measuring.traced:off", ON: "benchmarks.measuring.traced:on"}


def measure(server: Server, options: Options) -> Result:
    """Drain the same backlog by each worker, in turn."""
    count = options.tasks_or(TASKS)
    costs: dict[str, list[Cost]] = {side: [] for side in _APPS}
    for run in range(options.runs):
        for side in turns(list(_APPS), run):
            server.say(f"tracing: run {run + 1} of {options.runs}, {side}")
            with server.scratch() as scratch:
                backlog = insert_backlog(scratch, "noop", count)
                costs[side].append(drain_with(server, scratch, backlog, app=_APPS[side]).cost)
    rates = {side: [cost.rate for cost in found] for side, found in costs.items()}
    return Result(
        "tracing",
        f"one worker process, all defaults, {count:,} waiting tasks, an async handler that does nothing",
        [
            compared(OFF, "tasks/s", rates[OFF], rates[PLAIN], Target.at_least(0.9), against_name=PLAIN),
            compared(ON, "tasks/s", rates[ON], rates[PLAIN], None, against_name=PLAIN),
        ],
        {"tasks": count, "runs": options.runs},
        cpu={side: cpu_parts(found) for side, found in costs.items()},
        notes=["No exporter takes the spans: an exporter has costs of its own."],
    )
