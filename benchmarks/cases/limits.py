"""limits: the starts of a queue with a rate, the pace and the idle workers of a full one, and the rescues in it."""

from __future__ import annotations

import itertools
import random
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import mtask
from benchmarks.measuring.app import count_in, moments_in
from benchmarks.measuring.counters import Cost, cpu_of, cpu_parts
from benchmarks.measuring.draining import drain_with, insert_backlog
from benchmarks.measuring.fleet import Fleet
from benchmarks.measuring.server import NotMeasured, Scratch, Server, wait_quiet, wait_until
from benchmarks.options import Options
from benchmarks.report.figures import Figure, Result, Target, compared, figure, quantile, turns
from mtask.errors import InvalidInput
from mtask.kernel.operations.change_stream import SOME_LASTS

TASKS, RATE, WORKERS, RUNS = 20_000, 1_000.0, 4, 1
#: The parts of this benchmark, in their order.
PARTS = ("rate", "concurrency", "idle", "rescue")
QUEUE = "default"
#: The length of the window of the rate, in seconds.
WINDOW = 1.0
#: The most handlers of one worker at once: more than its limits allow.
SLOTS = 200
#: The limit of the concurrency beside which a backlog is drained, and of the queue that another worker keeps full.
AT_ONCE, FULL = 100, 10
#: The tasks that wait behind those that are measured: for the rate, as many as it allows in so many windows.
_BEHIND, _WAITING = 2, 1_000
#: The limits beside which workers are killed, and the leases of their runs.
RESCUE_LIMITS = (1, 2)
_LEASES = {
    "ping_interval_ms": 500,
    "worker_timeout_ms": 1_500,
    "max_unexpected_retries": -1,
    "unexpected_retry_delay_ms": 0,
}
#: The workers that claim at once while workers are killed, and the most kills of one fleet. Its other workers have
#: begun but claim nothing before their turn, so no start of a process falls into a measurement.
ALIVE, _KILLS_OF_A_FLEET = 4, 20
#: The longest time from a start to the kill, in seconds: a ping comes at another time before each lapse.
_LONGEST_PAUSE = 0.5
#: A handler that does not end during a measurement, in seconds.
_FOREVER = 3_600
_PATIENCE = 60.0
#: After this many seconds a worker has heard of the last news, too.
_LATE = 0.5
_READINGS = 20
_COMMANDS = Target.at_most(4.0, "value", "/s")
_RESCUED = Target.at_most(500.0, "value", "ms")
LIMITED, FREE = "with a limit", "without a limit"


def chosen(text: str | None) -> tuple[str, ...]:
    """Return the parts that the user has named, in the order of PARTS; all without a name. Raises InvalidInput."""
    if text is None:
        return PARTS
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in PARTS:
            raise InvalidInput(f"--only: there is no part {name!r}. Use {', '.join(PARTS)}.", field="only")
    return tuple(part for part in PARTS if part in names)


def measure(server: Server, options: Options) -> Result:
    """Measure each part by itself, on databases of its own."""
    parts = options.only or PARTS
    measures: Mapping[str, Callable[[Server, Options], _Part]] = {
        "rate": _measure_rate,
        "concurrency": _measure_concurrency,
        "idle": _measure_idle,
        "rescue": _measure_rescue,
    }
    found = [measures[part](server, options) for part in parts]
    return Result(
        "limits",
        f"a queue with limits: {', '.join(parts)}",
        [one for part in found for one in part.figures],
        {
            "tasks": options.tasks_or(TASKS),
            "rate": options.rate_or(RATE),
            "workers": _workers(options),
            "kills": options.kills,
            "window_s": options.window,
            "runs": options.runs,
        },
        samples={side: values for part in found for side, values in part.samples.items()},
        cpu={side: values for part in found for side, values in part.cpu.items()},
        notes=[note for part in found for note in part.notes],
    )


@dataclass(frozen=True, slots=True)
class _Part:
    figures: Sequence[Figure]
    samples: Mapping[str, Sequence[float]]
    cpu: Mapping[str, Mapping[str, float]]
    notes: Sequence[str]


def _workers(options: Options) -> int:
    return WORKERS if options.workers is None else options.workers


def _limit(scratch: Scratch, *, concurrency: int | None = None, rate: tuple[int, float] | None = None) -> None:
    with mtask.Client(scratch.uri, database=scratch.name) as client:
        client.limit(QUEUE, concurrency=concurrency, rate=rate)


