"""A schedule that is added in a transaction of the caller exists exactly if the transaction commits."""

from __future__ import annotations

import pytest

from mtask import AsyncClient, Client
from mtask.features.schedules.triggers import Every
from tests.mongo import Client as Mongo

HOURLY = Every(interval_ms=3_600_000)


@pytest.mark.fresh_database
def test_schedule_of_a_transaction_exists_if_it_commits(mongo: Mongo, client: Client, database_name: str) -> None:
    mongo[database_name]["schedules"].drop()  # it is made beside the transaction, which must not hold that up
    with client.tasks.database.client.start_session() as session:
        for ending in (session.abort_transaction, session.commit_transaction):
            session.start_transaction()
            for name in ("a", "b"):
                client.add_schedule(name, "report", HOURLY, session=session)
            assert client.schedules() == []
            ending()
    assert [one.id for one in client.schedules()] == ["a", "b"]
    assert {each.target for each in client.actions()} == {"schedule:a", "schedule:b"}


async def test_async_client_adds_a_schedule_in_a_transaction(mongo_uri: str, database_name: str) -> None:
    async with AsyncClient(mongo_uri, database=database_name) as client:
        driver = client.tasks.database.client
        async with driver.start_session() as session:
            await session.start_transaction()
            await client.add_schedule("a", "report", HOURLY, session=session)
            await session.abort_transaction()
        assert await client.schedules() == []
