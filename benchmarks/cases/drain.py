"""drain: one worker process with all defaults takes a backlog, against the raw loop of grouped claims and finishes."""

from __future__ import annotations

from benchmarks.measuring import raw
from benchmarks.measuring.counters import Cost, cost_figures, cpu_parts
from benchmarks.measuring.draining import drain_raw, drain_with, lay_in
from benchmarks.measuring.server import Place
from benchmarks.options import Options
from benchmarks.report.figures import RAW, Result, Target, compared, turns

TASKS = 20_000
ASYNC, PLAIN = "async handler", "plain handler"
#: The raw loop once more, with the statements that the engine sends.
RULES = "raw, the engine's statements"
_HANDLERS = {ASYNC: "noop", PLAIN: "plain"}
_STATEMENTS = {RAW: raw.SHORTEST, RULES: raw.ENGINES}
_TARGETS = {ASYNC: Target.at_least(0.6), PLAIN: Target.at_least(0.3)}


def measure(place: Place, options: Options) -> Result:
    """Drain the same backlog by the raw loops, by an async no-op handler and by a plain one, in turn."""
    count = options.tasks_or(TASKS)
    costs: dict[str, list[Cost]] = {side: [] for side in (RAW, RULES, ASYNC, PLAIN)}
    for run in range(options.runs):
        for side in turns(list(costs), run):
            place.say(f"drain: run {run + 1} of {options.runs}, {side}")
            with place.fresh() as ground:
                backlog = lay_in(ground, _HANDLERS.get(side, "noop"), count)
                if side in _STATEMENTS:
                    costs[side].append(drain_raw(place, ground, backlog, statements=_STATEMENTS[side]))
                else:
                    costs[side].append(drain_with(place, ground, backlog).cost)
    figures = [f for side in (ASYNC, PLAIN) for f in cost_figures(side, costs[side], costs[RAW], _TARGETS[side])]
    rates = {side: [cost.rate for cost in found] for side, found in costs.items()}
    figures += [
        compared(f"{side}, to {RULES}", "tasks/s", rates[side], rates[RULES], against_name=RULES)
        for side in (ASYNC, PLAIN)
    ]
    return Result(
        "drain",
        f"one worker process, all defaults, {count:,} waiting tasks, a handler that does nothing",
        figures,
        {"tasks": count, "runs": options.runs},
        cpu={side: cpu_parts(found) for side, found in costs.items()},
        notes=[
            "Timed from the first claim to the last success in the documents, by the server's clock.",
            f"{RULES}: the same loop of bare calls; what it has less than raw the rules on the server take, and what "
            "the handlers have less than it, the worker process and its change stream.",
        ],
    )
