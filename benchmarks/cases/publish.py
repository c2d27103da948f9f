"""publish: publish_many against insert_many, and single publishes against insert_one, sync and async."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

from pymongo import AsyncMongoClient, MongoClient

from benchmarks.measuring import raw
from benchmarks.measuring.counters import Cost, cost_figures, cpu_parts, total
from benchmarks.measuring.server import GUARANTEES, Scratch, Server
from benchmarks.options import Options
from benchmarks.report.figures import MTASK, RAW, Figure, Result, Target, turns
from mtask import AsyncClient, Client, TaskSpec

Document = dict[str, Any]
#: Prepares a number of tasks whose keys begin with the label; the function that it returns publishes them.
Act = Callable[[str, int], Callable[[], None]]

TASKS = 20_000
MANY = 1_000
SINGLE_SHARE = 20  #: tasks published in bulk for each single one
SINGLES_AT_ONCE = 50
AT_ONCE = 16
NAME = "noop"
_PARAMS = {"to": "someone@example.com", "subject": "hello", "order": 4711}
_BULK, _SINGLE = Target.at_least(0.85), Target.at_least(0.9)


def measure(server: Server, options: Options) -> Result:
    """Publish and insert into one collection, in turns of a few hundred ms."""
    count = options.tasks_or(TASKS)
    singles = max(1, count // SINGLE_SHARE)
    figures: list[Figure] = []
    cpu: dict[str, dict[str, float]] = {}
    kinds = (
        ("publish_many", _BULK, count, MANY, _many),
        ("publish, sync", _SINGLE, singles, SINGLES_AT_ONCE, _single),
        ("publish, async", _SINGLE, singles, SINGLES_AT_ONCE, _single_async),
        (f"publish, async, {AT_ONCE} at once", None, 4 * singles, 4 * SINGLES_AT_ONCE, _concurrent_async),
    )
    for name, target, tasks, part, sides in kinds:
        costs: dict[str, list[Cost]] = {RAW: [], MTASK: []}
        for run in range(options.runs):
            server.say(f"publish: run {run + 1} of {options.runs}, {name}")
            with server.scratch() as scratch, sides(scratch) as acts:
                for side, cost in in_parts(server, acts, tasks, part).items():
                    costs[side].append(cost)
        figures += cost_figures(name, costs[MTASK], costs[RAW], target)
        cpu |= {f"{side}: {name}": cpu_parts(found) for side, found in costs.items()}
    return Result(
        "publish",
        f"{count:,} tasks by publish_many in batches of {MANY:,}; {singles:,} one by one",
        figures,
        {"tasks": count, "batch": MANY, "singles": singles, "at_once": AT_ONCE, "runs": options.runs},
        cpu=cpu,
        notes=["TaskSpecs, and the documents of the raw side, are made beforehand: call is measured against call."],
    )


def in_parts(server: Server, acts: dict[str, Act], tasks: int, part: int) -> dict[str, Cost]:
    """Run both sides in small parts, in turn; return the total cost of each side."""
    costs: dict[str, list[Cost]] = {side: [] for side in acts}
    for side, act in acts.items():
        act(f"warm-{side}", min(part, tasks))()
    done = 0
    while done < tasks:
        size = min(part, tasks - done)
        for side in turns(list(acts), done // part):
            call = acts[side](f"{side}-{done}", size)
            with server.metered() as meter:
                call()
            costs[side].append(meter.cost(size))
        done += size
    return {side: total(found) for side, found in costs.items()}


def _keys(label: str, count: int) -> list[str]:
    return [f"{label}/{number}" for number in range(count)]


def _documents(scratch: Scratch, label: str, count: int) -> list[Document]:
    return [raw.document(NAME, key, scratch.now, dict(_PARAMS)) for key in _keys(label, count)]


@contextmanager
def _many(scratch: Scratch) -> Iterator[dict[str, Act]]:
    with (
        Client(scratch.uri, database=scratch.name) as client,
        MongoClient[Document](scratch.uri, tz_aware=True) as bare,
    ):
        tasks = bare[scratch.name].get_collection("tasks", **GUARANTEES)

        def insert(label: str, count: int) -> Callable[[], None]:
            documents = _documents(scratch, label, count)
            return lambda: _ignore(tasks.insert_many(documents, ordered=False))

        def publish(label: str, count: int) -> Callable[[], None]:
            specs = [TaskSpec(NAME, dict(_PARAMS), key=key) for key in _keys(label, count)]
            return lambda: _ignore(client.publish_many(specs))

        yield {RAW: insert, MTASK: publish}


@contextmanager
def _single(scratch: Scratch) -> Iterator[dict[str, Act]]:
    with (
        Client(scratch.uri, database=scratch.name) as client,
        MongoClient[Document](scratch.uri, tz_aware=True) as bare,
    ):
        tasks = bare[scratch.name].get_collection("tasks", **GUARANTEES)

        def insert(label: str, count: int) -> Callable[[], None]:
            documents = _documents(scratch, label, count)

            def call() -> None:
                for made in documents:
                    tasks.insert_one(made)

            return call

        def publish(label: str, count: int) -> Callable[[], None]:
            keys = _keys(label, count)

            def call() -> None:
                for key in keys:
                    client.publish(NAME, _PARAMS, key=key)

            return call

        yield {RAW: insert, MTASK: publish}


@contextmanager
def _single_async(scratch: Scratch) -> Iterator[dict[str, Act]]:
    with _async_sides(scratch, 1) as acts:
        yield acts


@contextmanager
def _concurrent_async(scratch: Scratch) -> Iterator[dict[str, Act]]:
    with _async_sides(scratch, AT_ONCE) as acts:
        yield acts


@contextmanager
def _async_sides(scratch: Scratch, at_once: int) -> Iterator[dict[str, Act]]:
    """Give both sides on one event loop, each with `at_once` concurrent calls."""
    with asyncio.Runner() as runner:

        async def connect() -> tuple[AsyncClient, AsyncMongoClient[Document]]:
            client = AsyncClient(scratch.uri, database=scratch.name)
            return client, AsyncMongoClient[Document](scratch.uri, tz_aware=True)

        client, bare = runner.run(connect())
        tasks = bare[scratch.name].get_collection("tasks", **GUARANTEES)

        def insert(label: str, count: int) -> Callable[[], None]:
            documents = iter(_documents(scratch, label, count))

            async def lane() -> None:
                for made in documents:
                    await tasks.insert_one(made)

            return lambda: runner.run(lanes(lane, at_once))

        def publish(label: str, count: int) -> Callable[[], None]:
            keys = iter(_keys(label, count))

            async def lane() -> None:
                for key in keys:
                    await client.publish(NAME, _PARAMS, key=key)

            return lambda: runner.run(lanes(lane, at_once))

        try:
            yield {RAW: insert, MTASK: publish}
        finally:
            runner.run(client.close())
            runner.run(bare.close())


async def lanes(lane: Callable[[], Coroutine[Any, Any, None]], at_once: int) -> None:
    async with asyncio.TaskGroup() as group:
        for _ in range(at_once):
            group.create_task(lane())


def _ignore(_: object) -> None:
    """Discard a result."""
