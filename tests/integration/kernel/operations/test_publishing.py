"""A task is published once, whoever calls and however often.

`tests/acceptance/test_publishing_again.py` tests what each policy does then.
"""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import pytest
from pymongo import MongoClient

from mtask.errors import TaskExists
from mtask.kernel.driver.stores import SyncStore
from mtask.kernel.operations import publish as publishing
from mtask.kernel.operations.publish import Policy, Published
from tests.integration import stores
from tests.integration.stores import claim, new_task, parsed, publish, stored
from tests.mongo import Client

#: Read as expressions, these would be something else.
EXPRESSION_LIKE: list[Any] = [
    "$name",
    "$$NOW",
    "$$ROOT",
    {"$add": [1, 2]},
    {"$literal": 1},
    {"a": {"$meta": "x"}},
    {"": 0},
]


def test_fifty_threads_publish_one_key_and_one_of_them_creates_it(mongo_uri: str, store: SyncStore) -> None:
    client: Client = MongoClient(mongo_uri, tz_aware=True)
    shared, barrier = SyncStore(client, store.database.name), Barrier(50)

    def once(number: int) -> Published:
        barrier.wait(30)
        return publish(shared, "k", number)

    with client, ThreadPoolExecutor(50) as pool:
        results = list(pool.map(once, range(50)))
    assert Counter(result.created for result in results) == {True: 1, False: 49}
    assert not any(result.updated for result in results)
    winner = next(number for number, result in enumerate(results) if result.created)
    assert stored(store, "k")["params"] == winner
    assert store.tasks.count_documents({}) == 1


def test_threads_that_publish_in_bulk_create_each_key_once(mongo_uri: str, store: SyncStore) -> None:
    client: Client = MongoClient(mongo_uri, tz_aware=True)
    shared, barrier = SyncStore(client, store.database.name), Barrier(8)
    batch = [new_task(f"k{number}") for number in range(200)]

    def all_of_them(_: int) -> list[str]:
        barrier.wait(30)
        results = shared.run(publishing.publish_many(batch, Policy(), in_session=False))
        return [result.task_id for result in results if isinstance(result, Published) and result.created]

    with client, ThreadPoolExecutor(8) as pool:
        created = [task_id for ids in pool.map(all_of_them, range(8)) for task_id in ids]
    assert sorted(created) == sorted(task.task_id for task in batch)


@pytest.mark.parametrize("value", EXPRESSION_LIKE)
@pytest.mark.parametrize("way", ["one", "many", "update", "in a transaction"])
def test_params_that_look_like_expressions_stay_what_they_are(store: SyncStore, value: Any, way: str) -> None:
    params = {"plain": value, "nested": [value, {"deep": value}]}
    if way == "one":
        publish(store, "k", params)
    elif way == "many":
        store.run(publishing.publish_many([new_task("k", params)], Policy(), in_session=False))
    elif way == "update":
        publish(store, "k")
        publish(store, "k", params, policy=Policy("update"))
    else:
        with store.client.start_session() as session, session.start_transaction():
            store.run(publishing.publish_many([new_task("k", params)], Policy(), in_session=True), session)
    assert stored(store, "k")["params"] == params


@pytest.mark.parametrize("key", ["$k", "$$NOW", "a.b", "{$literal: 1}", "a:b", "\x00", "é" * 256])
def test_any_key_names_its_own_task(store: SyncStore, key: str) -> None:
    assert publish(store, key, specific_worker_ids=["$w"], queue="$q").created
    assert not publish(store, key).created
    made = parsed(store, key)
    assert (made.key, made.queue, made.task_option.specific_worker_ids) == (key, "$q", ["$w"])


def test_many_tells_of_each_task_in_order_also_of_doubles_within_it(store: SyncStore) -> None:
    publish(store, "old")
    batch = [new_task("old"), new_task("new"), new_task("new"), new_task("other")]
    made = store.run(publishing.publish_many(batch, Policy("reject"), in_session=False))
    assert [type(result) for result in made] == [TaskExists, Published, TaskExists, Published]
    kept = store.run(publishing.publish_many(batch, Policy(), in_session=False))
    assert kept == [Published(task.task_id, created=False, updated=False) for task in batch]


def test_many_in_a_transaction_exist_exactly_if_it_commits(store: SyncStore) -> None:
    publish(store, "old")
    batch = [new_task("old"), new_task("new")]
    with store.client.start_session() as session:
        session.start_transaction()
        made = store.run(publishing.publish_many(batch, Policy(), in_session=True), session)
        session.abort_transaction()
        assert store.tasks.count_documents({}) == 1
        with session.start_transaction():
            again = store.run(publishing.publish_many(batch, Policy(), in_session=True), session)
    assert made == again
    assert [result.created for result in again if isinstance(result, Published)] == [False, True]
    assert store.tasks.count_documents({}) == 2


def test_clean_failed_leaves_a_live_run_alone(store: SyncStore) -> None:
    publish(store, "k", concurrent_worker_cnt=2)
    claim(store, "w1", "k")
    claim(store, "w2", "k")
    stores.lapse(store, "k", "w1")
    publish(store, "k", policy=Policy(clean_failed=True))
    made = parsed(store, "k")
    assert (made.status, [run.worker_id for run in made.runs]) == ("RUNNING", ["w2"])
