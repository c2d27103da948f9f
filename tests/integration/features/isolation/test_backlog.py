"""A backlog of isolated handlers holds up no other task, and the other way round."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from datetime import timedelta
from pathlib import Path
from time import monotonic
from typing import Any

import pytest

from mtask import AsyncClient, TaskSpec
from mtask.errors import DatabaseUnavailable
from mtask.kernel.driver.operation import Operation
from mtask.kernel.driver.stores import SyncStore
from mtask.kernel.operations import claim as claims
from mtask.kernel.operations import find_due as finding
from mtask.kernel.worker.discovery import fetch as batches_of
from mtask.kernel.worker.discovery import fetch_loop as scans
from tests.integration.features.isolation.bench import Isolated, Isolating
from tests.integration.worker_harness import set_queue_capacity
from tests.mongo import until

CAPACITY = 20
MANY = 4 * CAPACITY

Backlogged = Callable[[], AbstractAsyncContextManager[Isolated]]


@pytest.fixture
def backlogged(
    isolating: Isolating, mongo_uri: str, database_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Backlogged:
    """Give a worker with one executor, beside a backlog of 80 tasks for it that are due first, and 80 others.

    The worker's queue holds 20 tasks. After its first scan, only refills bring more.
    """
    set_queue_capacity(monkeypatch, CAPACITY)
    monkeypatch.setattr(scans, "HORIZON", timedelta(hours=1))

    @asynccontextmanager
    async def begun() -> AsyncIterator[Isolated]:
        params = {"folder": str(tmp_path)}
        async with AsyncClient(mongo_uri, database=database_name) as client:
            await client.publish_many([TaskSpec("hold", params, key=f"{number}") for number in range(MANY)])
            await client.publish_many([TaskSpec("here", key=f"{number}") for number in range(MANY)])
        async with isolating(count=1, concurrency=2) as it:
            yield it

    return begun


def done(it: Isolated, name: str) -> int:
    return it.bench.tasks.count_documents({"name": name, "task_state.status": "SUCCESS"})


async def others_done(it: Isolated) -> None:
    await until(lambda: done(it, "here") == MANY, message="all others ended while one was held")


def stopped(it: Isolated) -> tuple[Any, Callable[..., Awaitable[None]]]:
    """Stop the scans of the worker. Return this part of it, and what makes one scan: a refill or a plain one."""
    own: Any = it.bench.worker.parts.scans
    scan = own.scan
    it.bench.stop_scans()

    async def scan_once(*, is_refill: bool = False) -> None:
        own.is_refill = is_refill  # the worker itself may have asked for one meanwhile
        await scan(is_full=False)

    return own, scan_once


def queries_of_this_task(batches: Any) -> list[object]:
    """Return a list that takes each query of this asyncio task from now on. The worker may go on with its own scans."""
    mine, take = asyncio.current_task(), batches.take
    asked: list[object] = []

    async def noted(*given: Any, **named: Any) -> Any:
        if asyncio.current_task() is mine:
            asked.append(given)
        return await take(*given, **named)

    batches.take = noted
    return asked


async def test_tasks_behind_more_isolated_ones_than_the_queue_holds_all_run(backlogged: Backlogged) -> None:
    async with backlogged() as it:
        await others_done(it)
        assert done(it, "hold") == 0
        late = await it.publish("here", "late")
        await it.ended(late, "SUCCESS")


async def test_isolated_tasks_go_on_after_those_that_the_queue_held(backlogged: Backlogged) -> None:
    async with backlogged() as it:
        it.open_gate()
        await until(lambda: done(it, "hold") == MANY, message="all that run in the executor ended")
        await until(lambda: done(it, "here") == MANY, message="all others ended")


async def test_begun_task_is_found_behind_more_isolated_ones_than_the_queue_holds(
    backlogged: Backlogged, store: SyncStore
) -> None:
    async with backlogged() as it:
        await others_done(it)
        it.bench.stop_stream()
        task_id, scans = f"hold:{MANY - 1}", it.bench.worker.parts.scans
        assert len(store.run(claims.claim([task_id], "dead", "its run", are_simple=False))) == 1
        scans.ask_full()
        leases = scans._lookups._questions.due._times
        await until(lambda: task_id in leases, message="it is looked up when the lease lapses")


async def test_tasks_beside_isolated_ones_are_not_looked_for_again_at_once_if_all_are_known(
    backlogged: Backlogged,
) -> None:
    async with backlogged() as it:
        await others_done(it)
        own, scan = stopped(it)
        batches, queue, asked = own._batches, own._queue, queries_of_this_task(own._batches)
        for pause, queries in ((0, 2), (60, 1)):
            batches.next_beside = monotonic() + pause
            asked.clear()
            await scan()
            assert len(asked) == queries
            assert queue.has_more == (pause > 0)
            assert (own._put_off is not None) == (pause > 0), "a refill follows when the pause is over"
        own.stop()
        own.ask_full()
        assert batches.until_beside == 0, "a full scan reads all"


async def test_scan_beside_isolated_tasks_that_takes_too_long_leaves_the_rest_to_a_later_one(
    backlogged: Backlogged, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with backlogged() as it:
        await others_done(it)
        own, scan = stopped(it)
        batches, queue = own._batches, own._queue
        batches.next_beside = 0.0

        def fail(*given: Any, timeout: timedelta | None = None) -> Operation[finding.Scan]:
            found = yield from finding_scan(*given)
            if timeout is not None:
                raise DatabaseUnavailable("too many keys")
            return found

        finding_scan = finding.scan
        monkeypatch.setattr(finding, "scan", fail)
        with pytest.raises(DatabaseUnavailable):
            await scan()  # it failed before its time limit
        monkeypatch.setattr(batches_of, "BESIDE_TIMEOUT", timedelta(0))
        await scan()
        assert queue.has_more
        assert batches.until_beside > 0
        assert own._put_off is not None
        own.stop()


async def test_isolated_tasks_are_found_behind_others_of_which_more_wait_than_the_queue_holds(
    backlogged: Backlogged,
) -> None:
    async with backlogged() as it:
        await others_done(it)
        own, scan = stopped(it)
        batches, queue = own._batches, own._queue
        it.bench.stop_stream()
        with it.bench.backed_up():
            specs = [TaskSpec("here", key=f"urgent/{number}", priority=9) for number in range(MANY)]
            await it.bench.client.publish_many(specs)
            for task_id, name in queue.names():
                if name == "hold":
                    queue.discard(task_id)
            assert batches.is_low_in_isolated
            await scan(is_refill=True)
            assert queue.isolated_count(monotonic()) >= CAPACITY // 2
            assert queue.has_more_isolated
