"""Draining a backlog: by the raw loop, and by workers; both timed by the documents, with the server's clock."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from pymongo import AsyncMongoClient

from benchmarks.measuring import raw
from benchmarks.measuring.counters import Cost, children_of, cpu_of
from benchmarks.measuring.fleet import APP, DEFAULT_CONCURRENCY, Claims, Fleet
from benchmarks.measuring.server import CHECK_INTERVAL, GUARANTEES, Meter, NotMeasured, Scratch, Server, wait_until
from mtask.kernel.document.rules import HORIZON

Document = dict[str, Any]
#: Runs something else while a backlog is drained.
Beside = Callable[[], AbstractContextManager[None]]
LABEL = "run"
#: The tasks of one call of `publish_many`: the server gives them one time.
_CALL = 1_000
#: Longest time of a drain, in seconds.
_PATIENCE = 900.0
#: Tasks that even a slow machine inserts in a second.
_SLOW_INSERTS = 5_000
#: The counters are read this many seconds before a backlog comes due.
_LEAD = 0.3


@dataclass(frozen=True, slots=True)
class Backlog:
    """Waiting tasks whose keys begin with `label/`."""

    name: str
    label: str
    ids: Sequence[str]


@dataclass(frozen=True, slots=True)
class Drained:
    """The cost of a drain, and the claims of its workers."""

    cost: Cost
    claims: Claims


@dataclass(frozen=True, slots=True)
class Warm:
    """The cost of a drain by a worker, and what the processes that it has started took beside it."""

    cost: Cost
    children_cpu: float  #: seconds

    @property
    def children_us(self) -> float:
        """CPU of these processes for each task, µs."""
        return self.children_cpu / self.cost.tasks * 1e6


def insert_backlog(
    scratch: Scratch,
    name: str,
    count: int,
    label: str = LABEL,
    params: Callable[[int], Any] = lambda _: None,
    delay: timedelta | None = None,
    options: Mapping[str, Any] | None = None,
) -> Backlog:
    """Insert `count` waiting tasks and flush them to disk. The delay counts from the database's `now`."""

    def documents() -> Iterator[Document]:
        for number in range(count):
            now = scratch.now + timedelta(milliseconds=number // _CALL)
            yield raw.document(name, f"{label}/{number:07}", now, params(number), delay, options)

    ids = raw.insert(scratch.tasks, documents())
    scratch.settle()
    return Backlog(name, label, ids)


@asynccontextmanager
async def bare_tasks(uri: str, database: str) -> AsyncIterator[raw.AsyncTasks]:
    """Return the collection for the bare loop, in a process that is ready: connected, and without garbage."""
    async with AsyncMongoClient[Document](uri, tz_aware=True) as client:
        await asyncio.gather(*(client.admin.command("ping") for _ in range(raw.IN_FLIGHT)))
        gc.collect()
        gc.freeze()
        yield client[database].get_collection("tasks", **GUARANTEES)


def drain_raw(
    server: Server,
    scratch: Scratch,
    backlog: Backlog,
    returned: raw.Returned | None = None,
    statements: raw.Statements = raw.SHORTEST,
    beside: Beside = nullcontext,
) -> Cost:
    """Drain it by the bare loop, within the context that `beside` opens."""

    async def go() -> Cost:
        async with bare_tasks(scratch.uri, scratch.name) as tasks:
            with beside(), server.metered() as meter:
                await raw.drain(tasks, backlog.ids, returned, statements)
        return cost_of(scratch, backlog, meter)

    return asyncio.run(go())


def drain_with(
    server: Server,
    scratch: Scratch,
    backlog: Backlog,
    beside: Beside = nullcontext,
    app: str = APP,
    flags: Sequence[str] = (),
    concurrency: int = DEFAULT_CONCURRENCY,
) -> Drained:
    """Drain it by a worker process that is ready, and starts to claim within the context that `beside` opens."""
    with Fleet(server, scratch, concurrency=concurrency, is_held_back=True, app=app, more_flags=flags) as fleet:
        before = fleet.claims()
        with beside(), server.metered(fleet.pids) as meter:
            fleet.release()
            _wait_drained(scratch, fleet, meter, len(backlog.ids))
        return Drained(cost_of(scratch, backlog, meter), fleet.claims() - before)


def drain_warm(
    server: Server, scratch: Scratch, name: str, count: int, params: Any, flags: Sequence[str], executors: int
) -> Warm:
    """Drain a backlog by a worker with these flags, whose executors have all run a task before."""
    with Fleet(server, scratch, more_flags=flags) as fleet:
        start_executors(scratch, executors)
        fleet.hold_back()
        backlog = insert_backlog(scratch, name, count, params=lambda _: params)
        children = [child for pid in fleet.pids for child in children_of(pid)]
        with server.metered(fleet.pids) as meter:
            before = cpu_of(children)
            fleet.release()
            _wait_drained(scratch, fleet, meter, count)
            after = cpu_of(children)
        return Warm(cost_of(scratch, backlog, meter), after - before)


def start_executors(scratch: Scratch, executors: int) -> None:
    """Have a worker run enough tasks at once that all of its executors start, and wait for their ends."""
    warm = insert_backlog(scratch, "sync_hold", 2 * executors, "warm", lambda _: 0.5)
    wait_until(lambda: scratch.span("sync_hold", "warm").succeeded == len(warm.ids), _PATIENCE, "executors started")


def drain_together(
    server: Server,
    scratch: Scratch,
    name: str,
    count: int,
    workers: int,
    insert: Callable[[timedelta], Backlog] | None = None,
    concurrency: int = DEFAULT_CONCURRENCY,
) -> Drained:
    """Drain a backlog that comes due at one instant by workers that are idle and know each other.

    None has a head start, and the change stream announces none of the tasks: they are due beyond its horizon. `insert`
    inserts another backlog than plain tasks, with this delay.
    """
    with Fleet(server, scratch, workers, concurrency=concurrency) as fleet:
        delay = scratch.age() + HORIZON + timedelta(seconds=1 + count / _SLOW_INSERTS)
        backlog = insert(delay) if insert else insert_backlog(scratch, name, count, delay=delay)
        before = fleet.claims()
        time.sleep(max(0.0, (delay - scratch.age()).total_seconds() - _LEAD))
        with server.metered(fleet.pids) as meter:
            time.sleep(_LEAD)
            _wait_drained(scratch, fleet, meter, count)
        return Drained(cost_of(scratch, backlog, meter), fleet.claims() - before)


def _wait_drained(scratch: Scratch, fleet: Fleet, meter: Meter, count: int) -> None:
    end = time.monotonic() + _PATIENCE
    while not meter.is_drained(scratch):
        fleet.check()
        if time.monotonic() > end:
            raise NotMeasured(f"{count:,} tasks were not done within {_PATIENCE:g} s.")
        time.sleep(CHECK_INTERVAL)


def cost_of(scratch: Scratch, backlog: Backlog, meter: Meter) -> Cost:
    """Return the cost of the drain; raise NotMeasured unless every task has succeeded."""
    span = scratch.span(backlog.name, backlog.label)
    if span.succeeded != len(backlog.ids):
        raise NotMeasured(f"{span.succeeded:,} of {len(backlog.ids):,} tasks succeeded, in {span.runs:,} runs.")
    return meter.cost(span.succeeded, span.seconds)
