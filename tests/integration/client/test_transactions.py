"""Publishing inside the caller's own MongoDB transaction: the task exists exactly if the caller's writes do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from pymongo import MongoClient
from pymongo.client_session import ClientSession
from pymongo.errors import OperationFailure

from mtask import Client, Published, TaskExists, TaskRunning, TaskSpec
from mtask.errors import InvalidParams
from tests.clients import KINDS, AnyClient, claim, open_client, open_store
from tests.mongo import Client as Mongo

Step = Callable[[Any], Any]


class Abort(Exception):
    """The caller changes its mind."""


@pytest.fixture
def client(client: AnyClient, mongo: Mongo, database_name: str) -> AnyClient:
    client.init()
    mongo[database_name].create_collection("orders")
    return client


def order(client: AnyClient) -> Step:
    """Return the step that writes an order of the caller's."""
    orders = client.source[client.client.database_name]["orders"]
    return lambda session: orders.insert_one({"_id": "order-7"}, session=session)


def publish(client: AnyClient, key: str = "k", params: Any = None, **options: Any) -> Step:
    return lambda session: client.client.publish("a", params, key=key, session=session, **options)


def publish_many(client: AnyClient, keys: str, **policy: Any) -> Step:
    specs = [TaskSpec("a", {"n": key}, key=key) for key in keys]
    return lambda session: client.client.publish_many(specs, session=session, **policy)


def changes_its_mind(_: Any) -> None:
    raise Abort


def orders_of(client: AnyClient, mongo: Mongo) -> int:
    return mongo[client.client.database_name]["orders"].count_documents({})


def test_committed_transaction_leaves_the_task_and_the_callers_write(client: AnyClient, mongo: Mongo) -> None:
    _, published = client.in_transaction(order(client), publish(client, params={"n": 1}, priority=4))
    assert published == Published("a:k", created=True, updated=False)
    task = client.get("a", "k")
    assert (task.params, task.task_option.priority) == ({"n": 1}, 4)
    assert orders_of(client, mongo) == 1


def test_aborted_transaction_leaves_neither(client: AnyClient, mongo: Mongo) -> None:
    with pytest.raises(Abort):
        client.in_transaction(order(client), publish(client), publish_many(client, "xyz"), changes_its_mind)
    assert client.count(name="a") == 0
    assert client.find() == []
    assert orders_of(client, mongo) == 0
    assert client.publish("a", key="k").created


def test_task_is_not_seen_outside_before_the_commit(client: AnyClient, mongo: Mongo) -> None:
    seen: list[int] = []

    def look(_: Any) -> None:
        seen.append(mongo[client.client.database_name]["tasks"].count_documents({}))

    client.in_transaction(publish(client), look)
    look(None)
    assert seen == [0, 1]


def test_existing_key_does_not_abort_the_transaction(client: AnyClient, mongo: Mongo) -> None:
    client.publish("a", {"n": "old"}, key="k")
    first, _, second = client.in_transaction(publish(client, params={"n": "new"}), order(client), publish(client, "l"))
    assert first == Published("a:k", created=False, updated=False)
    assert second == Published("a:l", created=True, updated=False)
    assert client.get("a", "k").params == {"n": "old"}
    assert orders_of(client, mongo) == 1


def test_batch_with_existing_keys_and_duplicates_does_not_abort_the_transaction(
    client: AnyClient, mongo: Mongo
) -> None:
    client.publish("a", {"n": "old"}, key="2")
    told, _ = client.in_transaction(publish_many(client, "12334"), order(client))
    assert [(one.task_id, one.created) for one in told] == [
        ("a:1", True),
        ("a:2", False),
        ("a:3", True),
        ("a:3", False),
        ("a:4", True),
    ]
    assert client.get("a", "2").params == {"n": "old"}
    assert client.count(name="a") == 4
    assert orders_of(client, mongo) == 1


def test_existing_task_is_updated_inside_the_transaction(client: AnyClient, mongo: Mongo) -> None:
    client.publish("a", {"n": "old"}, key="k")
    with pytest.raises(Abort):
        client.in_transaction(publish(client, params={"n": "new"}, if_exists="update"), changes_its_mind)
    assert client.get("a", "k").params == {"n": "old"}

    published, _ = client.in_transaction(publish(client, params={"n": "new"}, if_exists="update"), order(client))
    assert published == Published("a:k", created=False, updated=True)
    assert client.get("a", "k").params == {"n": "new"}


def test_refusal_inside_the_transaction_leaves_the_decision_to_the_caller(client: AnyClient, mongo_uri: str) -> None:
    client.publish("a", key="k")
    with open_store(mongo_uri, client.client.database_name) as store:
        claim(store, "a:k")

    def refused(step: Step, error: type[Exception]) -> Step:
        if client.kind == "sync":

            def expect(session: Any) -> None:
                with pytest.raises(error):
                    step(session)

            return expect

        async def expect_async(session: Any) -> None:
            with pytest.raises(error):
                await step(session)

        return expect_async

    client.in_transaction(
        refused(publish(client, if_exists="reject"), TaskExists),
        refused(publish(client, if_exists="update", not_update_running=True), TaskRunning),
        refused(publish(client, params=object()), InvalidParams),
        publish(client, "l"),
    )
    assert client.get("a", "l").key == "l"


def test_delay_inside_a_transaction_counts_on_the_servers_clock(client: AnyClient) -> None:
    client.in_transaction(publish(client, delay=60), publish_many(client, "m"))
    state = client.get("a", "k").task_state
    assert state.start_time is not None
    assert (state.start_time - state.create_time).total_seconds() == 60


def test_task_published_twice_in_one_transaction_is_created_once(client: AnyClient) -> None:
    first, second = client.in_transaction(publish(client), publish(client))
    assert (first.created, second.created) == (True, False)


def test_transaction_may_be_the_first_thing_a_client_does(mongo_uri: str, database_name: str) -> None:
    for kind in KINDS:
        with open_client(kind, mongo_uri, f"{database_name}") as client:
            (published,) = client.in_transaction(publish(client, kind))
            assert published.created


def test_transactions_that_meet_are_repeated_by_the_drivers_own_label(mongo_uri: str, database_name: str) -> None:
    """Two transactions publish one key: the later one must wait its turn, and not see an error of ours."""
    with MongoClient[dict[str, Any]](mongo_uri) as source:
        client = Client(source, database=database_name)
        client.init()
        attempts: list[Published] = []

        with source.start_session() as rival, rival.start_transaction():
            assert client.publish("a", {"by": "rival"}, key="k", session=rival).created
            with pytest.raises(OperationFailure) as raised:  # noqa: SIM117 the session outlives the error
                with source.start_session() as session, session.start_transaction():
                    client.publish("a", {"by": "late"}, key="k", session=session)
            assert raised.value.has_error_label("TransientTransactionError")

            def again(session: ClientSession) -> None:
                if attempts == [] and rival.in_transaction:
                    rival.commit_transaction()
                attempts.append(client.publish("a", {"by": "late"}, key="k", session=session))

            with source.start_session() as session:
                session.with_transaction(again)
        assert [attempt.created for attempt in attempts] == [False]
        assert client.get("a", "k").params == {"by": "rival"}
