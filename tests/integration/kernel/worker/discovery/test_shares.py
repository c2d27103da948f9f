"""How several workers share a backlog: by the buckets of its tasks, which the server computes as they do."""

from __future__ import annotations

import random
from collections.abc import Callable, Coroutine
from datetime import UTC, datetime, timedelta
from time import monotonic
from typing import Any

import pytest

from mtask import App, TaskSpec
from mtask.errors import DatabaseUnavailable
from mtask.kernel.document.identity import BUCKET_CNT, bucket_of, task_id_of
from mtask.kernel.document.options import TaskOption
from mtask.kernel.driver.operation import Operation
from mtask.kernel.driver.stores import SyncStore
from mtask.kernel.operations import find_due as finding
from mtask.kernel.operations import publish as publishing
from mtask.kernel.operations.publish import NewTask, Policy
from mtask.kernel.statements import expressions as x
from mtask.kernel.statements.filters import of_shares
from mtask.kernel.worker.discovery import fetch as batches
from mtask.kernel.worker.discovery import fetch_loop as scans_module
from mtask.kernel.worker.discovery.fleet import Peers
from tests.explaining import examined_by
from tests.integration.stores import ready_store, register
from tests.integration.worker_harness import Working, set_horizon, set_queue_capacity
from tests.mongo import Client, until

BACKLOG = 400


def test_the_server_puts_each_id_into_the_slot_that_a_worker_does(mongo: Client, database_name: str) -> None:
    chance = random.Random(5)
    letters = "aZ09:./_- \0éß€漢\U0001f600"
    ids = {f"work:{number}" for number in range(1_000)} | {"work:" + "k" * 512, "", "a"}
    ids |= {"".join(chance.choices(letters, k=chance.randrange(1, 90))) for _ in range(2_000)}
    mongo[database_name]["ids"].insert_many({"_id": task_id} for task_id in ids)
    rows = mongo[database_name]["ids"].aggregate([{"$project": {"bucket": x.bucket()}}])
    found = {row["_id"]: row["bucket"] for row in rows}
    assert found == {task_id: bucket_of(task_id) for task_id in ids}
    assert len(set(found.values())) > 0.9 * BUCKET_CNT


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
        scan = store.run(finding.scan(["default"], worker["names"], worker["_id"], 0, 1_000, also=[shares]))
        brought = [document["_id"] for document in scan.documents]
        assert all(peers.rank(task_id, task_id.partition(":")[0]) == 0 for task_id in brought)
        found += brought
    assert sorted(found) == sorted(f"{name}:{number}" for name in names for number in range(60))


class Scans:
    """Stands in for `finding.scan`: notes what each scan brought, and whether it asked for a share."""

    def __init__(self, failure: Exception | None = None) -> None:
        self._scan = finding.scan
        #: What a scan for a share raises.
        self._failure = failure
        self.brought: list[list[str]] = []
        self.shares: list[list[str]] = []
        #: The number of scans that went on behind the position of the scan before.
        self.further_cnt = 0
        self.vain_cnt = 0

    def __call__(self, *given: Any, **others: Any) -> Operation[finding.Scan]:
        is_share = bool(others.get("also"))
        assert (others.get("timeout") is not None) == is_share
        if is_share and self._failure is not None:
            self.vain_cnt += 1
            raise self._failure
        found = yield from self._scan(*given, **others)
        (self.shares if is_share else self.brought).append([document["_id"] for document in found.documents])
        is_further = others.get("position") is not None
        self.further_cnt += is_further
        self.vain_cnt += is_share and found.is_complete and not is_further
        return found


Drain = Callable[[Scans], Coroutine[Any, Any, Peers]]


