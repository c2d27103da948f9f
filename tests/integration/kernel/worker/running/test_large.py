"""Tasks with params of a megabyte: they stall no other task, and do not fill the memory."""

from __future__ import annotations

import asyncio

import bson

from mtask import App, AsyncClient, TaskSpec
from mtask import Client as Sync
from mtask.kernel.driver.stores import SyncStore
from mtask.kernel.operations import claim as claims
from mtask.kernel.operations import find_due as finding
from mtask.kernel.worker.running import slots
from tests.integration.worker_harness import Working
from tests.mongo import Client, until

MB = 1_000_000
LARGE, SMALL = 60, 60


async def test_scan_reads_none_of_the_params(working: Working, database_name: str, mongo: Client) -> None:
    app = App()

    @app.task
    async def large(text: str) -> None: ...

    async with working(app, concurrency=0) as bench:
        await _publish(bench.client, range(30), "large")
        documents = SyncStore(mongo, database_name).run(finding.scan(["default"], ["large"], "w", 10_000, 1_000))
        assert len(documents.documents) == 30
        assert max(len(bson.encode(found)) for found in documents.documents) < 500


async def test_small_tasks_run_while_large_ones_wait_and_no_group_of_them_is_large(working: Working) -> None:
    app, sizes = App(), []
    release = asyncio.Event()

    @app.task
    async def large(text: str) -> int:
        await release.wait()
        return len(text)

    @app.task
    async def small() -> None: ...

    async with working(app, concurrency=0) as bench:
        read = bench.worker.parts.sender._pace.read

        def noted(count: int, size: int) -> None:
            sizes.append((count, size))
            read(count, size)

        bench.worker.parts.sender._pace.read = noted  # type: ignore[method-assign]
        await _publish(bench.client, range(LARGE), "large")
        bench.worker.parts.slots.set_concurrency(8)
        await until(lambda: sizes, message="the first large tasks are read")
        bench.worker.parts.slots.set_concurrency(LARGE + 8)
        await bench.client.publish_many([TaskSpec("small", {}, key=str(number)) for number in range(SMALL)])
        small_ones = {"name": "small", "task_state.status": "SUCCESS"}
        await until(lambda: bench.tasks.count_documents(small_ones) == SMALL, message="the small tasks")
        assert bench.count("SUCCESS") == SMALL
        release.set()
        await until(lambda: bench.count("SUCCESS") == LARGE + SMALL, message="all tasks")
        assert bench.tasks.count_documents({"task_state.worker_states": {"$size": 1}}) == LARGE + SMALL
    after_the_first = [size for _, size in sizes[1:]]
    assert after_the_first
    assert max(after_the_first) <= slots._MAX_BYTES + MB


def test_a_claim_of_one_task_tells_its_size_too(store: SyncStore, client: Sync) -> None:
    # Where params are large, tasks are claimed one by one: else nothing would tell that they are small again.
    told: list[tuple[int, int]] = []
    for key, text in (("large", "x" * MB), ("small", "x")):
        client.publish("work", {"text": text}, key=key)
        claim = claims.claim([f"work:{key}"], "w", key, tell_size=lambda count, size: told.append((count, size)))
        assert store.run(claim)
    assert told == [(1, MB), (1, 1)]


async def _publish(client: AsyncClient, numbers: range, name: str) -> None:
    for number in numbers:
        await client.publish(name, {"text": "x" * MB}, key=str(number))
