"""Calls during elections: each is followed by a run, and a call that is sent again after an error counts once."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from pymongo import MongoClient

from mtask import App, AsyncClient
from mtask.errors import DatabaseError
from mtask.local import ReplicaSet
from tests.chaos.nemeses import breaks
from tests.integration.worker_harness import working_on
from tests.mongo import Client, until

DATABASE = "gathering_failover"
pytestmark = pytest.mark.timeout(240)


@pytest.fixture
def mongo(replica_set: ReplicaSet) -> Iterator[Client]:
    client: Client = MongoClient(replica_set.uri, tz_aware=True)
    with client:
        yield client
        client.drop_database(DATABASE)


async def publish(client: AsyncClient, call_id: str, *args: Any, **more: Any) -> int:
    """Publish until the answer comes, always as the same call; return how often it was sent."""
    for sent in range(1, 100):
        try:
            await client.publish(*args, key="k", call_id=call_id, **more)
        except DatabaseError:
            await asyncio.sleep(0.05)
        else:
            return sent
    raise AssertionError("no answer")


async def test_no_call_is_lost_or_doubled_by_elections(replica_set: ReplicaSet, mongo: Client) -> None:
    app, runs, lists = App(), list[tuple[int, float]](), list[list[int]]()

    @app.task
    async def index(number: int) -> None:
        runs.append((number, time.monotonic()))
        await asyncio.sleep(0.05)

    @app.task
    async def digest(calls: list[int]) -> None:
        await asyncio.sleep(0.1)
        lists.append(calls)

    called: dict[int, tuple[float, float]] = {}
    is_over = asyncio.Event()

    async def publish_all(client: AsyncClient, first: int) -> None:
        number = first
        while not is_over.is_set():
            begun = time.monotonic()
            params = {"number": number}
            await publish(client, f"i{number}", index, params, if_running="again", max_retries=-1)
            called[number] = (begun, time.monotonic())
            retried = {"max_retries": -1, "retry_delay": 0.1}
            await publish(client, f"d{number}", digest, number, collect=True, **retried)
            number += 3
            await asyncio.sleep(0.02)

    async with working_on(replica_set.uri, DATABASE, mongo, app) as bench:
        async with asyncio.TaskGroup() as group:
            for first in range(3):
                group.create_task(publish_all(bench.client, first))
            for _ in range(2):
                done = len(called)
                await until(lambda done=done: len(called) > done + 20, message="calls go on")  # type: ignore[misc]
                await asyncio.to_thread(breaks.step_down, replica_set, 3)
            done = len(called)
            await until(lambda: len(called) > done + 20, message="calls go on")
            is_over.set()
        await bench.status("index:k", "SUCCESS")
        await bench.status("digest:k", "SUCCESS")

    assert len(called) > 60
    for begun, _ in called.values():
        assert any(at >= begun and called[number][1] >= begun for number, at in runs), "a call was lost"
    assert max(called[runs[-1][0]][1], 0) >= max(begun for begun, _ in called.values())
    counted = Counter(number for calls in lists for number in calls)
    assert set(counted) == set(called), "a collected call was lost"
    # A list whose run lost its lease, or whose end was not written, is tried again whole.
    doubled = [calls for calls in lists if any(counted[number] > 1 for number in calls)]
    assert all(lists.count(calls) == counted[number] for calls in doubled for number in calls)
