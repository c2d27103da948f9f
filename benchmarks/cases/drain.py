"""drain: one worker process with all defaults drains a backlog, against the raw loop of grouped claims and finishes."""

from __future__ import annotations

from benchmarks.measuring import raw
from benchmarks.measuring.counters import Cost, cost_figures, cpu_parts
from benchmarks.measuring.draining import drain_raw, drain_with, insert_backlog
from benchmarks.measuring.server import Server
from benchmarks.options import Options
from benchmarks.report.figures import RAW, Result, Target, compared, turns

TASKS = 20_000
ASYNC, SYNC = "async handler", "sync handler"
#: The raw loop again, with the engine's own statements.
RULES = "raw, the engine's statements"
_HANDLERS = {ASYNC: "noop", SYNC: "sync_noop"}
_STATEMENTS = {RAW: raw.SHORTEST, RULES: raw.ENGINES}
_TARGETS = {ASYNC: Target.at_least(0.7), SYNC: Target.at_least(0.6)}
_OF_CPU = {"server_us": Target.at_most(1.2), "client_us": Target.at_most(2.5)}


def measure(server: Server, options: Options) -> Result:
    """Drain the same backlog by the raw loops, by an async handler and by a sync handler, in turn."""
    count = options.tasks_or(TASKS)
    costs: dict[str, list[Cost]] = {side: [] for side in (RAW, RULES, ASYNC, SYNC)}
    for run in range(options.runs):
        for side in turns(list(costs), run):
            server.say(f"drain: run {run + 1} of {options.runs}, {side}")
            with server.scratch() as scratch:
                backlog = insert_backlog(scratch, _HANDLERS.get(side, "noop"), count)
                if side in _STATEMENTS:
                    costs[side].append(drain_raw(server, scratch, backlog, statements=_STATEMENTS[side]))
                else:
                    costs[side].append(drain_with(server, scratch, backlog).cost)
    figures = [
        found
        for side in (ASYNC, SYNC)
        for found in cost_figures(side, costs[side], costs[RAW], _TARGETS[side], of_parts=_OF_CPU)
    ]
    rates = {side: [cost.rate for cost in found] for side, found in costs.items()}
    figures += [
        compared(f"{side}, to {RULES}", "tasks/s", rates[side], rates[RULES], against_name=RULES)
        for side in (ASYNC, SYNC)
    ]
    return Result(
        "drain",
        f"one worker process, all defaults, {count:,} waiting tasks, a handler that does nothing",
        figures,
        {"tasks": count, "runs": options.runs},
        cpu={side: cpu_parts(found) for side, found in costs.items()},
        notes=[
            "Timed from the first claim to the last success in the documents, by the server's clock.",
            f"{RULES}: the same loop of bare calls. The rules on the server cost the difference between it and raw; "
            "the worker process and its change stream cost the difference between the handlers and it.",
        ],
    )
