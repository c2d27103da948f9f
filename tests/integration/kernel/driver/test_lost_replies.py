"""Replies that are lost after the write: the driver sends again, and what it is told then is as good as the first."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from pymongo import MongoClient

from mtask.database import setup
from mtask.features.controls.rules import Limit
from mtask.features.limits import operations as permits
from mtask.features.limits.operations import PermitPool, PermitRequest, Wanted
from mtask.kernel.document.task import runs_in
from mtask.kernel.driver.stores import SyncStore
from mtask.kernel.operations import claim as claims
from mtask.local import ReplicaSet
from tests.chaos.nemeses.network import ReplicaSetProxy
from tests.integration.stores import Document, parsed, publish
from tests.mongo import Client


@pytest.fixture
def proxy(mongo_server: ReplicaSet) -> Iterator[ReplicaSetProxy]:
    with ReplicaSetProxy(mongo_server) as made:
        yield made


@pytest.fixture
def store(proxy: ReplicaSetProxy, database_name: str) -> Iterator[SyncStore]:
    client: Client = MongoClient[Document](proxy.uri, tz_aware=True)
    with client:
        made = SyncStore(client, database_name)
        made.run(setup.ensure())
        yield made


def test_ping_sent_twice_tells_all_that_a_holder_must_know(store: SyncStore, proxy: ReplicaSetProxy) -> None:
    publish(store, "a")
    store.run(claims.claim(["task:a"], "w", "token"))
    before = parsed(store, "a").runs[-1]
    loss = proxy.drop_replies(1, commands=["findAndModify"])
    [document] = store.run(claims.ping({before.run_id: "task:a"}, 60_000))
    assert loss.is_done.is_set()
    assert set(document) == {"_id", "task_option", "task_state", "now"}
    after = claims.run_of(document, before.run_id)
    assert after is not None
    assert after["ping_expire_time"] > before.ping_expire_time
    assert after["ping_expire_time"] > document["now"]


def test_claim_sent_twice_is_one_run(store: SyncStore, proxy: ReplicaSetProxy) -> None:
    publish(store, "a")
    loss = proxy.drop_replies(1, commands=["findAndModify"])
    [document] = store.run(claims.claim(["task:a"], "w", "token"))
    assert loss.is_done.is_set()
    assert [run["run_id"] for run in runs_in(document)] == ["token-0"]
    assert [run.run_id for run in parsed(store, "a").runs] == ["token-0"]


def test_request_for_permits_sent_twice_tells_that_the_worker_waits(store: SyncStore, proxy: ReplicaSetProxy) -> None:
    store.run(setup.ensure(setup.EVERY))
    pool, limit = PermitPool("q"), Limit(concurrency=2)
    for worker, task_ids in (("w", ["task:a"]), ("other", ["task:b", "task:c"])):
        store.run(permits.take([PermitRequest(pool, limit, [*map(Wanted, task_ids)])], worker, worker))
    loss = proxy.drop_replies(1, commands=["findAndModify"])
    grant = store.run(permits.take([PermitRequest(pool, limit, [Wanted("task:d")])], "w", "again"))[pool]
    assert loss.is_done.is_set()
    assert (grant.is_crowded, grant.is_listed) == (True, True)
