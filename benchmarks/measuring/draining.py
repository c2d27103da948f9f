"""Draining a backlog: by the raw loop, and by workers; both timed by the documents, with the server's clock."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from pymongo import AsyncMongoClient

from benchmarks.measuring import raw
from benchmarks.measuring.counters import Cost
from benchmarks.measuring.fleet import Claims, Fleet
from benchmarks.measuring.server import GUARANTEES, LOOK_INTERVAL, Ground, Meter, NotMeasured, Place
from mtask.model.rules import HORIZON

Document = dict[str, Any]
#: Gives what goes on while a backlog is drained.
Beside = Callable[[], AbstractContextManager[None]]
LABEL = "run"
#: How long a drain may take, in seconds.
_PATIENCE = 900.0
#: Tasks that are inserted in a second, if it goes slowly.
_SLOW_INSERTS = 5_000
#: The counters are read so long before a backlog comes due, in seconds.
_LEAD = 0.3


@dataclass(frozen=True, slots=True)
class Backlog:
    """Tasks that wait, under keys that begin with `label/`."""

    name: str
    label: str
    ids: Sequence[str]


@dataclass(frozen=True, slots=True)
class Drained:
    """What a drain cost, and the claims of the workers that did it."""

    cost: Cost
    claims: Claims


def lay_in(
    ground: Ground,
    name: str,
    count: int,
    label: str = LABEL,
    params: Callable[[int], Any] = lambda _: None,
    delay: timedelta | None = None,
) -> Backlog:
    """Insert so many waiting tasks, and have the server write them down. The delay counts from the ground's `now`."""

    def documents() -> Iterator[Document]:
        for number in range(count):
            yield raw.document(name, f"{label}/{number:07}", ground.now, params(number), delay)

    ids = raw.insert(ground.tasks, documents())
    ground.settle()
    return Backlog(name, label, ids)


def drain_raw(
    place: Place,
    ground: Ground,
    backlog: Backlog,
    returned: raw.Returned | None = None,
    statements: raw.Statements = raw.SHORTEST,
    beside: Beside = nullcontext,
) -> Cost:
    """Drain it by the bare loop, inside of `beside`."""

    async def go() -> Cost:
        async with AsyncMongoClient[Document](ground.uri, tz_aware=True) as client:
            tasks = client[ground.name].get_collection("tasks", **GUARANTEES)
            await asyncio.gather(*(client.admin.command("ping") for _ in range(raw.IN_FLIGHT)))
            gc.collect()
            gc.freeze()
            with beside(), place.metered() as meter:
                await raw.drain(tasks, backlog.ids, returned, statements)
        return _cost(ground, backlog, meter)

    return asyncio.run(go())


def drain_with(place: Place, ground: Ground, backlog: Backlog, beside: Beside = nullcontext) -> Drained:
    """Drain it by a worker process that is started, ready and then, inside of `beside`, let go."""
    with Fleet(place, ground, is_held_back=True) as fleet:
        before = fleet.claims()
        with beside(), place.metered(fleet.pids) as meter:
            fleet.release()
            _wait_drained(ground, fleet, meter, len(backlog.ids))
        return Drained(_cost(ground, backlog, meter), fleet.claims() - before)


def drain_together(place: Place, ground: Ground, name: str, count: int, workers: int) -> Drained:
    """Drain a backlog that comes due at one instant by workers that are idle and know each other.

    None has a head start, and none is told of the tasks one by one: they lie beyond what the stream brings.
    """
    with Fleet(place, ground, workers) as fleet:
        delay = ground.age() + HORIZON + timedelta(seconds=1 + count / _SLOW_INSERTS)
        backlog = lay_in(ground, name, count, delay=delay)
        before = fleet.claims()
        time.sleep(max(0.0, (delay - ground.age()).total_seconds() - _LEAD))
        with place.metered(fleet.pids) as meter:
            time.sleep(_LEAD)
            _wait_drained(ground, fleet, meter, count)
        return Drained(_cost(ground, backlog, meter), fleet.claims() - before)


def _wait_drained(ground: Ground, fleet: Fleet, meter: Meter, count: int) -> None:
    end = time.monotonic() + _PATIENCE
    while not meter.look(ground):
        fleet.check()
        if time.monotonic() > end:
            raise NotMeasured(f"{count:,} tasks were not done within {_PATIENCE:g} s.")
        time.sleep(LOOK_INTERVAL)


def _cost(ground: Ground, backlog: Backlog, meter: Meter) -> Cost:
    """Return what the drain cost; raise NotMeasured unless every task has succeeded."""
    span = ground.span(backlog.name, backlog.label)
    if span.succeeded != len(backlog.ids):
        raise NotMeasured(f"{span.succeeded:,} of {len(backlog.ids):,} tasks succeeded, in {span.runs:,} runs.")
    return meter.cost(span.succeeded, span.seconds)
