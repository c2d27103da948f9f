"""Latency: tasks are published at a steady rate; measured is the time from each call to its handler's start."""

from __future__ import annotations

import asyncio
import math
import signal
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pymongo import AsyncMongoClient

from benchmarks.measuring import raw
from benchmarks.measuring.app import starts_in
from benchmarks.measuring.chain import READY
from benchmarks.measuring.counters import Cost
from benchmarks.measuring.fleet import Fleet, Process
from benchmarks.measuring.server import GUARANTEES, NotMeasured, Scratch, Server, wait_quiet, wait_until
from benchmarks.report.figures import quantile
from mtask import AsyncClient

Document = dict[str, Any]
Publish = Callable[[str], Awaitable[None]]
Starts = Callable[[], Mapping[str, float]]

NAME = "note"
_WARM_UP = 10
_PATIENCE = 30.0
#: Seconds between the warm-up and the first measured call.
_PAUSE = 0.5


@dataclass(frozen=True, slots=True)
class Arrivals:
    """The latency of each task from the call to its start, in ms, and the cost to the server and the taker."""

    latencies: Sequence[float]
    cost: Cost

    @property
    def median(self) -> float:
        """Half of them took no longer, in ms."""
        return quantile(self.latencies, 0.5)

    @property
    def p99(self) -> float:
        """All but one in a hundred took no longer, in ms."""
        return quantile(self.latencies, 0.99)


class Chain:
    """The raw taker: a process that follows the change stream."""

    def __init__(self, server: Server, scratch: Scratch) -> None:
        self.folder = Path(tempfile.mkdtemp(dir=server.folder))
        self._process = Process("chain", self.folder, "benchmarks.measuring.chain", scratch.uri, scratch.name)

    @contextmanager
    def ready(self) -> Iterator[Chain]:
        """Wait until it follows, and end it after the block."""
        try:
            wait_until(self._is_ready, 60.0, "the change stream of the raw chain")
            wait_quiet([self._process.pid])
            yield self
        finally:
            self._process.send(signal.SIGTERM)
            self._process.end()

    @property
    def pids(self) -> list[int]:
        """The process."""
        return [self._process.pid]

    def starts(self) -> dict[str, float]:
        """Return when the tasks were taken, by key."""
        return starts_in(self.folder)

    def _is_ready(self) -> bool:
        self._process.check()
        return (self.folder / READY).exists()


def through_chain(server: Server, scratch: Scratch, count: int, rate: float, label: str) -> Arrivals:
    """Insert bare documents at this rate, and have the raw chain take them."""
    chain = Chain(server, scratch)

    async def go() -> Arrivals:
        async with AsyncMongoClient[Document](scratch.uri, tz_aware=True) as client:
            tasks = client[scratch.name].get_collection("tasks", **GUARANTEES)

            async def insert(made: Document) -> None:
                await tasks.insert_one(made)

            def prepare(key: str) -> Callable[[], Awaitable[None]]:
                made = raw.document(NAME, key, scratch.now)  # made beforehand: only the insert is measured
                return lambda: insert(made)

            return await _measured(server, chain.pids, chain.starts, prepare, count, rate, label)

    with chain.ready():
        return asyncio.run(go())


def through_workers(
    server: Server, scratch: Scratch, fleet: Fleet, count: int, rate: float, label: str, name: str = NAME
) -> Arrivals:
    """Publish at this rate, and have idle workers take the tasks."""

    async def go() -> Arrivals:
        async with AsyncClient(scratch.uri, database=scratch.name) as client:

            async def publish(key: str) -> None:
                await client.publish(name, key=key)

            def prepare(key: str) -> Callable[[], Awaitable[None]]:
                return lambda: publish(key)

            return await _measured(server, fleet.pids, fleet.starts, prepare, count, rate, label)

    arrivals = asyncio.run(go())
    fleet.check()
    return arrivals


async def _measured(
    server: Server,
    pids: Sequence[int],
    starts: Starts,
    prepare: Callable[[str], Callable[[], Awaitable[None]]],
    count: int,
    rate: float,
    label: str,
) -> Arrivals:
    """Publish a few tasks to warm up, then `count` tasks; wait until all have started."""
    warm = await _publish(prepare, [f"{label}-warm/{number}" for number in range(_WARM_UP)], rate)
    await _all_started(starts, warm)
    await asyncio.sleep(_PAUSE)
    keys = [f"{label}/{number:06}" for number in range(count)]
    with server.metered(pids) as meter:
        called = await _publish(prepare, keys, rate)
        started = await _all_started(starts, called)
    return Arrivals(latencies(called, started), meter.cost(count))


async def _publish(
    prepare: Callable[[str], Callable[[], Awaitable[None]]], keys: Sequence[str], rate: float
) -> dict[str, float]:
    """Make the calls at their times, whether or not the earlier ones have returned; return when each was made."""
    called: dict[str, float] = {}

    async def call(key: str, publish: Callable[[], Awaitable[None]]) -> None:
        called[key] = time.monotonic()
        await publish()

    began = time.monotonic()
    async with asyncio.TaskGroup() as calls:
        for number, key in enumerate(keys):
            ready = prepare(key)
            await asyncio.sleep(max(0.0, began + number / rate - time.monotonic()))
            calls.create_task(call(key, ready))
    return called


async def _all_started(starts: Starts, called: Mapping[str, float]) -> Mapping[str, float]:
    end = time.monotonic() + _PATIENCE
    while True:
        started = starts()
        missing = [key for key in called if key not in started]
        if not missing:
            return started
        if time.monotonic() > end:
            raise NotMeasured(f"{len(missing)} of {len(called)} tasks did not start within {_PATIENCE:g} s.")
        await asyncio.sleep(0.1)


def latencies(called: Mapping[str, float], started: Mapping[str, float]) -> list[float]:
    """Return the time from each call to the start, in ms; NaN for a task that did not start."""
    return [(started.get(key, math.nan) - moment) * 1000 for key, moment in called.items()]
