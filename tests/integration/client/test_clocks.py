"""A publisher whose clock is minutes wrong neither delays nor hastens a task: every instant is the server's."""

from __future__ import annotations

import json
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from mtask import Client
from tests import faketime
from tests.clients import is_claimable, open_store, server_now
from tests.mongo import Client as Mongo

ROOT = Path(__file__).parents[3]

PUBLISHER = """
import asyncio, json, sys, time
from datetime import datetime, UTC
from mtask import AsyncClient, Client, TaskSpec

uri, database, start_time = sys.argv[1:]
start = datetime.fromisoformat(start_time)

with Client(uri, database=database) as client:
    client.publish("a", key="now")
    client.publish("a", key="delayed", delay=300)
    client.publish("a", key="at", start_time=start)
    client.publish_many([TaskSpec("a", key="many now"), TaskSpec("a", key="many delayed", delay=300)])
    client.publish("a", key="updated", delay=9999)
    client.publish("a", key="updated", delay=300, if_exists="update")
    with client._store.client.start_session() as session, session.start_transaction():
        client.publish("a", key="in transaction", session=session)
        client.publish_many([TaskSpec("a", key="many in transaction", delay=300)], session=session)
    client.publish("a", key="canceled")
    client.cancel("a", "canceled")

async def main():
    async with AsyncClient(uri, database=database) as client:
        await client.publish("a", key="async delayed", delay=300)

asyncio.run(main())
print(json.dumps({"clock": time.time()}))
"""


@pytest.mark.parametrize("minutes", [-10, 10])
def test_publisher_whose_clock_is_wrong_writes_the_servers_time(
    minutes: int, mongo_uri: str, database_name: str, mongo: Mongo
) -> None:
    before = server_now(mongo)
    start = before + timedelta(minutes=5)
    printed = faketime.run(
        [sys.executable, "-c", PUBLISHER, mongo_uri, database_name, start.isoformat()],
        timedelta(minutes=minutes),
        cwd=ROOT,
    )
    after = server_now(mongo)

    believed = datetime.fromtimestamp(json.loads(printed)["clock"], UTC)
    assert abs(believed - after - timedelta(minutes=minutes)) < timedelta(minutes=1), "its clock is wrong as intended"

    documents: dict[str, Any] = {document["key"]: document for document in mongo[database_name]["tasks"].find()}
    delay = timedelta(seconds=300)
    for key, document in documents.items():
        state = document["task_state"]
        assert before <= state["create_time"] <= after, key
        if "delayed" in key or key in ("updated", "many in transaction"):
            assert before + delay <= state["start_time"] <= after + delay, key
            assert state["next_preempt_time"] == state["start_time"], key
        elif key == "at":
            assert state["start_time"] == state["next_preempt_time"] == start
        elif key == "canceled":
            assert before <= state["finish_time"] <= after
        else:
            assert state["next_preempt_time"] == state["create_time"], key
    assert len(documents) == 10

    with open_store(mongo_uri, database_name) as store:
        claimable = {key for key in documents if is_claimable(store, f"a:{key}")}
    assert claimable == {"now", "many now", "in transaction"}


def test_fresh_keys_of_a_publisher_whose_clock_is_wrong_are_fresh(mongo_uri: str, database_name: str) -> None:
    code = "import sys; from mtask import Client\nwith Client(sys.argv[1], database=sys.argv[2]) as c: c.publish('a')"
    for _ in range(2):
        faketime.run([sys.executable, "-c", code, mongo_uri, database_name], timedelta(minutes=-10), cwd=ROOT)
    with Client(mongo_uri, database=database_name) as client:
        assert client.count(name="a") == 2