@pytest.fixture
def drain(working: Working, monkeypatch: pytest.MonkeyPatch) -> Drain:
    """Have a worker with a small queue do a backlog, with tasks among it that are not yet due; return its peers."""
    app = App()

    @app.task
    async def work() -> None:
        return None

    async def drained(scans: Scans) -> Peers:
        set_queue_capacity(monkeypatch, 40)
        set_horizon(monkeypatch, timedelta(minutes=5))  # none is found by a regular scan
        monkeypatch.setattr(finding, "scan", scans)
        async with working(app) as bench:
            with bench.backed_up():
                later = [TaskSpec("work", {}, key=f"later-{n}", delay=timedelta(minutes=4)) for n in range(20)]
                due = [TaskSpec("work", {}, key=f"{number}") for number in range(BACKLOG)]
                await bench.client.publish_many([*later, *due])
            await until(lambda: bench.count("SUCCESS") == BACKLOG, message="all that are due are done")
            return bench.worker.parts.ranks._peers

    return drained


async def test_worker_alone_asks_for_no_share(drain: Drain) -> None:
    scans = Scans()
    await drain(scans)
    assert len(scans.brought) > 5
    assert scans.shares == []


async def test_worker_asks_for_its_share_while_there_is_more_and_takes_what_others_leave(
    store: SyncStore, drain: Drain
) -> None:
    register(store, "idle", ["work"])
    scans = Scans()
    peers = await drain(scans)
    found = {task_id for task_ids in scans.shares for task_id in task_ids}
    assert {peers.rank(task_id, "work") for task_id in found} == {0}
    assert len(found) > BACKLOG / 4
    assert scans.further_cnt > 0


async def test_what_a_scan_brings_for_a_share_of_former_ranks_is_ranked_anew(
    working: Working, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scans_module, "HORIZON", timedelta(minutes=5))  # no scan of the worker's own comes between
    app = App()
    app.task(name="work")(lambda: None)
    others = [{"_id": "w2", "names": ["work"], "queues": ["default"], "concurrency": 1, "appeal_cnt": 0}]
    async with working(app) as bench:
        parts = bench.worker.parts
        ranks, queue = parts.ranks, parts.queue

        async def ranks_of_found(version: int) -> set[int]:
            """Scan as for a share of the ranks of this version. The first task of a scan is ranked apart."""
            for task_id, _ in queue.names():
                queue.discard(task_id)
            scan = finding.scan(["default"], ["work"], "w1", 0, 40)
            found = await parts.scans._batches.take(scan, share_of=version)
            return {queue._entries[document["_id"]].rank for document in found.documents[1:]}

        with bench.backed_up():
            await bench.client.publish_many([TaskSpec("work", {}, key=f"{number}") for number in range(40)])
            await until(lambda: len(queue) == 40, message="the stream has told of all")
            version = ranks.version
            await ranks.take(others)
            assert await ranks_of_found(version) == {0, 1}
            assert await ranks_of_found(ranks.version) == {0}  # as if all of them were in its share


@pytest.mark.fresh_database  # a malformed task of another test would have made the index one of arrays, for good
def test_scan_behind_a_position_examines_only_what_it_brings(mongo: Client, database_name: str) -> None:
    store = ready_store(mongo, database_name)
    for number in range(200):
        task_id, option = task_id_of("work", f"{number}"), TaskOption(priority=number % 2).stored()
        store.run(publishing.publish(NewTask(task_id, "work", f"{number}", "default", None, option, None), Policy()))
    every = store.run(finding.scan(["default"], ["work"], "w1", 0, 1_000)).documents
    assert len(every) == 200
    position = finding.behind(every[29])
    operation = finding.scan(["default"], ["work"], "w1", 0, 20, position=position)
    found, (examined,) = examined_by(store, operation)
    # Tasks of the same time may come before the one that gave the position.
    first = every.index(found.documents[0])
    assert first <= 29
    assert finding.behind(every[first]) == position
    assert found.documents == every[first : first + 20]
    assert examined.documents == 20
    assert examined.keys < 20 + 15  # a key for each place where the server looks in vain
    assert "SORT" not in examined.stages


def orders_of(scan: finding.Scan) -> list[tuple[int, datetime]]:
    return [(-found["task_option"]["priority"], found["task_state"]["next_preempt_time"]) for found in scan.documents]


