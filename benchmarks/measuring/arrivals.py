"""Latency: tasks published at a steady rate, and how long after the call each one's handler starts."""

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
from benchmarks.measuring.server import GUARANTEES, Ground, NotMeasured, Place, wait_quiet, wait_until
from benchmarks.report.figures import quantile
from mtask import AsyncClient

Document = dict[str, Any]
Publish = Callable[[str], Awaitable[None]]
Starts = Callable[[], Mapping[str, float]]

NAME = "note"
_WARM_UP = 10
_PATIENCE = 30.0
#: After the connections are made and before the first call that counts, in seconds.
_PAUSE = 0.5


@dataclass(frozen=True, slots=True)
class Arrivals:
    """How long each task took from the call to its start, in ms; and what it cost the server and the taker."""

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
    """The raw taker: a process that follows the change stream. A context manager, in which it is ready."""

    def __init__(self, place: Place, ground: Ground) -> None:
        self.folder = Path(tempfile.mkdtemp(dir=place.folder))
        self._process = Process("chain", self.folder, "benchmarks.measuring.chain", ground.uri, ground.name)

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


def through_chain(place: Place, ground: Ground, count: int, rate: float, label: str) -> Arrivals:
    """Insert bare documents at this rate, and have the raw chain take them."""
    chain = Chain(place, ground)

    async def go() -> Arrivals:
        async with AsyncMongoClient[Document](ground.uri, tz_aware=True) as client:
            tasks = client[ground.name].get_collection("tasks", **GUARANTEES)

            async def insert(made: Document) -> None:
                await tasks.insert_one(made)

            def prepare(key: str) -> Callable[[], Awaitable[None]]:
                made = raw.document(NAME, key, ground.now)  # bare: what it takes to make it is not counted
                return lambda: insert(made)

            return await _measured(place, chain.pids, chain.starts, prepare, count, rate, label)

    with chain.ready():
        return asyncio.run(go())


def through_workers(place: Place, ground: Ground, fleet: Fleet, count: int, rate: float, label: str) -> Arrivals:
    """Publish at this rate, and have idle workers take the tasks."""

    async def go() -> Arrivals:
        async with AsyncClient(ground.uri, database=ground.name) as client:

            async def publish(key: str) -> None:
                await client.publish(NAME, key=key)

            def prepare(key: str) -> Callable[[], Awaitable[None]]:
                return lambda: publish(key)

            return await _measured(place, fleet.pids, fleet.starts, prepare, count, rate, label)

    arrivals = asyncio.run(go())
    fleet.check()
    return arrivals


async def _measured(
    place: Place,
    pids: Sequence[int],
    starts: Starts,
    prepare: Callable[[str], Callable[[], Awaitable[None]]],
    count: int,
    rate: float,
    label: str,
) -> Arrivals:
    """Publish some to warm up, then as many as count; wait until all have started."""
    warm = await _publish(prepare, [f"{label}-warm/{number}" for number in range(_WARM_UP)], rate)
    await _all_started(starts, warm)
    await asyncio.sleep(_PAUSE)
    keys = [f"{label}/{number:06}" for number in range(count)]
    with place.metered(pids) as meter:
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
    """Return from each call how long it took to the start, in ms; NaN for what did not start."""
    return [(started.get(key, math.nan) - moment) * 1000 for key, moment in called.items()]
