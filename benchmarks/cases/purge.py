"""purge: the claims of a worker during a purge of many finished tasks."""

from __future__ import annotations

import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path

from benchmarks.cases.backlog import fill
from benchmarks.measuring.counters import Cost, cpu_parts
from benchmarks.measuring.draining import drain_raw, drain_with, insert_backlog
from benchmarks.measuring.fleet import Process
from benchmarks.measuring.server import Scratch, Server, wait_until
from benchmarks.options import Options
from benchmarks.report.figures import Result, Target, compared, figure, turns

TASKS = 20_000
ALONE, BESIDE = "alone", "beside a purge"
RAW_ALONE, RAW_BESIDE = "raw, alone", "raw, beside a purge"
#: The tasks that are purged have another name than those that are drained.
_OLD = "old"
#: At most a fifth slower.
_RATE = Target.at_least(0.8)
_PATIENCE = 60.0


def measure(server: Server, options: Options) -> Result:
    """Drain a backlog by a worker and by the raw loop, with and without a purge of the finished tasks around it."""
    count = options.tasks_or(TASKS)
    costs: dict[str, list[Cost]] = {side: [] for side in (RAW_ALONE, RAW_BESIDE, ALONE, BESIDE)}
    removed: list[float] = []
    for run in range(options.runs):
        for side in turns(list(costs), run):
            server.say(f"purge: run {run + 1} of {options.runs}, {side}")
            with server.scratch() as scratch:
                fill(scratch, options.purged, 0, _OLD)
                backlog = insert_backlog(scratch, "noop", count)
                beside = partial(_purging, server, scratch) if side in (BESIDE, RAW_BESIDE) else nullcontext
                if side in (RAW_ALONE, RAW_BESIDE):
                    costs[side].append(drain_raw(server, scratch, backlog, beside=beside))
                else:
                    costs[side].append(drain_with(server, scratch, backlog, beside).cost)
                if side == BESIDE:
                    removed.append(100 * (1 - _left(scratch) / options.purged))
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
        notes=[
            "The server's CPU beside a purge includes the deletes.",
            "The loss of the raw drain is the cost of the deletes.",
        ],
    )


@contextmanager
def _purging(server: Server, scratch: Scratch) -> Iterator[None]:
    """Run `mtask purge` in a process of its own: the block starts after its first batch and ends it."""
    whole = _left(scratch)
    folder = Path(tempfile.mkdtemp(dir=server.folder))
    where = ["--uri", scratch.uri, "--database", scratch.name]
    purge = Process("purge", folder, "mtask.cli.main", *where, "purge", "--name", _OLD, "--yes")
    try:
        wait_until(lambda: _left(scratch) < whole, _PATIENCE, "the purge's first batch", interval=0.05)
        yield
    finally:
        purge.send(signal.SIGTERM)
        purge.end()


def _left(scratch: Scratch) -> int:
    return scratch.tasks.count_documents({"_id": {"$gte": f"{_OLD}:", "$lt": f"{_OLD};"}})
