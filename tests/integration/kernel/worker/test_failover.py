"""A primary that dies, or freezes with its connections open: what a worker holds, asks and hears goes on elsewhere."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta

import pytest
from pymongo import AsyncMongoClient, MongoClient

from mtask import App, Context
from mtask.errors import DatabaseUnavailable
from mtask.kernel.driver.stores import AsyncStore
from mtask.kernel.operations import change as queries
from mtask.local import ReplicaSet
from mtask.logs import FIELDS
from tests.chaos.nemeses import breaks
from tests.integration.worker_harness import working_on
from tests.mongo import PATIENCE, Client, Document, until

DATABASE = "failover"


@pytest.fixture
def mongo(replica_set: ReplicaSet) -> Iterator[Client]:
    client: Client = MongoClient(replica_set.uri, tz_aware=True)
    with client:
        yield client
        client.drop_database(DATABASE)


async def test_pings_go_on_soon_after_the_primary_was_killed(replica_set: ReplicaSet, mongo: Client) -> None:
    app, go_on, started = App(), asyncio.Event(), asyncio.Event()

    @app.task
    async def hold(context: Context) -> None:
        started.set()
        await go_on.wait()

    async with working_on(replica_set.uri, DATABASE, mongo, app) as bench:
        # Between pings the connection is idle for more than the second after which the driver looks at it first.
        await bench.client.publish("hold", key="1", ping_interval=2.5, worker_timeout=200)
        await started.wait()
        with breaks.killed_primary(replica_set):
            lease = bench.state("hold:1")["worker_states"][0]["ping_expire_time"]
            # Less than a client that asks its servers every minute needs to find the next primary.
            await until(lambda: bench.state("hold:1")["worker_states"][0]["ping_expire_time"] > lease, 25, "a ping")
        go_on.set()
        [run] = (await bench.status("hold:1", "SUCCESS", PATIENCE))["worker_states"]
        assert run["attempt"] == 1


async def test_call_to_a_frozen_primary_ends_when_another_is_elected(replica_set: ReplicaSet, mongo: Client) -> None:
    client: AsyncMongoClient[Document] = AsyncMongoClient(replica_set.uri)
    async with client:
        store = AsyncStore(client, DATABASE, timedelta(minutes=5))
        assert await store.run(queries.count({})) == 0
        former = replica_set.primary()
        replica_set.pause(former)
        try:
            with pytest.raises(DatabaseUnavailable, match=rf"{former.address} has not answered, and .* is primary"):
                await store.run(queries.count({}))
            assert await store.run(queries.count({})) == 0, "the next call goes to the next primary"
        finally:
            replica_set.resume(former)


def is_given_up(caplog: pytest.LogCaptureFixture) -> bool:
    """Whether the worker says of its stream that another member is primary now."""
    reasons = [str(getattr(record, FIELDS, "")) for record in caplog.records if "stream broke" in record.message]
    return any("is primary now" in reason for reason in reasons)


async def test_stream_from_a_frozen_primary_is_opened_anew_at_the_next(
    replica_set: ReplicaSet, mongo: Client, caplog: pytest.LogCaptureFixture
) -> None:
    app = App()

    @app.task
    async def work() -> None:
        return None

    async with working_on(replica_set.uri, DATABASE, mongo, app) as bench, asyncio.timeout(120):
        with breaks.frozen_primary(replica_set):
            await until(lambda: is_given_up(caplog), PATIENCE, "the stream is given up")
            before, number = bench.worker.parts.stream.event_cnt, 0
            while bench.worker.parts.stream.event_cnt == before:  # what is written before it is open, scans bring
                number += 1
                with suppress(DatabaseUnavailable):  # MongoDB itself may need longer until a majority acknowledges
                    await bench.client.publish("work", key=str(number))
                await asyncio.sleep(0.05)
        await bench.client.publish("work", key=str(number))
        await bench.status(f"work:{number}", "SUCCESS", PATIENCE)
