"""What a worker takes first, and how it goes on where its collection, its tasks or its place in the registry change."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import pytest

from mtask import App, AsyncClient, Context, TaskSpec
from mtask.errors import WorkerIdInUse
from mtask.kernel.driver.stores import SyncStore
from mtask.kernel.worker.discovery import ready
from mtask.kernel.worker.discovery.fleet import Peers
from mtask.kernel.worker.discovery.reaper import TaskJanitor
from tests.integration.stores import register
from tests.integration.worker_harness import Working, set_horizon, set_queue_capacity
from tests.mongo import PATIENCE, until
from tests.workers import open_stage


async def test_retries_and_tasks_of_a_full_peer_are_not_left_behind_by_a_younger_backlog(
    working: Working, store: SyncStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ready, "PREFERENCE", 0.5)
    peers = Peers("w1")
    peers.update([{"_id": "full", "concurrency": 10, "names": ["work"]}])
    own = [str(number) for number in range(400) if peers.rank(f"work:{number}", "work") == 0][:140]
    others = [str(number) for number in range(400) if peers.rank(f"work:{number}", "work") == 1][:4]
    failing, first, younger = own[:4], own[4:30], own[30:]
    register(store, "full", ["work"])
    app, started = App(), []

    @app.task
    async def work(context: Context) -> None:
        started.append((context.task.key, context.attempt))
        await asyncio.sleep(0.04)
        if context.task.key in failing and context.attempt == 1:
            raise ValueError("once")

    wanted = {(key, 1) for key in others} | {(key, 2) for key in failing}
    async with working(app, concurrency=1) as bench:
        specs = [TaskSpec("work", {}, key=key, retry_delay=0.05) for key in (*failing, *first, *others)]
        soon = [
            TaskSpec("work", {}, key=key, delay=timedelta(milliseconds=300 + 25 * place))
            for place, key in enumerate(younger)
        ]
        await bench.client.publish_many([*specs, *soon])
        # More comes in than one slot can do: there is always a younger task that this worker ranks first for.
        await until(lambda: wanted <= set(started), message="each of them has started")
        assert len(set(started)) < len(own), "they came before the backlog's end"


async def test_tasks_that_are_not_yet_due_do_not_keep_a_due_one_of_lower_priority_waiting(
    working: Working, mongo_uri: str, database_name: str, app: App, store: SyncStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_queue_capacity(monkeypatch, 40)
    set_horizon(monkeypatch, timedelta(minutes=2))
    async with AsyncClient(mongo_uri, database=database_name) as client:
        delay = timedelta(seconds=100)
        high = [TaskSpec("work", {}, key=f"high-{n}", priority=9, delay=delay) for n in range(60)]
        await client.publish_many([*high, TaskSpec("work", {}, key="low")])
    async with working(app) as bench:
        assert bench.worker.parts.queue.capacity == 40
        await bench.status("work:low", "SUCCESS")
        assert bench.count("SUCCESS") == 1


@pytest.mark.parametrize("loss", ["the collection", "its indexes"])
async def test_worker_sets_up_again_what_was_dropped_under_it_and_runs_what_is_published_afterwards(
    working: Working, app: App, monkeypatch: pytest.MonkeyPatch, loss: str
) -> None:
    set_horizon(monkeypatch, timedelta(seconds=1))
    async with working(app) as bench:
        await bench.client.publish("work", {}, key="before")
        await bench.status("work:before", "SUCCESS")
        indexes = set(bench.tasks.index_information())
        if loss == "the collection":
            bench.tasks.drop()
        else:
            bench.tasks.drop_indexes()
        await bench.client.publish("work", {}, key="later", delay=timedelta(seconds=2))  # found by a scan alone
        await bench.client.publish("work", {}, key="now")
        await bench.status("work:now", "SUCCESS")
        await until(lambda: set(bench.tasks.index_information()) == indexes, message="the indexes are back")
        await bench.status("work:later", "SUCCESS")
        assert bench.tasks.options()["validator"]


async def test_update_that_changes_only_the_queue_reaches_the_workers_of_the_new_queue_at_once(
    working: Working, app: App
) -> None:
    async with working(app, queues=["other"]) as bench:
        bench.stop_scans()
        await bench.client.publish("work", {}, key="1")
        result = await bench.client.publish("work", {}, key="1", queue="other", if_exists="update")
        assert result.updated
        await bench.status("work:1", "SUCCESS")


async def test_worker_whose_document_vanished_registers_again_and_goes_on(working: Working, app: App) -> None:
    interval = timedelta(milliseconds=200)
    async with working(app, heartbeat_interval=interval) as bench:
        before = bench.registry.find_one({"_id": "w1"})
        bench.registry.delete_many({})
        after = await until(lambda: bench.registry.find_one({"_id": "w1", "status": "running"}))
        assert before is not None
        assert after is not None
        assert after["incarnation"] == before["incarnation"]
        await bench.client.publish("work", {}, key="1")
        await bench.status("work:1", "SUCCESS")
        assert not bench.life.done()


async def test_worker_whose_id_another_process_took_over_stops_and_says_so(working: Working, app: App) -> None:
    interval = timedelta(milliseconds=200)

    async def lose_the_id() -> None:
        async with working(app, heartbeat_interval=interval) as bench:
            other = {"incarnation": "another", "host": "elsewhere"}
            taken = bench.registry.find_one_and_update({"_id": "w1"}, {"$set": other}, return_document=True)
            await asyncio.wait((bench.life,), timeout=PATIENCE)
            with pytest.raises(WorkerIdInUse):
                await bench.life
            assert taken is not None
            assert bench.registry.find_one({"_id": "w1"}) == taken  # nothing that this worker wrote

    with pytest.raises(WorkerIdInUse):
        await lose_the_id()


def test_process_whose_worker_id_was_taken_over_exits_with_code_5(
    mongo_uri: str, database_name: str, tmp_path: Path
) -> None:
    with open_stage(mongo_uri, database_name, tmp_path) as stage:
        process = stage.start("w1")
        registry = stage.mongo[database_name]["workers"]
        registry.update_one({"_id": "w1"}, {"$set": {"incarnation": "another", "host": "elsewhere"}})
        registry.update_one({"_id": "w1"}, {"$set": {"control.asked_by_test": 1}})  # it beats at once, and learns
        assert process.wait() == 5
        assert "elsewhere" in process.log


@pytest.mark.parametrize("error", [None, RuntimeError("hand-back failed")])
async def test_last_resort_always_exits(
    working: Working, monkeypatch: pytest.MonkeyPatch, error: Exception | None
) -> None:
    app = App()
    exits: list[int] = []

    @app.task
    async def work() -> None:
        await asyncio.sleep(60)

    async with working(app, hard_exit=exits.append) as bench:
        await bench.client.publish("work", {}, key="1")
        await until(lambda: bench.worker.parts.scope.ledger.runs)
        if error is not None:

            def refuse(outcomes: object) -> None:
                raise error

            monkeypatch.setattr(bench.worker.parts.pinger, "hand_back", refuse)
        with suppress(RuntimeError):
            await asyncio.to_thread(bench.worker._exit_hard)
        assert exits == [0]
        assert bench.state("work:1")["worker_states"][0]["status"] == ("RUNNING" if error else "CANCELED")


async def test_worker_looks_for_malformed_tasks_when_its_stream_was_broken(
    working: Working, app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with working(app) as bench:
        looked, look = asyncio.Event(), TaskJanitor.look_for_malformed

        async def noted(janitor: TaskJanitor) -> None:
            await look(janitor)
            looked.set()

        await bench.scanned()
        monkeypatch.setattr(TaskJanitor, "look_for_malformed", noted)
        bench.worker.parts.scans.ask_full()
        await until(looked.is_set, message="a full scan looks for malformed tasks")
