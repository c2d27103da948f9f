"""payload: a thousand leases at once, tasks with large params and returns, and small tasks beside very large ones."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any
from uuid import uuid4

from benchmarks.cases import latency
from benchmarks.measuring import raw
from benchmarks.measuring.arrivals import Arrivals, through_workers
from benchmarks.measuring.counters import Cost, cost_figures, cpu_parts
from benchmarks.measuring.draining import drain_raw, drain_with, insert_backlog
from benchmarks.measuring.fleet import Fleet
from benchmarks.measuring.server import NotMeasured, Scratch, Server, wait_quiet, wait_until
from benchmarks.options import Options
from benchmarks.report.figures import MTASK, RAW, Figure, Result, Target, compared, figure, turns

Document = dict[str, Any]
TASKS = 10_000
PING_SECONDS = 10
_LEASE_SECONDS = 20
_PING_GROUP = 500
#: Longer than any measurement.
_HOLD_SECONDS = 86_400.0
_RAW_ROUNDS = 10
_MOST_CPU = Target.at_most(2.0, "value", "%")
_NO_LAPSE = Target.at_most(0, "value")
_RATE = Target.at_least(0.75)
ALONE, BESIDE = "alone", "beside large tasks"
#: This many large tasks come due together, each second, with params and returns of this many bytes.
_LARGE_A_SECOND, _LARGE_BYTES = 10, 1_000_000
#: Seconds from the insert of the large tasks to the first that is due; and seconds for which they outlast the others.
_LEAD, _REST = 2.0, 2


def measure(server: Server, options: Options) -> Result:
    """Hold many runs at once; then drain tasks with large params and returns by the raw loop and by mtask, in turn."""
    count = options.tasks_or(TASKS)
    pings = _pings(server, options)
    beside = _beside_large(server, options)
    costs: dict[str, list[Cost]] = {RAW: [], MTASK: []}

    def params(number: int) -> Document:
        return {"text": text_of(number, options.size)}

    for run in range(options.runs):
        for side in turns(list(costs), run):
            server.say(f"payload: run {run + 1} of {options.runs}, {side}")
            with server.scratch() as scratch:
                backlog = insert_backlog(scratch, "echo", count, params=params)
                if side == RAW:
                    costs[side].append(drain_raw(server, scratch, backlog, lambda found: found["params"]["text"]))
                else:
                    costs[side].append(drain_with(server, scratch, backlog).cost)
    name = f"{options.size:,} B of params and returns"
    return Result(
        "payload",
        f"{options.held:,} tasks running at once, pinged every {PING_SECONDS} s; {count:,} tasks with {name}",
        [*pings, *beside, *cost_figures(name, costs[MTASK], costs[RAW], _RATE)],
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
            "the reads of the tasks that it holds.",
            f"Raw pings: a grouped update and a read, by a sync client, every {PING_SECONDS} s.",
        ],
    )


# --- small tasks beside large ones --------------------------------------------------------------------------------


def _beside_large(server: Server, options: Options) -> list[Figure]:
    """Measure the latency of small tasks in a worker, alone and while large tasks come due in it, in turn."""
    found: dict[str, list[Arrivals]] = {BESIDE: [], ALONE: []}
    for run in range(options.runs):
        for side in turns(list(found), run):
            server.say(f"payload: latency, run {run + 1} of {options.runs}, {side}")
            with server.scratch() as scratch, Fleet(server, scratch) as fleet:
                if side == BESIDE:
                    _insert_large(scratch, int(latency.TASKS / latency.RATE) + _REST)
                found[side].append(through_workers(server, scratch, fleet, latency.TASKS, latency.RATE, "run"))
                if side == BESIDE and not scratch.span("echo", "large").succeeded:
                    raise NotMeasured("no large task has run beside the small ones.")
    what = f"latency of small tasks at {latency.RATE:g}/s beside {_LARGE_A_SECOND} tasks of 1 MB a second"
    return latency.latency_figures(what, found[BESIDE], found[ALONE], against_name=ALONE)


def _insert_large(scratch: Scratch, seconds: int) -> None:
    """Insert the large tasks of this many seconds, in the order in which they come due."""
    begin, params = scratch.age() + timedelta(seconds=_LEAD), {"text": text_of(0, _LARGE_BYTES)}
    for second in range(seconds):
        delay = begin + timedelta(seconds=second)
        keys = [f"large/{second:03}-{number}" for number in range(_LARGE_A_SECOND)]
        raw.insert(scratch.tasks, (raw.document("echo", key, scratch.now, params, delay) for key in keys))


def text_of(number: int, size: int) -> str:
    """Return a text of `size` bytes that differs for each number and is hard to compress."""
    return random.Random(number).randbytes((size + 1) // 2).hex()[:size]


# --- leases -----------------------------------------------------------------------------------------------------


def _pings(server: Server, options: Options) -> list[Figure]:
    """Measure the cost of the leases to mtask, and the cost of bare pings, in the same runs."""
    held, window = options.held, options.window
    ours: list[float] = []
    bare: list[float] = []
    server_cpu: list[float] = []
    lapses: list[float] = []
    server.say(f"payload: a worker with {held:,} tasks")
    with server.scratch() as scratch, server.scratch() as other, Fleet(server, scratch, concurrency=held) as fleet:
        raw_groups, token = _hold_raw(other, held)
        idle = _watch(server, fleet, window)
        _hold(scratch, held)
        wait_until(lambda: _live(scratch) == held, 120.0, f"{held:,} tasks running at once", interval=0.2)
        wait_quiet(fleet.pids, 5.0)
        for run in range(options.runs):
            server.say(f"payload: pings, run {run + 1} of {options.runs}, watching for {window:g} s")
            bare.append(_ping_raw(server, other, raw_groups, token))
            taken = _watch(server, fleet, window)
            ours.append(taken[0] - idle[0])
            server_cpu.append(taken[1] - idle[1])
            lapses.append(held - _live(scratch))
    return [
        compared(f"CPU of {held:,} leases, of one core", "%", ours, bare, _MOST_CPU),
        figure(f"CPU of the server for {held:,} leases, of one core", "%", server_cpu),
        figure("leases lapsed", "", lapses, _NO_LAPSE),
    ]


def _hold(scratch: Scratch, count: int) -> None:
    options = {"ping_interval_ms": PING_SECONDS * 1000, "worker_timeout_ms": _LEASE_SECONDS * 1000}

    def documents() -> Iterator[Document]:
        for number in range(count):
            yield raw.document("hold", f"run/{number:07}", scratch.now, {"seconds": _HOLD_SECONDS}, options=options)

    raw.insert(scratch.tasks, documents())


def _hold_raw(scratch: Scratch, count: int) -> tuple[list[list[str]], str]:
    """Claim as many tasks by bare calls; return their groups and the token of their run_ids."""
    ids = list(insert_backlog(scratch, "hold", count).ids)
    groups = [ids[first : first + _PING_GROUP] for first in range(0, count, _PING_GROUP)]
    token = uuid4().hex
    for group in groups:
        raw.hold(scratch.tasks, group, token)
    return groups, token


def _ping_raw(server: Server, scratch: Scratch, groups: Sequence[Sequence[str]], token: str) -> float:
    """Return the share of one core that bare pings at the same interval would take, in %."""
    with server.metered() as meter:
        for _ in range(_RAW_ROUNDS):
            for group in groups:
                if raw.ping(scratch.tasks, group, token, _LEASE_SECONDS * 1000) != len(group):
                    raise NotMeasured("the bare pings did not find what they hold.")
    return 100 * meter.cost(_RAW_ROUNDS).client_us / 1e6 / PING_SECONDS


def _watch(server: Server, fleet: Fleet, seconds: float) -> tuple[float, float]:
    """Return the shares of one core that the worker and the server take within these seconds, in %."""
    with server.metered(fleet.pids) as meter:
        time.sleep(seconds)
    fleet.check()
    cost = meter.cost(1)
    return 100 * cost.client_cpu / meter.seconds, 100 * cost.server.cpu / meter.seconds


def _live(scratch: Scratch) -> int:
    """Return the number of tasks whose first run holds a live lease."""
    expires = {"$arrayElemAt": ["$task_state.worker_states.ping_expire_time", 0]}
    return scratch.tasks.count_documents(
        {
            "task_state.status": "RUNNING",
            "task_state.worker_states": {"$size": 1},
            "$expr": {"$gt": [expires, "$$NOW"]},
        }
    )
