"""isolation: sync handlers in executors, against the same handlers in threads of one worker process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.cases.latency import samples
from benchmarks.measuring.arrivals import Arrivals, through_workers
from benchmarks.measuring.draining import Warm, drain_warm, start_executors
from benchmarks.measuring.fleet import Fleet
from benchmarks.measuring.server import NotMeasured, Scratch, Server
from benchmarks.measuring.spinning import bare_rate, rounds_for
from benchmarks.options import Options
from benchmarks.report.figures import Figure, Result, Spread, Target, compared, figure, turns

TASKS = 5_000
RATE = 50.0
#: A handler that works uses the processor for this time, in seconds, if nothing slows it down; and the number of tasks
#: of it, to one of `TASKS`.
_WORK, _WORK_SHARE = 0.01, 0.3
#: The number of tasks whose latency is measured, to one of `TASKS`.
_LATENCY_SHARE = 0.04
THREADS, EXECUTORS = "threads", "executors"
_COUNT = 2
_FLAGS: dict[str, list[str]] = {
    THREADS: [],
    EXECUTORS: ["--isolation", "process", "--executors", str(_COUNT)],
}
#: For the count of change streams: more executors than workers ever have by default on a small machine.
_MANY = 4


def measure(server: Server, options: Options) -> Result:
    """Drain by threads and by executors, in turn; then publish at a steady rate to both."""
    count, rate = options.tasks_or(TASKS), options.rate_or(RATE)
    working, late = max(20, int(count * _WORK_SHARE)), max(20, int(count * _LATENCY_SHARE))
    work: dict[str, list[float]] = {side: [] for side in _FLAGS}
    noop: dict[str, list[Warm]] = {side: [] for side in _FLAGS}
    arrivals: dict[str, list[Arrivals]] = {side: [] for side in _FLAGS}
    bare: dict[int, list[float]] = {1: [], _COUNT: []}
    rounds = rounds_for(_WORK)
    for run in range(options.runs):
        for processes in turns(list(bare), run):
            bare[processes].append(bare_rate(processes, rounds, working // processes))
        for side in turns(list(_FLAGS), run):
            server.say(f"isolation: run {run + 1} of {options.runs}, {side}")
            work[side].append(_drained(server, side, "spin", working, rounds).cost.rate)
            noop[side].append(_drained(server, side, "sync_noop", count, None))
            arrivals[side].append(_latency(server, side, late, rate))
    streams = _streams(server)
    rates = {side: [one.cost.rate for one in several] for side, several in noop.items()}
    medians = {side: [one.median for one in several] for side, several in arrivals.items()}
    return Result(
        "isolation",
        f"{_COUNT} executors of one worker, against threads of one worker",
        [
            _figure(f"{_WORK * 1000:g} ms of Python each", work, Target.at_least(1.8)),
            compared(f"the same by {_COUNT} bare processes", "calls/s", bare[_COUNT], bare[1], against_name="one"),
            _figure("a handler that does nothing", rates, Target.at_least(0.4)),
            *_cpu_figures(noop),
            compared("latency, median", "ms", medians[EXECUTORS], medians[THREADS], None, against_name=THREADS),
            _later(medians),
            figure(f"change streams for {_MANY} executors", "", [float(streams)], Target.at_most(1, "value", "")),
        ],
        {"tasks": count, "working": working, "rate": rate, "runs": options.runs},
        samples=samples(arrivals),
        notes=[
            "Each executor has run a task before the measurement begins: its start takes about a second.",
            f"{_WORK * 1000:g} ms of Python are {rounds:,} rounds of a loop on both sides.",
        ],
    )


def _figure(name: str, rates: dict[str, list[float]], target: Target) -> Figure:
    return compared(name, "tasks/s", rates[EXECUTORS], rates[THREADS], target, against_name=THREADS)


def _later(medians: dict[str, list[float]]) -> Figure:
    more = [ours - theirs for ours, theirs in zip(medians[EXECUTORS], medians[THREADS], strict=True)]
    return Figure(
        "latency, median, more than in a thread",
        "ms",
        Spread.of(more),
        target=Target.at_most(3.0, "value", "ms"),
    )


def _drained(server: Server, side: str, name: str, count: int, params: Any) -> Warm:
    with server.scratch() as scratch:
        return drain_warm(server, scratch, name, count, params, _FLAGS[side], _COUNT)


def _cpu_figures(several: dict[str, list[Warm]]) -> list[Figure]:
    """Return the CPU a task of the worker, of its executors and of the server."""

    def against_threads(name: str, part: Callable[[Warm], float]) -> Figure:
        ours, theirs = ([part(one) for one in several[side]] for side in (EXECUTORS, THREADS))
        return compared(f"the same: CPU a task, {name}", "µs", ours, theirs, against_name=THREADS)

    return [
        against_threads("worker", lambda one: one.cost.client_us),
        against_threads("server", lambda one: one.cost.server_us),
        figure("the same: CPU a task, executors", "µs", [one.children_us for one in several[EXECUTORS]]),
    ]


def _latency(server: Server, side: str, count: int, rate: float) -> Arrivals:
    with server.scratch() as scratch, Fleet(server, scratch, more_flags=_FLAGS[side]) as fleet:
        return through_workers(server, scratch, fleet, count, rate, "run", "sync_note")


def _streams(server: Server) -> int:
    """Count the open change streams on the server for a worker whose executors have all started."""
    flags = ["--isolation", "process", "--executors", str(_MANY)]
    with server.scratch() as scratch, Fleet(server, scratch, more_flags=flags):
        start_executors(scratch, _MANY)
        return _open_streams(scratch)


def _open_streams(scratch: Scratch) -> int:
    every = {"$currentOp": {"allUsers": True, "idleCursors": True}}
    found = scratch.tasks.database.client.admin.aggregate([every, {"$match": {"ns": {"$regex": f"^{scratch.name}"}}}])
    streams = [one for one in found if "$changeStream" in str(one.get("cursor", one).get("originatingCommand", ""))]
    if not streams:
        raise NotMeasured("the server shows no change stream.")
    return len(streams)