# --- the rate -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Paced:
    """The first lines of handlers in a queue with a rate, by the system's monotonic clock."""

    moments: Sequence[float]  #: in order
    limit: int  #: the most starts in any window
    window: float  #: seconds
    cost: Cost

    @property
    def most(self) -> int:
        """The most starts in any window. A window does not hold its end."""
        moments = self.moments
        return max(bisect_left(moments, moment + self.window) - at for at, moment in enumerate(moments))

    @property
    def rate(self) -> float:
        """The starts a second after those of the first window: no limit keeps the first ones apart."""
        behind = len(self.moments) - self.limit
        return behind / (self.moments[-1] - self.moments[self.limit - 1])

    @property
    def lateness(self) -> list[float]:
        """Return how much later than allowed each start is, after those of the first window, in ms."""
        pairs = zip(self.moments, self.moments[self.limit :], strict=False)
        return [1000 * (moment - earlier - self.window) for earlier, moment in pairs]


def _measure_rate(server: Server, options: Options) -> _Part:
    """Let one worker, and several, start the tasks of one queue as quickly as its rate allows, in turns."""
    limit, count = max(1, round(options.rate_or(RATE))), options.tasks_or(TASKS)
    if count < 2 * limit:
        raise InvalidInput(f"--tasks {count}: {limit} starts a second take {2 * limit} or more.", field="tasks")
    sizes = sorted({1, _workers(options)})
    found: dict[int, list[Paced]] = {workers: [] for workers in sizes}
    for run in range(options.runs):
        for workers in turns(sizes, run):
            server.say(f"limits: run {run + 1} of {options.runs}, a rate, {_named(workers)}")
            found[workers].append(_started(server, workers, limit, count))
    return _Part(
        [one for workers in sizes for one in _rate_figures(workers, found[workers])],
        {f"late, {_named(workers)}": [late for one in found[workers] for late in one.lateness] for workers in sizes},
        {f"rate, {_named(workers)}": cpu_parts([one.cost for one in found[workers]]) for workers in sizes},
        [
            f"A rate counts the first lines of handlers. The {limit:,} of the first window are not in what is held: "
            "nothing keeps them apart. A start is late by the time since the start that it must not share a window "
            "with, less the window."
        ],
    )


def _started(server: Server, workers: int, limit: int, count: int) -> Paced:
    with server.scratch() as scratch:
        _limit(scratch, rate=(limit, WINDOW))
        insert_backlog(scratch, "note", count + _BEHIND * limit)
        with Fleet(server, scratch, workers, concurrency=SLOTS, is_held_back=True) as fleet:

            def is_done() -> bool:
                fleet.check()
                return count_in(fleet.folder) >= count

            with server.metered(fleet.pids) as meter:
                fleet.release()
                wait_until(is_done, _PATIENCE + 4 * count / limit, f"{count:,} starts", interval=0.25)
            moments = moments_in(fleet.folder)
            return Paced(moments, limit, WINDOW, meter.cost(len(moments)))


def _rate_figures(workers: int, found: Sequence[Paced]) -> list[Figure]:
    name = f"rate, {_named(workers)}"
    limit = found[0].limit
    rates = [one.rate for one in found]
    return [
        compared(f"{name}: starts held", "/s", rates, [limit / WINDOW] * len(found), against_name="limit"),
        figure(
            f"{name}: the most in any window of {WINDOW:g} s",
            "",
            [float(one.most) for one in found],
            Target.at_most(limit, "value"),
        ),
        figure(f"{name}: late, mean", "ms", [sum(one.lateness) / len(one.lateness) for one in found]),
        figure(f"{name}: late, p99", "ms", [quantile(one.lateness, 0.99) for one in found]),
        figure(f"{name}: round trips a start", "", [one.cost.round_trips for one in found]),
    ]


def _named(workers: int) -> str:
    return "1 worker" if workers == 1 else f"{workers} workers"


# --- the concurrency ----------------------------------------------------------------------------------------------


def _measure_concurrency(server: Server, options: Options) -> _Part:
    """Drain a backlog with a limit of the runs at once, and without, by one worker with the same slots, in turns."""
    count = options.tasks_or(TASKS)
    costs: dict[str, list[Cost]] = {LIMITED: [], FREE: []}
    for run in range(options.runs):
        for side in turns(list(costs), run):
            server.say(f"limits: run {run + 1} of {options.runs}, a drain {side}")
            with server.scratch() as scratch:
                if side == LIMITED:
                    _limit(scratch, concurrency=AT_ONCE)
                backlog = insert_backlog(scratch, "noop", count)
                costs[side].append(drain_with(server, scratch, backlog, concurrency=SLOTS).cost)

    def against_free(name: str, unit: str, part: Callable[[Cost], float]) -> Figure:
        ours, theirs = ([part(cost) for cost in costs[side]] for side in (LIMITED, FREE))
        return compared(f"concurrency {AT_ONCE}: {name}", unit, ours, theirs, against_name=FREE)

    return _Part(
        [
            against_free("tasks", "/s", lambda cost: cost.rate),
            against_free("round trips a task", "", lambda cost: cost.round_trips),
            against_free("server CPU a task", "µs", lambda cost: cost.server_us),
            against_free("client CPU a task", "µs", lambda cost: cost.client_us),
        ],
        {},
        {f"drain {side}": cpu_parts(found) for side, found in costs.items()},
        [f"The drains are those of one worker with {SLOTS} slots and a handler that does nothing."],
    )