@pytest.mark.fresh_database  # a malformed task of another test would have made the index one of arrays, for good
@pytest.mark.parametrize("horizon_ms", [0, 10_000])
def test_scan_of_many_queues_is_in_order_and_sorts_nothing_on_the_server(
    mongo: Client, database_name: str, horizon_ms: int
) -> None:
    store = ready_store(mongo, database_name)
    queues = [f"q{number}" for number in range(100)]
    for number in range(200):
        task_id, option = task_id_of("work", f"{number}"), TaskOption(priority=number * 7 % 3).stored()
        new = NewTask(task_id, "work", f"{number}", queues[number * 37 % 100], None, option, None)
        store.run(publishing.publish(new, Policy()))
    store.tasks.update_one({"_id": "work:0"}, {"$unset": {"queue": ""}}, bypass_document_validation=True)
    every, all_examined = examined_by(store, finding.scan(queues, ["work"], "w1", horizon_ms, 1_000))
    found = {document["_id"]: document for document in every.documents}
    assert len(found) == (200 if horizon_ms else 199)
    assert every.is_complete
    orders = orders_of(every)
    assert orders == sorted(orders)
    some, some_examined = examined_by(store, finding.scan(queues, ["work"], "w1", horizon_ms, 30))
    assert orders_of(some) == orders[:30]
    assert not some.is_complete
    assert not store.run(finding.scan(queues, ["work"], "w1", horizon_ms, 150)).is_complete
    assert len(some_examined) == 3
    assert sum(each.documents for each in some_examined) <= 3 * 30
    assert all("SORT" not in each.stages for each in [*all_examined, *some_examined])


def test_position_of_a_malformed_task_is_none() -> None:
    moment = datetime(2026, 1, 1, tzinfo=UTC)
    sound = {"task_option": {"priority": 3}, "task_state": {"next_preempt_time": moment}}
    wanted = {"task_option.priority": 3, "task_state.next_preempt_time": {"$gte": moment}}
    assert finding.behind(sound) == wanted
    for broken in ({}, {**sound, "task_option": 1}, {**sound, "task_state": {"next_preempt_time": "soon"}}):
        assert finding.behind(broken) is None


async def test_all_that_is_due_is_looked_for_again_and_again_whoever_it_is_left_to(
    store: SyncStore, drain: Drain, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batches, "MAX_ALL_PAUSE", 0.0)  # each time
    register(store, "idle", ["work"])
    scans = Scans()
    await drain(scans)
    assert len(scans.brought) > 5
    assert scans.shares == []


@pytest.mark.parametrize("failure", [None, DatabaseUnavailable("too slow")], ids=["looked-at-all", "timed-out"])
async def test_share_that_is_done_is_not_looked_for_again_and_again_in_the_others_backlog(
    store: SyncStore, drain: Drain, monkeypatch: pytest.MonkeyPatch, failure: Exception | None
) -> None:
    monkeypatch.setattr(batches, "SHARE_TIMES", 1_000_000)
    if failure is not None:  # as if after its time
        monkeypatch.setattr(batches, "SHARE_TIMEOUT", timedelta(0))
    register(store, "idle", ["work"])
    scans = Scans(failure)
    await drain(scans)
    assert scans.vain_cnt == 1


async def test_helpers_scans_are_apart_by_a_multiple_of_their_duration_within_bounds(
    working: Working, store: SyncStore
) -> None:
    register(store, "other", ["work"])
    app = App()

    @app.task
    async def work() -> None:
        return None

    async with working(app) as bench:
        scans: Any = bench.worker.parts.scans
        await until(lambda: scans._ranks.has_others(["work"]), message="the other worker is known")
        for took, pause in ((0.001, 0.2), (0.15, 1.5), (360.0, 2.0)):
            scans.counts_own, scans.scanned_at, scans._batches.all_took = False, monotonic(), took
            scans._queue.has_more = True
            scans.refill()
            assert scans.scanned_at + pause <= scans.refill_timer.when() <= monotonic() + pause
            scans.refill_timer.cancel()
            scans.refill_timer = None
