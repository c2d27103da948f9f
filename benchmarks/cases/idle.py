"""idle: many idle workers and one task at a time: who strikes for it, how soon it starts, and what waiting costs."""

from __future__ import annotations

import time
from dataclasses import dataclass

from benchmarks.cases.latency import latency_figures, samples
from benchmarks.measuring.arrivals import Arrivals, through_chain, through_workers
from benchmarks.measuring.counters import cpu_of
from benchmarks.measuring.fleet import Fleet
from benchmarks.measuring.server import Place, wait_quiet
from benchmarks.options import Options
from benchmarks.report.figures import MTASK, RAW, Result, Target, figure, turns
from mtask.store.streams.traffic import SOME_LASTS

TASKS = 40
RATE = 4.0
WORKERS = 20
#: Who comes late for a task has struck for it by then, in seconds.
_LATE = 0.5
_PER_TASK = Target.at_most(3.0, "value")
_COMMANDS = Target.at_most(1.0, "value", "/s")
_CPU = Target.at_most(1.0, "value", "%")


@dataclass(frozen=True, slots=True)
class Rest:
    """What one idle worker does, on average."""

    commands: float  #: a second, all that its connections send
    cpu: float  #: of one core, %
    server_cpu: float  #: of one core, %


def measure(place: Place, options: Options) -> Result:
    """Watch idle workers; then publish to all of them, and through the raw chain beside them, in turn."""
    workers = WORKERS if options.workers is None else options.workers
    count, rate = options.tasks_or(TASKS), options.rate_or(RATE)
    found: dict[str, list[Arrivals]] = {RAW: [], MTASK: []}
    attempts: list[float] = []
    rests: list[Rest] = []
    place.say(f"idle: starting {workers} workers")
    with place.fresh() as ground, place.fresh() as other, Fleet(place, ground, workers) as fleet:
        for run in range(options.runs):
            place.say(f"idle: run {run + 1} of {options.runs}, watching for {options.window:g} s")
            wait_quiet(fleet.pids)
            time.sleep(SOME_LASTS + _LATE)  # so long after news a worker asks more often whether there is more
            rests.append(_rest(place, fleet, options.window))
            for side in turns(list(found), run):
                place.say(f"idle: run {run + 1} of {options.runs}, {side}")
                if side == RAW:
                    found[side].append(through_chain(place, other, count, rate, f"run{run}"))
                    other.tasks.delete_many({})
                    continue
                before, known = fleet.claims(), len(fleet.starts())
                found[side].append(through_workers(place, ground, fleet, count, rate, f"run{run}"))
                time.sleep(_LATE)
                # Those of the warm-up count on both sides.
                taken = len(fleet.starts()) - known
                attempts.append((fleet.claims() - before).attempted / taken)
    return Result(
        "idle",
        f"{workers} idle workers, {rate:g} tasks a second: one at a time",
        [
            figure("claim attempts that reach the database, a task", "", attempts, _PER_TASK),
            *latency_figures("latency", found[MTASK], found[RAW]),
            figure("an idle worker: commands a second", "/s", [rest.commands for rest in rests], _COMMANDS),
            figure("an idle worker: CPU, of one core", "%", [rest.cpu for rest in rests], _CPU),
            figure("an idle worker: CPU of the server, of one core", "%", [rest.server_cpu for rest in rests]),
        ],
        {"workers": workers, "tasks": count, "rate": rate, "window_s": options.window, "runs": options.runs},
        samples=samples(found),
        notes=[
            "Raw is one bare change stream and find_one_and_update, while the same workers are idle beside it.",
            "Commands are all that the server took, hellos included: use a server that has nothing else to do.",
        ],
    )


def _rest(place: Place, fleet: Fleet, seconds: float) -> Rest:
    with place.metered() as meter:
        before = cpu_of(fleet.pids)
        time.sleep(seconds)
        client = cpu_of(fleet.pids) - before
    fleet.check()
    cost = meter.cost(1)
    per_worker = 1 / (len(fleet.pids) * meter.seconds)
    return Rest(cost.server.requests * per_worker, 100 * client * per_worker, 100 * cost.server.cpu * per_worker)
