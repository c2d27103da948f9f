"""idle: many idle workers, one task at a time: claim attempts, latency, and the cost of waiting.

Also the cost of waiting for one worker of many task names in a large fleet, whose workers stay, or come and go.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.cases.latency import latency_figures, samples
from benchmarks.measuring.arrivals import Arrivals, through_chain, through_workers
from benchmarks.measuring.counters import cpu_of
from benchmarks.measuring.fleet import Fleet
from benchmarks.measuring.many_names import NAMES
from benchmarks.measuring.registered import RegisteredWorkers
from benchmarks.measuring.server import Server, wait_quiet
from benchmarks.options import Options
from benchmarks.report.figures import MTASK, RAW, Figure, Result, Target, figure, turns
from mtask.kernel.operations.change_stream import MAX_AWAIT_MS, SOME_LASTS, Density
from mtask.kernel.worker.discovery.stream import WIDE_FOR

TASKS = 40
RATE = 4.0
WORKERS = 20
#: After this many seconds the slowest worker has tried to claim the task, too.
_LATE = 0.5
#: The number of peers of a worker of many names, and the seconds between two of them that come or go.
PEERS, _BETWEEN = 200, 0.25
#: A stream tells of less only after its next answer, which comes after this many seconds without an event.
_LONGEST_AWAIT = MAX_AWAIT_MS[Density.STILL] / 1_000
_MANY_NAMES_APP = "benchmarks.measuring.many_names:app"
_PER_TASK = Target.at_most(3.0, "value")
_TO_ONE = Target.at_most(1.5)
_COMMANDS = Target.at_most(1.0, "value", "/s")
_CPU = Target.at_most(1.0, "value", "%")
_CPU_AMID_CHANGES = Target.at_most(5.0, "value", "%")


@dataclass(frozen=True, slots=True)
class Rest:
    """The load of one idle worker, on average."""

    commands: float  #: a second, of all its connections
    cpu: float  #: of one core, %
    server_cpu: float  #: of one core, %


def measure(server: Server, options: Options) -> Result:
    """Observe idle workers; then publish to all of them and to the raw chain, in turn; then to one worker alone.

    At last, observe one worker of many names beside many peers.
    """
    workers = WORKERS if options.workers is None else options.workers
    count, rate = options.tasks_or(TASKS), options.rate_or(RATE)
    found: dict[str, list[Arrivals]] = {RAW: [], MTASK: []}
    attempts: list[float] = []
    rests: list[Rest] = []
    server.say(f"idle: starting {workers} workers")
    with server.scratch() as scratch, server.scratch() as other, Fleet(server, scratch, workers) as fleet:
        for run in range(options.runs):
            server.say(f"idle: run {run + 1} of {options.runs}, watching for {options.window:g} s")
            wait_quiet(fleet.pids)
            time.sleep(SOME_LASTS + _LATE)  # until then a worker polls more often, because of the last news
            rests.append(_rest(server, fleet, options.window))
            for side in turns(list(found), run):
                server.say(f"idle: run {run + 1} of {options.runs}, {side}")
                if side == RAW:
                    found[side].append(through_chain(server, other, count, rate, f"run{run}"))
                    other.tasks.delete_many({})
                    continue
                before, known = fleet.claims(), len(fleet.starts())
                found[side].append(through_workers(server, scratch, fleet, count, rate, f"run{run}"))
                time.sleep(_LATE)
                # Claims and starts both include the warm-up.
                taken = len(fleet.starts()) - known
                attempts.append((fleet.claims() - before).attempted / taken)
    to_one: list[Figure] = []
    if workers > 1:
        alone = _alone(server, options.runs, count, rate)
        to_one = latency_figures("latency beside one worker's", found[MTASK], alone, _TO_ONE, against_name="1 worker")
    still, changing = _beside_peers(server, options)
    of_many = f"one of {len(NAMES)} names, {PEERS} peers"
    return Result(
        "idle",
        f"{workers} idle workers, {rate:g} tasks a second: one at a time",
        [
            figure("claim attempts that reach the database, a task", "", attempts, _PER_TASK),
            *latency_figures("latency", found[MTASK], found[RAW]),
            *to_one,
            figure("an idle worker: commands a second", "/s", [rest.commands for rest in rests], _COMMANDS),
            figure("an idle worker: CPU, of one core", "%", [rest.cpu for rest in rests], _CPU),
            figure("an idle worker: CPU of the server, of one core", "%", [rest.server_cpu for rest in rests]),
            figure(f"{of_many}: commands a second", "/s", [rest.commands for rest in still], _COMMANDS),
            figure(f"{of_many}: CPU, of one core", "%", [rest.cpu for rest in still], _CPU),
            figure(
                f"{of_many} that come and go: CPU, of one core", "%", [rest.cpu for rest in changing], _CPU_AMID_CHANGES
            ),
        ],
        {"workers": workers, "tasks": count, "rate": rate, "window_s": options.window, "runs": options.runs},
        samples=samples(found),
        notes=[
            "Raw is one bare change stream and find_one_and_update, while the same workers are idle beside it.",
            "Commands are all that the server took, hellos included: use a server that has nothing else to do.",
            f"The {PEERS} peers are only on record, with the same names. One comes or goes each {_BETWEEN:g} s.",
            *(["1 worker is measured at the same rate after the others have ended."] if to_one else []),
        ],
    )


def _alone(server: Server, runs: int, count: int, rate: float) -> list[Arrivals]:
    """Return what one worker takes, with no other beside it."""
    found = []
    with server.scratch() as scratch, Fleet(server, scratch) as fleet:
        for run in range(runs):
            server.say(f"idle: run {run + 1} of {runs}, one worker")
            wait_quiet(fleet.pids)
            found.append(through_workers(server, scratch, fleet, count, rate, f"run{run}"))
    return found


def _beside_peers(server: Server, options: Options) -> tuple[list[Rest], list[Rest]]:
    """Observe an idle worker of many names beside many peers: first they stay, then they come and go."""
    still, changing = [], []
    with server.scratch() as scratch:
        peers = RegisteredWorkers(server, scratch, PEERS, NAMES)
        with Fleet(server, scratch, app=_MANY_NAMES_APP) as fleet:
            for run in range(options.runs):
                server.say(f"idle: run {run + 1} of {options.runs}, {PEERS} peers")
                time.sleep(WIDE_FOR + _LONGEST_AWAIT + _LATE)  # until then the worker hears of all new tasks
                still.append(_rest(server, fleet, options.window))
                changing.append(_rest(server, fleet, options.window, lambda seconds: peers.change(seconds, _BETWEEN)))
    return still, changing


def _rest(server: Server, fleet: Fleet, seconds: float, wait: Callable[[float], None] = time.sleep) -> Rest:
    with server.metered() as meter:
        before = cpu_of(fleet.pids)
        wait(seconds)
        client = cpu_of(fleet.pids) - before
    fleet.check()
    cost = meter.cost(1)
    per_worker = 1 / (len(fleet.pids) * meter.seconds)
    return Rest(cost.server.requests * per_worker, 100 * client * per_worker, 100 * cost.server.cpu * per_worker)
