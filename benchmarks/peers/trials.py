"""The measurements of one peer: drain and publish, latency and idle cost, and what survives a kill."""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from benchmarks.measuring.server import NotMeasured, wait_until
from benchmarks.peers import lines
from benchmarks.peers.catalogue import Peer
from benchmarks.peers.processes import Program, WorkerProcess
from benchmarks.peers.servers import PeerServer

RATE = 50.0
#: Seconds of a lease in a drain with the lasting setting. It is longer than a drain, as in production.
KEPT_LEASE = 60
#: This share of a drain's tasks warms the worker up and is not counted.
_WARM_SHARE = 0.1
#: Numbers of tasks that only warm up; others begin at 0.
_WARM_UP = 1_000_000
_START_PATIENCE = 60.0
#: A worker that has started nothing for this many seconds has nothing more to do.
_QUIET_PATIENCE = 15.0
#: Seconds that are given to the writes that follow a drain's last handler.
_AFTER = 0.3
#: Seconds until the traces of earlier work have gone, and the least time for which an idle worker is watched. Some ask
#: more often for 5 s after the last task.
_CALM, _IDLE = 6.0, 5.0
#: Tasks, their time in ms, and the starts after which their worker is killed.
KILL_TASKS, _HOLD_MS, _KILL_AFTER = 24, 400, 6
_SERVER_HOLD_MS = 1
_MICRO = 1e6


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of one run."""

    tasks: int
    #: Seconds after which a slow drain is cut off; its pace counts as far as it came.
    longest: float
    #: Seconds of the paced publishing. An idle worker is watched as long, 5 s at least.
    window: float
    #: Seconds that are waited for tasks of a killed worker or server.
    patience: float
    #: Seconds of a lease in the lasting setting.
    lease: int


class Bench:
    """One peer on one server."""

    def __init__(self, peer: Peer, server: PeerServer, build: Path, scratch: Path) -> None:
        self.peer = peer
        self.server = server
        self._build = build
        self._scratch = scratch

    @contextmanager
    def opened(self, trial: str, lease: int | None = None) -> Iterator[Program]:
        """Open the peer on an empty database, with a folder of its own, for the trial of this name."""
        folder = Path(tempfile.mkdtemp(prefix=f"{self.peer.name}-", dir=self._scratch))
        uri = self.server.fresh()
        try:
            yield self.peer.open(self._build, folder, uri, lease, trial)
        finally:
            with suppress(NotMeasured):
                self.server.drop(uri)


@dataclass(frozen=True, slots=True)
class Drain:
    """The pace of a drain, and of publishing before it."""

    rate: float
    worker_us: float
    server_us: float
    bulk_rate: float
    single_rate: float


def drain(bench: Bench, sizes: Sizes, lease: int | None = None) -> Drain:
    """Publish tasks, start a worker on them, and measure from the tenth part of them on.

    `lease`: the seconds of a lease of the lasting setting. None: the usual setting.
    """
    single = max(10, sizes.tasks // 10)
    with bench.opened("drain", lease) as program:
        # First, because publishers of later tasks find their tables, indexes and scripts.
        alone = program.publish("single", single, first=_WARM_UP, bound=sizes.longest)
        bulk = program.publish("bulk", sizes.tasks, bound=sizes.longest)
        total = int(alone["count"]) + int(bulk["count"])
        with program.worker() as worker:
            warm = max(1, int(total * _WARM_SHARE))
            _wait(worker, lambda: program.count() >= warm, _START_PATIENCE, "its first tasks")
            done = program.count()
            cpu, server = worker.cpu(), bench.server.cpu()
            end = time.monotonic() + sizes.longest
            while program.count() < total and time.monotonic() < end:
                worker.check()
                time.sleep(0.02)
            is_cut = program.count() < total
            if not is_cut:
                time.sleep(_AFTER)
            cpu, server = worker.cpu() - cpu, bench.server.cpu() - server
            begun = lines.starts(program.notes())
        counted = len(begun) - done
    return Drain(
        lines.pace(begun, warm),
        # So few tasks that all were done when the counters were first read cost nothing that could be told.
        cpu / counted * _MICRO if counted > 0 else math.nan,
        server / counted * _MICRO if counted > 0 else math.nan,
        bulk["count"] / bulk["seconds"] if bulk["is_bulk"] else math.nan,
        alone["count"] / alone["seconds"],
    )


@dataclass(frozen=True, slots=True)
class Quiet:
    """Latency at a steady rate, and the cost of waiting."""

    median: float
    p99: float
    idle_worker: float  #: of one core, %
    idle_server: float  #: of one core, %
    commands: float  #: a second


def latency_and_idle(bench: Bench, sizes: Sizes) -> Quiet:
    """Publish at a steady rate to a worker that waits; then watch it wait."""
    with bench.opened("latency") as program:
        # Before the worker starts: otherwise both may make the same tables at once.
        program.publish("single", 5, first=_WARM_UP)
        with program.worker() as worker:
            return _waiting(bench, program, worker, sizes)


def _waiting(bench: Bench, program: Program, worker: WorkerProcess, sizes: Sizes) -> Quiet:
    _wait(worker, lambda: program.count() >= 5, _START_PATIENCE, "its first tasks")
    count = max(10, int(RATE * sizes.window))
    program.publish("paced", count, bound=RATE)
    _wait(worker, lambda: program.count() >= count + 5, _START_PATIENCE, "the paced tasks")
    begun = [note for note in lines.starts(program.notes()) if note.number < _WARM_UP]
    median, p99 = lines.median_and_p99(lines.latencies(begun))
    time.sleep(_CALM)
    cpu, server, commands = worker.cpu(), bench.server.cpu(), bench.server.commands()
    began = time.monotonic()
    time.sleep(max(sizes.window, _IDLE))
    seconds = time.monotonic() - began
    worker.check()
    return Quiet(
        median,
        p99,
        100 * (worker.cpu() - cpu) / seconds,
        100 * (bench.server.cpu() - server) / seconds,
        (bench.server.commands() - commands) / seconds,
    )


def kill_worker(bench: Bench, sizes: Sizes, *, is_lasting: bool) -> lines.Survival:
    """Kill a worker amid its tasks, start another one at once, and wait for all tasks or for `patience` seconds."""
    lease = bench.peer.lease(sizes.lease) if is_lasting else None
    with bench.opened("kill", lease) as program:
        program.publish("bulk", KILL_TASKS, hold_ms=_HOLD_MS)
        with program.worker() as worker:
            _wait(
                worker,
                lambda: len(lines.starts(program.notes())) >= _KILL_AFTER,
                _START_PATIENCE,
                "its first tasks",
            )
            time.sleep(_HOLD_MS / 3_000)  # amid the tasks that have begun last
            worker.kill()
            killed_at = time.monotonic_ns()
        with program.worker() as worker:
            patience = sizes.patience + (lease or 0)
            end = time.monotonic() + patience
            while time.monotonic() < end:
                worker.check()
                found = lines.survival(program.notes(), KILL_TASKS, killed_at)
                if found.done == KILL_TASKS:
                    break
                time.sleep(0.1)
            time.sleep(_AFTER)
        return lines.survival(program.notes(), KILL_TASKS, killed_at)


def kill_server(bench: Bench, sizes: Sizes) -> lines.Survival:
    """Publish tasks, kill the server when the last call has returned, start it again, and see which tasks run."""
    count = max(10, sizes.tasks // 10)
    with bench.opened("kill") as program:
        program.publish("single", count, hold_ms=_SERVER_HOLD_MS)
        killed_at = time.monotonic_ns()
        bench.server.kill()
        bench.server.start()
        with program.worker():
            end = time.monotonic() + sizes.patience
            quiet_since, known = time.monotonic(), 0
            while program.count() < 2 * count and time.monotonic() < end:
                time.sleep(0.1)
                if program.count() != known:
                    quiet_since, known = time.monotonic(), program.count()
                elif time.monotonic() - quiet_since > _QUIET_PATIENCE:
                    break  # no start for a while: what is still missing is gone
        return lines.survival(program.notes(), count, killed_at)


def _wait(worker: WorkerProcess, condition: Callable[[], bool], patience: float, what: str) -> None:
    def is_there() -> bool:
        worker.check()
        return condition()

    try:
        wait_until(is_there, patience, what, interval=0.005)
    except NotMeasured as error:
        raise NotMeasured(f"{error} The end of its log: {worker.log()}") from None
