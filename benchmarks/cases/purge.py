"""purge: what a purge of many finished tasks does to the claims of a worker beside it."""

from __future__ import annotations

import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path

from benchmarks.cases.backlog import fill
from benchmarks.measuring.counters import Cost, cpu_parts
from benchmarks.measuring.draining import drain_raw, drain_with, lay_in
from benchmarks.measuring.fleet import Process
from benchmarks.measuring.server import Ground, Place, wait_until
from benchmarks.options import Options
from benchmarks.report.figures import Result, Target, compared, figure, turns

TASKS = 20_000
ALONE, BESIDE = "alone", "beside a purge"
RAW_ALONE, RAW_BESIDE = "raw, alone", "raw, beside a purge"
#: The tasks that are purged have another name than those that are drained.
_OLD = "old"
#: Claims are no more than a fifth slower.
_RATE = Target.at_least(0.8)
_PATIENCE = 60.0


def measure(place: Place, options: Options) -> Result:
    """Drain a backlog among finished tasks, by a worker and by the raw loop, while they lie still and while they go."""
    count = options.tasks_or(TASKS)
    costs: dict[str, list[Cost]] = {side: [] for side in (RAW_ALONE, RAW_BESIDE, ALONE, BESIDE)}
    removed: list[float] = []
    for run in range(options.runs):
        for side in turns(list(costs), run):
            place.say(f"purge: run {run + 1} of {options.runs}, {side}")
            with place.fresh() as ground:
                fill(ground, options.purged, 0, _OLD)
                backlog = lay_in(ground, "noop", count)
                beside = partial(_purging, place, ground) if side in (BESIDE, RAW_BESIDE) else nullcontext
                if side in (RAW_ALONE, RAW_BESIDE):
                    costs[side].append(drain_raw(place, ground, backlog, beside=beside))
                else:
                    costs[side].append(drain_with(place, ground, backlog, beside).cost)
                if side == BESIDE:
                    removed.append(100 * (1 - _left(ground) / options.purged))
    rates = {side: [cost.rate for cost in found] for side, found in costs.items()}
    return Result(
        "purge",
        f"{count:,} waiting tasks, beside `mtask purge` of {options.purged:,} finished ones",
        [
            compared("drain, beside a purge", "tasks/s", rates[BESIDE], rates[ALONE], _RATE, against_name=ALONE),
            compared("raw drain, beside a purge", "tasks/s", rates[RAW_BESIDE], rates[RAW_ALONE], against_name=ALONE),
            figure("removed when the drain was done", "%", removed),
        ],
        {"tasks": count, "purged": options.purged, "runs": options.runs},
        cpu={side: cpu_parts(found) for side, found in costs.items()},
        notes=["The server's CPU beside a purge is that of both.", "What raw loses is what the deletes cost."],
    )


@contextmanager
def _purging(place: Place, ground: Ground) -> Iterator[None]:
    """Have `mtask purge` at work in a process of its own, from its first batch on; it is ended with the block."""
    whole = _left(ground)
    folder = Path(tempfile.mkdtemp(dir=place.folder))
    where = ["--uri", ground.uri, "--database", ground.name]
    purge = Process("purge", folder, "mtask.cli.main", *where, "purge", "--name", _OLD, "--yes")
    try:
        wait_until(lambda: _left(ground) < whole, _PATIENCE, "the purge's first batch", interval=0.05)
        yield
    finally:
        purge.send(signal.SIGTERM)
        purge.end()


def _left(ground: Ground) -> int:
    return ground.tasks.count_documents({"_id": {"$gte": f"{_OLD}:", "$lt": f"{_OLD};"}})
