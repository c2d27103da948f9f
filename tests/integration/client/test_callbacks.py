"""Publishing with a callback, by each kind of client and by the command line; and what refuses it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from mtask import Flow, TaskSpec
from mtask.errors import InvalidInput, WorkersTooOld
from tests import build
from tests.clients import AnyClient
from tests.mongo import Client as Mongo

URL = "https://hooks.example.com/a"
EACH = ["SUCCESS", "FAIL", "CANCELED"]


def stored(mongo: Mongo, database: str, task_id: str) -> dict[str, Any]:
    return mongo[database]["tasks"].find_one({"_id": task_id}) or {}


def test_each_way_to_publish_takes_a_callback(client: AnyClient, mongo: Mongo, database_name: str) -> None:
    client.publish("t", key="one", callback={"url": URL, "on": ["FAIL"], "secret": "shop"})
    specs = [TaskSpec("t", key="two", callback={"url": URL}), TaskSpec("t", key="three")]
    client.publish_many(specs)
    flow = Flow("f")
    flow.add("a", "t", callback={"url": URL})
    flow.add("b", "t", after=["a"], callback={"url": URL, "on": "CANCELED"})
    client.publish_flow(flow)
    client.publish("t", key="gathers", debounce=1, callback={"url": URL})
    client.publish("t", key="window", window=1, callback={"url": URL})
    client.in_transaction(
        lambda session: client.client.publish("t", key="inside", callback={"url": URL}, session=session)
    )
    assert stored(mongo, database_name, "t:one")["callback"] == {"url": URL, "on": ["FAIL"], "secret": "shop"}
    for key in ("two", "f/a", "gathers", "window", "inside"):
        assert stored(mongo, database_name, f"t:{key}")["callback"] == {"url": URL, "on": EACH}, key
    assert stored(mongo, database_name, "t:f/b")["callback"]["on"] == ["CANCELED"]
    assert "callback" not in stored(mongo, database_name, "t:three")
    found = client.get("t", "one").callback
    assert (found.url, found.on, found.secret) == (URL, ["FAIL"], "shop")


def test_an_existing_task_keeps_its_callback_unless_it_is_updated(
    client: AnyClient, mongo: Mongo, database_name: str
) -> None:
    client.publish("t", key="k", callback={"url": URL})
    client.publish("t", key="k", callback={"url": f"{URL}/other"})
    assert stored(mongo, database_name, "t:k")["callback"]["url"] == URL
    client.publish("t", key="k", callback={"url": f"{URL}/other"}, if_exists="update")
    assert stored(mongo, database_name, "t:k")["callback"]["url"] == f"{URL}/other"
    client.publish("t", key="k", if_exists="update")
    assert "callback" not in stored(mongo, database_name, "t:k")


def test_a_wrong_callback_publishes_nothing(client: AnyClient) -> None:
    client.init()
    for wrong in ({"url": "ftp://a"}, {"url": URL, "on": ["LOST"]}, "https://a", {"to": URL}):
        with pytest.raises(InvalidInput, match="callback"):
            client.publish("t", key="k", callback=wrong)
    flow = Flow("f")
    flow.add("a", "t", callback={"url": "ftp://a"})
    with pytest.raises(InvalidInput, match="callback"):
        client.publish_flow(flow)
    with pytest.raises(InvalidInput, match="mtask's own"):
        client.publish("mtask/callback", {"url": URL})
    assert client.count() == 0


def test_nothing_is_published_while_a_live_worker_would_tell_nobody(
    client: AnyClient, mongo: Mongo, database_name: str
) -> None:
    client.init()
    mongo[database_name]["workers"].insert_one(build.worker(now=client.server_time(), names=["t"], schema_revision=5))
    flow = Flow("f")
    flow.add("a", "t", callback={"url": URL})
    spec = TaskSpec("t", key="k", callback={"url": URL})
    ways: list[Callable[[], Any]] = [
        lambda: client.publish("t", key="k", callback={"url": URL}),
        lambda: client.publish_many([spec]),
        lambda: client.publish_flow(flow),
    ]
    for publish in ways:
        with pytest.raises(WorkersTooOld, match="do not know callbacks"):
            publish()
    assert client.count() == 0
    client.publish("t", key="k")
    mongo[database_name]["workers"].update_one({}, {"$set": {"schema_revision": 6}})
    assert client.publish("t", key="l", callback={"url": URL}).created
