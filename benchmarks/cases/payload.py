"""payload: what a thousand leases at once cost, and tasks with large params and returns."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from typing import Any
from uuid import uuid4

from benchmarks.measuring import raw
from benchmarks.measuring.counters import Cost, cost_figures, cpu_parts
from benchmarks.measuring.draining import drain_raw, drain_with, lay_in
from benchmarks.measuring.fleet import Fleet
from benchmarks.measuring.server import Ground, NotMeasured, Place, wait_quiet, wait_until
from benchmarks.options import Options
from benchmarks.report.figures import MTASK, RAW, Figure, Result, Target, compared, figure, turns

Document = dict[str, Any]
TASKS = 10_000
PING_SECONDS = 10
_LEASE_SECONDS = 20
_PING_GROUP = 500
#: Beyond any measurement.
_HOLD_SECONDS = 86_400.0
_RAW_ROUNDS = 10
_MOST_CPU = Target.at_most(2.0, "value", "%")
_NO_LAPSE = Target.at_most(0, "value")
_RATE = Target.at_least(0.75)


def measure(place: Place, options: Options) -> Result:
    """Hold many runs at once; then drain tasks with large params and returns, by the raw loop and mtask in turn."""
    count = options.tasks_or(TASKS)
    pings = _pings(place, options)
    costs: dict[str, list[Cost]] = {RAW: [], MTASK: []}

    def params(number: int) -> Document:
        return {"text": text_of(number, options.size)}

    for run in range(options.runs):
        for side in turns(list(costs), run):
            place.say(f"payload: run {run + 1} of {options.runs}, {side}")
            with place.fresh() as ground:
                backlog = lay_in(ground, "echo", count, params=params)
                if side == RAW:
                    costs[side].append(drain_raw(place, ground, backlog, lambda found: found["params"]["text"]))
                else:
                    costs[side].append(drain_with(place, ground, backlog).cost)
    name = f"{options.size:,} B of params and returns"
    return Result(
        "payload",
        f"{options.held:,} tasks running at once, pinged every {PING_SECONDS} s; {count:,} tasks with {name}",
        [*pings, *cost_figures(name, costs[MTASK], costs[RAW], _RATE)],
        {
            "held": options.held,
            "window_s": options.window,
            "tasks": count,
            "size_bytes": options.size,
            "runs": options.runs,
        },
        cpu={side: cpu_parts(found) for side, found in costs.items()},
        notes=[
            f"The CPU of {options.held:,} leases is what the worker takes above what it took when idle: the pings, and "
            "the looks at what it holds.",
            f"Raw pings: a grouped update and a read, by a sync client, every {PING_SECONDS} s.",
        ],
    )


def text_of(number: int, size: int) -> str:
    """Return a text of so many bytes, different for each number, and hard to compress."""
    return random.Random(number).randbytes((size + 1) // 2).hex()[:size]


# --- leases -----------------------------------------------------------------------------------------------------


def _pings(place: Place, options: Options) -> list[Figure]:
    """Measure in the same runs what the leases cost mtask and what the bare pings cost."""
    held, window = options.held, options.window
    ours: list[float] = []
    bare: list[float] = []
    server: list[float] = []
    lapses: list[float] = []
    place.say(f"payload: a worker with {held:,} tasks")
    with place.fresh() as ground, place.fresh() as other, Fleet(place, ground, concurrency=held) as fleet:
        raw_groups, token = _hold_raw(other, held)
        idle = _watch(place, fleet, window)
        _hold(ground, held)
        wait_until(lambda: _live(ground) == held, 120.0, f"{held:,} tasks running at once", interval=0.2)
        wait_quiet(fleet.pids, 5.0)
        for run in range(options.runs):
            place.say(f"payload: pings, run {run + 1} of {options.runs}, watching for {window:g} s")
            bare.append(_ping_raw(place, other, raw_groups, token))
            taken = _watch(place, fleet, window)
            ours.append(taken[0] - idle[0])
            server.append(taken[1] - idle[1])
            lapses.append(held - _live(ground))
    return [
        compared(f"CPU of {held:,} leases, of one core", "%", ours, bare, _MOST_CPU),
        figure(f"CPU of the server for {held:,} leases, of one core", "%", server),
        figure("leases lapsed", "", lapses, _NO_LAPSE),
    ]


def _hold(ground: Ground, count: int) -> None:
    options = {"ping_interval_ms": PING_SECONDS * 1000, "worker_timeout_ms": _LEASE_SECONDS * 1000}

    def documents() -> Iterator[Document]:
        for number in range(count):
            yield raw.document("hold", f"run/{number:07}", ground.now, {"seconds": _HOLD_SECONDS}, options=options)

    raw.insert(ground.tasks, documents())


def _hold_raw(ground: Ground, count: int) -> tuple[list[list[str]], str]:
    """Have the bare calls hold as many; return their groups and the token of their run_ids."""
    ids = list(lay_in(ground, "hold", count).ids)
    groups = [ids[first : first + _PING_GROUP] for first in range(0, count, _PING_GROUP)]
    token = uuid4().hex
    for group in groups:
        raw.hold(ground.tasks, group, token)
    return groups, token


def _ping_raw(place: Place, ground: Ground, groups: Sequence[Sequence[str]], token: str) -> float:
    """Return what bare pings at the same interval would take of one core, in %."""
    with place.metered() as meter:
        for _ in range(_RAW_ROUNDS):
            for group in groups:
                if raw.ping(ground.tasks, group, token, _LEASE_SECONDS * 1000) != len(group):
                    raise NotMeasured("the bare pings did not find what they hold.")
    return 100 * meter.cost(_RAW_ROUNDS).client_us / 1e6 / PING_SECONDS


def _watch(place: Place, fleet: Fleet, seconds: float) -> tuple[float, float]:
    """Return what the worker and the server take of one core meanwhile, in %."""
    with place.metered(fleet.pids) as meter:
        time.sleep(seconds)
    fleet.check()
    cost = meter.cost(1)
    return 100 * cost.client_cpu / meter.seconds, 100 * cost.server.cpu / meter.seconds


def _live(ground: Ground) -> int:
    """Return how many tasks are held by their first run, under a lease that holds."""
    expires = {"$arrayElemAt": ["$task_state.worker_states.ping_expire_time", 0]}
    return ground.tasks.count_documents(
        {
            "task_state.status": "RUNNING",
            "task_state.worker_states": {"$size": 1},
            "$expr": {"$gt": [expires, "$$NOW"]},
        }
    )