# --- an idle worker beside a full queue ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Rest:
    """The load of an idle worker beside another one that holds all permits."""

    commands: float  #: a second
    cpu: float  #: of one core, %
    of_holder: float  #: the commands a second of the other worker
    requests: float  #: a second, of both: all that the server took


def _measure_idle(server: Server, options: Options) -> _Part:
    """Observe a worker beside a queue whose limit another worker's handlers use up, while tasks wait."""
    rests: list[_Rest] = []
    idle, holder = "w2", "w1"
    with server.scratch() as scratch:
        _limit(scratch, concurrency=FULL)
        insert_backlog(scratch, "hold", FULL + _WAITING, params=lambda _: {"seconds": _FOREVER})
        with Fleet(server, scratch, 2, is_held_back=True, app="benchmarks.measuring.counted:app") as fleet:
            for worker_id in (holder, idle):
                fleet.release([worker_id])
                wait_until(partial(_is_serving, scratch, worker_id), _PATIENCE, f"{worker_id} serving")
                wait_until(lambda: _holders(scratch) == [holder] * FULL, _PATIENCE, "a full queue")
            for run in range(options.runs):
                server.say(f"limits: run {run + 1} of {options.runs}, an idle worker for {options.window:g} s")
                wait_quiet(fleet.pids)
                time.sleep(SOME_LASTS + _LATE)  # until then a worker polls more often, because of the last news
                rests.append(_rest(server, fleet, idle, options.window))
            if _holders(scratch) != [holder] * FULL:
                raise NotMeasured("the queue was not full all the time.")
    name = "idle beside a full queue"
    return _Part(
        [
            figure(f"{name}: commands a second", "/s", [rest.commands for rest in rests], _COMMANDS),
            figure(f"{name}: CPU, of one core", "%", [rest.cpu for rest in rests]),
            figure(f"{name}: commands a second of the other worker", "/s", [rest.of_holder for rest in rests]),
            figure(f"{name}: requests a second of both", "/s", [rest.requests for rest in rests]),
        ],
        {},
        {},
        [
            "Commands are counted in each worker, by a listener of its driver. Requests are all that the server took, "
            "the drivers' hellos included."
        ],
    )


def _is_serving(scratch: Scratch, worker_id: str) -> bool:
    return scratch.workers.count_documents({"_id": worker_id, "concurrency": {"$gt": 0}}) == 1


def _holders(scratch: Scratch) -> list[str]:
    """Return the worker of each run."""
    return [run["worker_id"] for _, run in _running(scratch)]


def _running(scratch: Scratch) -> Iterator[tuple[str, dict[str, Any]]]:
    """Return all runs that have not ended, with the ids of their tasks."""
    for document in scratch.tasks.find({"task_state.status": "RUNNING"}, {"task_state.worker_states": 1}):
        for run in document["task_state"]["worker_states"]:
            if run["status"] == "RUNNING":
                yield document["_id"], run


def _rest(server: Server, fleet: Fleet, idle: str, seconds: float) -> _Rest:
    pids = dict(zip(fleet.worker_ids, fleet.pids, strict=True))
    before = fleet.commands()
    with server.metered() as meter:
        cpu = cpu_of([pids[idle]])
        time.sleep(seconds)
        cpu = cpu_of([pids[idle]]) - cpu
    sent = {worker_id: count - before[worker_id] for worker_id, count in fleet.commands().items()}
    fleet.check()
    others = sum(sent.values()) - sent[idle]
    requests = meter.cost(1).server.requests
    return _Rest(*(each / meter.seconds for each in (sent[idle], 100 * cpu, others, requests)))


# --- rescues ------------------------------------------------------------------------------------------------------


