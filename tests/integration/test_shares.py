"""How several workers share a backlog: by the slots of its tasks, which the server knows as they do."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest

from mtask import App, TaskSpec
from mtask.errors import DatabaseUnavailable
from mtask.model.identity import task_id_of
from mtask.model.options import TaskOption
from mtask.model.slots import SLOT_CNT, slot_of
from mtask.store import claims, publishing
from mtask.store import expressions as x
from mtask.store.driver import SyncStore
from mtask.store.filters import of_shares
from mtask.store.operation import Operation
from mtask.store.publishing import NewTask, Policy
from mtask.worker import discovery, hints
from mtask.worker import worker as worker_module
from mtask.worker.peers import Peers
from tests.clients import open_store
from tests.integration.stores import ready_store
from tests.integration.worker_harness import register, until, working
from tests.mongo import Client

BACKLOG = 400


@pytest.fixture
def store(mongo_uri: str, database_name: str) -> Iterator[SyncStore]:
    with open_store(mongo_uri, database_name) as opened:
        yield opened


def test_the_server_puts_each_id_into_the_slot_that_a_worker_does(mongo: Client, database_name: str) -> None:
    chance = random.Random(5)
    letters = "aZ09:./_- \0éß€漢\U0001f600"
    ids = {f"work:{number}" for number in range(1_000)} | {"work:" + "k" * 512, "", "a"}
    ids |= {"".join(chance.choices(letters, k=chance.randrange(1, 90))) for _ in range(2_000)}
    mongo[database_name]["ids"].insert_many({"_id": task_id} for task_id in ids)
    rows = mongo[database_name]["ids"].aggregate([{"$project": {"slot": x.slot()}}])
    found = {row["_id"]: row["slot"] for row in rows}
    assert found == {task_id: slot_of(task_id) for task_id in ids}
    assert len(set(found.values())) > 0.9 * SLOT_CNT


def test_what_scans_for_shares_find_is_the_whole_backlog_and_nothing_twice(mongo: Client, database_name: str) -> None:
    store = ready_store(mongo, database_name)
    names = ["task", "mail", "alone"]
    for name in names:
        for number in range(60):
            task_id, option = task_id_of(name, f"{number}"), TaskOption().stored()
            store.run(publishing.publish(NewTask(task_id, name, f"{number}", "default", None, option, None), Policy()))
    live: list[dict[str, Any]] = [
        {"_id": "w1", "concurrency": 1, "names": names},
        {"_id": "w2", "concurrency": 1, "names": ["task", "mail"]},
        {"_id": "w3", "concurrency": 1, "names": ["task"]},
    ]
    found: list[str] = []
    for worker in live:
        peers = Peers(worker["_id"])
        peers.update(live)
        shares = of_shares(peers.shares(worker["names"]))
        scan = store.run(claims.scan(["default"], worker["names"], worker["_id"], 0, 1_000, also=[shares]))
        brought = [document["_id"] for document in scan.documents]
        assert all(peers.rank(task_id, task_id.partition(":")[0]) == 0 for task_id in brought)
        found += brought
    assert sorted(found) == sorted(f"{name}:{number}" for name in names for number in range(60))


@pytest.mark.parametrize("is_alone", [False, True], ids=["beside-another", "alone"])
def test_worker_asks_for_its_share_while_there_is_more_and_takes_what_others_leave(
    mongo_uri: str,
    database_name: str,
    mongo: Client,
    store: SyncStore,
    monkeypatch: pytest.MonkeyPatch,
    is_alone: bool,
) -> None:
    monkeypatch.setattr(worker_module, "_QUEUE_CAPACITY", 40)
    for module in (discovery, hints):  # none is found by a regular scan
        monkeypatch.setattr(module, "HORIZON", timedelta(minutes=5))
    app = App()
    brought: list[tuple[bool, list[str]]] = []
    real_scan = claims.scan

    def spied(*given: Any, **also: Any) -> Operation[claims.Scan]:
        found = yield from real_scan(*given, **also)
        brought.append((bool(also.get("also")), [document["_id"] for document in found.documents]))
        return found

    monkeypatch.setattr(claims, "scan", spied)

    @app.task
    async def work() -> None:
        return None

    if not is_alone:
        register(store, "idle", ["work"])

    async def scenario() -> None:
        async with working(mongo_uri, database_name, mongo, app) as bench:
            with bench.backed_up():
                later = [TaskSpec("work", {}, key=f"later-{n}", delay=timedelta(minutes=4)) for n in range(20)]
                due = [TaskSpec("work", {}, key=f"{number}") for number in range(BACKLOG)]
                await bench.client.publish_many([*later, *due])
            await until(lambda: bench.count("SUCCESS") == BACKLOG, message="all that are due are done")
            peers = bench.worker._hints._peers
            shares = [task_ids for is_share, task_ids in brought if is_share]
            if is_alone:
                assert shares == []
                return
            assert {peers.rank(task_id, "work") for task_ids in shares for task_id in task_ids} == {0}
            assert len({task_id for task_ids in shares for task_id in task_ids}) > BACKLOG / 4

    asyncio.run(scenario())


def test_all_that_is_due_is_looked_for_again_and_again_whoever_it_is_left_to(
    mongo_uri: str, database_name: str, mongo: Client, store: SyncStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_module, "_QUEUE_CAPACITY", 40)
    monkeypatch.setattr(discovery, "_ALL", 0.0)  # each time
    app = App()
    found: list[bool] = []
    real_scan = claims.scan

    def spied(*given: Any, **others: Any) -> Operation[claims.Scan]:
        found.append(bool(others.get("also")))
        return (yield from real_scan(*given, **others))

    monkeypatch.setattr(claims, "scan", spied)

    @app.task
    async def work() -> None:
        return None

    register(store, "idle", ["work"])

    async def scenario() -> None:
        async with working(mongo_uri, database_name, mongo, app) as bench:
            with bench.backed_up():
                await bench.client.publish_many([TaskSpec("work", {}, key=f"{number}") for number in range(BACKLOG)])
            await until(lambda: bench.count("SUCCESS") == BACKLOG, message="all are done")

    asyncio.run(scenario())
    assert len(found) > 5
    assert not any(found)


@pytest.mark.parametrize("failure", [None, DatabaseUnavailable("too slow")], ids=["looked-at-all", "timed-out"])
def test_share_that_is_done_is_not_looked_for_again_and_again_in_the_others_backlog(
    mongo_uri: str,
    database_name: str,
    mongo: Client,
    store: SyncStore,
    monkeypatch: pytest.MonkeyPatch,
    failure: Exception | None,
) -> None:
    monkeypatch.setattr(worker_module, "_QUEUE_CAPACITY", 40)
    monkeypatch.setattr(discovery, "_SHARE_TIMES", 1_000_000)
    if failure is not None:
        monkeypatch.setattr(discovery, "_SHARE_TIMEOUT", timedelta(0))
    app = App()
    in_vain = 0
    real_scan = claims.scan

    def spied(*given: Any, **others: Any) -> Operation[claims.Scan]:
        nonlocal in_vain
        is_share = bool(others.get("also"))
        if is_share and failure is not None:
            in_vain += 1
            raise failure  # as if after its time
        found = yield from real_scan(*given, **others)
        if is_share and found.is_complete:
            in_vain += 1
        assert (others.get("timeout") is not None) == is_share
        return found

    monkeypatch.setattr(claims, "scan", spied)

    @app.task
    async def work() -> None:
        return None

    register(store, "idle", ["work"])

    async def scenario() -> None:
        async with working(mongo_uri, database_name, mongo, app) as bench:
            with bench.backed_up():
                await bench.client.publish_many([TaskSpec("work", {}, key=f"{number}") for number in range(BACKLOG)])
            await until(lambda: bench.count("SUCCESS") == BACKLOG, message="all are done")

    asyncio.run(scenario())
    assert in_vain == 1
