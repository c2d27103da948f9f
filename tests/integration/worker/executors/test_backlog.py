"""A backlog of isolated handlers holds up no other task, and the other way round."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from datetime import timedelta
from pathlib import Path
from time import monotonic

import pytest

from mtask import AsyncClient, TaskSpec
from mtask.store.driver.stores import SyncStore
from mtask.store.tasks import claims
from mtask.worker import assembly
from mtask.worker.discovery import scans
from tests.integration.worker.executors.bench import Isolated, isolating
from tests.mongo import Client as Mongo
from tests.mongo import until

CAPACITY = 20
MANY = 4 * CAPACITY

Backlogged = Callable[[], AbstractAsyncContextManager[Isolated]]


@pytest.fixture
def backlogged(
    mongo_uri: str, database_name: str, mongo: Mongo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Backlogged:
    """Give a worker with one executor, beside a backlog of 80 tasks for it that are due first, and 80 others.

    The worker's queue holds 20 tasks. After its first scan, only refills bring more.
    """
    monkeypatch.setattr(assembly, "_QUEUE_CAPACITY", CAPACITY)
    monkeypatch.setattr(scans, "HORIZON", timedelta(hours=1))

    @asynccontextmanager
    async def begun() -> AsyncIterator[Isolated]:
        params = {"folder": str(tmp_path)}
        async with AsyncClient(mongo_uri, database=database_name) as client:
            await client.publish_many([TaskSpec("hold", params, key=f"{number}") for number in range(MANY)])
            await client.publish_many([TaskSpec("here", key=f"{number}") for number in range(MANY)])
        async with isolating(mongo_uri, database_name, mongo, tmp_path, count=1, concurrency=2) as it:
            yield it

    return begun


def done(it: Isolated, name: str) -> int:
    return it.bench.tasks.count_documents({"name": name, "task_state.status": "SUCCESS"})


def test_tasks_behind_more_isolated_ones_than_the_queue_holds_all_run(backlogged: Backlogged) -> None:
    async def scenario() -> None:
        async with backlogged() as it:
            await until(lambda: done(it, "here") == MANY, message="all others ended while one was held")
            assert done(it, "hold") == 0
            late = await it.publish("here", "late")
            await it.ended(late, "SUCCESS")

    asyncio.run(scenario())


def test_isolated_tasks_go_on_after_those_that_the_queue_held(backlogged: Backlogged) -> None:
    async def scenario() -> None:
        async with backlogged() as it:
            it.open_gate()
            await until(lambda: done(it, "hold") == MANY, message="all that run in the executor ended")
            await until(lambda: done(it, "here") == MANY, message="all others ended")

    asyncio.run(scenario())


def test_begun_task_is_found_behind_more_isolated_ones_than_the_queue_holds(
    backlogged: Backlogged, store: SyncStore
) -> None:
    async def scenario() -> None:
        async with backlogged() as it:
            await until(lambda: done(it, "here") == MANY, message="all others ended while one was held")
            it.bench.stop_stream()
            task_id, scans = f"hold:{MANY - 1}", it.bench.worker.parts.scans
            assert len(store.run(claims.claim([task_id], "dead", "its run", are_simple=False))) == 1
            scans.ask_full()
            leases = scans._lookups._questions.due._times
            await until(lambda: task_id in leases, message="it is looked up when the lease lapses")

    asyncio.run(scenario())


def test_tasks_beside_isolated_ones_are_not_looked_for_again_at_once_if_all_are_known(backlogged: Backlogged) -> None:
    async def scenario() -> None:
        async with backlogged() as it:
            await until(lambda: done(it, "here") == MANY, message="all others ended while one was held")
            it.bench.stop_scans()
            batches, queue = it.bench.worker.parts.scans._batches, it.bench.worker.parts.queue
            for pause, queries in ((0, 2), (60, 1)):
                batches._next_beside, before = monotonic() + pause, batches.count
                assert not await batches.scan_all(is_refill=False)
                assert batches.count - before == queries
                assert queue.has_more == (pause > 0), "a later refill looks again"

    asyncio.run(scenario())