def _measure_rescue(server: Server, options: Options) -> _Part:
    """Kill workers that hold permits; time the next run of each of their tasks from the lapse of its lease."""
    found: dict[int, list[list[float]]] = {limit: [] for limit in RESCUE_LIMITS}
    pauses = random.Random(1)
    for run in range(options.runs):
        for limit in turns(RESCUE_LIMITS, run):
            rescues: list[float] = []
            for first in range(0, options.kills, _KILLS_OF_A_FLEET):
                server.say(f"limits: run {run + 1} of {options.runs}, rescues with a limit of {limit}, {first} killed")
                rescues += _rescued(server, limit, min(_KILLS_OF_A_FLEET, options.kills - first), pauses)
            found[limit].append(rescues)
    figures = []
    for limit, runs in found.items():
        name = f"rescue, limit {limit}"
        figures += [
            figure(f"{name}: from lapse to start, p50", "ms", [quantile(one, 0.5) for one in runs]),
            figure(f"{name}: from lapse to start, p99", "ms", [quantile(one, 0.99) for one in runs], _RESCUED),
            figure(f"{name}: slowest", "ms", [max(one) for one in runs]),
        ]
    return _Part(
        figures,
        {f"rescue, limit {limit}": [time for one in runs for time in one] for limit, runs in found.items()},
        {},
        [
            f"Rescues: {ALIVE} workers live at once, {_WAITING:,} tasks wait, and the leases are those of "
            f"{_LEASES['worker_timeout_ms'] / 1000:g} s. The lapse is the server's, so a time is right to some 2 ms."
        ],
    )


def _rescued(server: Server, limit: int, kills: int, pauses: random.Random) -> list[float]:
    """Kill so many workers one after another; return the time of each rescue, in ms."""
    found: list[float] = []
    with server.scratch() as scratch:
        _limit(scratch, concurrency=limit)
        insert_backlog(scratch, "note_hold", limit + _WAITING, params=lambda _: {"seconds": _FOREVER}, options=_LEASES)
        with Fleet(server, scratch, ALIVE + kills, is_held_back=True) as fleet:
            spare = iter(fleet.worker_ids)
            fleet.release(itertools.islice(spare, ALIVE))
            ahead = clock_ahead(scratch)
            for _ in range(kills):
                held = _held(scratch, fleet, limit)
                time.sleep(pauses.uniform(0.0, _LONGEST_PAUSE))
                # The run that began first: so each worker has its turn where several hold permits.
                worker_id = min(held, key=lambda one: one[1]["claim_time"])[1]["worker_id"]
                fleet.kill(worker_id)
                for task_id, run in held:
                    if run["worker_id"] == worker_id:
                        lapse, start = _next_start(scratch, fleet, task_id, run["run_id"])
                        found.append(1000 * (start + ahead - lapse))
                fleet.release(itertools.islice(spare, 1))
    return found


def clock_ahead(scratch: Scratch) -> float:
    """Return by how much the server's time is ahead of the monotonic clock of this machine, in seconds."""

    def reading() -> tuple[float, float]:
        before = time.monotonic()
        told = scratch.database.command("hello")["localTime"].timestamp()
        after = time.monotonic()
        return after - before, told - (before + after) / 2

    return min(reading() for _ in range(_READINGS))[1]


def _held(scratch: Scratch, fleet: Fleet, limit: int) -> list[tuple[str, dict[str, Any]]]:
    """Wait until living workers have begun as many handlers as may run; return their runs with the tasks."""
    found: list[tuple[str, dict[str, Any]]] = []

    def is_full() -> bool:
        fleet.check()
        begun, living = fleet.starts(), set(fleet.worker_ids)
        found[:] = [(task, run) for task, run in _running(scratch) if run["run_id"] in begun]
        return len(found) == limit and all(run["worker_id"] in living for _, run in found)

    wait_until(is_full, _PATIENCE, f"{limit} running", interval=0.05)
    return found


def _next_start(scratch: Scratch, fleet: Fleet, task_id: str, run_id: str) -> tuple[float, float]:
    """Wait until the run after this one has begun; return the lapse of this one by the server, and that start by us."""
    found: list[tuple[float, float]] = []

    def has_begun() -> bool:
        fleet.check()
        document = scratch.tasks.find_one({"_id": task_id}, {"task_state.worker_states": 1}) or {}
        runs = document["task_state"]["worker_states"]
        at = next(at for at, run in enumerate(runs) if run["run_id"] == run_id)
        begun = fleet.starts()
        starts = [begun[run["run_id"]] for run in runs[at + 1 :] if run["run_id"] in begun]
        found[:] = [(runs[at]["ping_expire_time"].timestamp(), min(starts))] if starts else []
        return bool(found)

    wait_until(has_begun, _PATIENCE, f"the next run of {task_id}", interval=0.05)
    return found[0]
