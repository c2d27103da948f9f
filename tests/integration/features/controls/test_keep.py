"""What a queue keeps of its finished tasks: what is called off removes nothing once the call has returned."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any

import pytest

from mtask import App, Client, TaskSpec
from mtask.errors import ControlUnconfirmed
from mtask.features.controls import keep as upkeep
from mtask.kernel.document.status import TaskStatus
from mtask.kernel.driver.stores import SyncStore
from mtask.kernel.operations import change
from mtask.kernel.operations.change import BATCH
from mtask.kernel.statements import filters
from tests.clients import server_now
from tests.integration.stores import register
from tests.integration.worker_harness import Working, between
from tests.mongo import until


def finished(client: Client, store: SyncStore, count: int) -> None:
    """Leave so many tasks that have succeeded."""
    client.publish_many(TaskSpec("done", key=str(number)) for number in range(count))
    ended = {"task_state.status": "SUCCESS", "task_state.finish_time": "$$NOW"}
    store.tasks.update_many({}, [{"$set": ended}, {"$unset": "task_state.next_preempt_time"}])


async def test_what_is_called_off_amid_its_batches_removes_no_further_one(
    working: Working, client: Client, store: SyncStore
) -> None:
    app = App()

    @app.task
    async def work() -> None: ...

    finished(client, store, 3 * BATCH)
    async with working(app) as bench:
        opened = asyncio.Event()

        async def wait() -> None:
            await opened.wait()

        removing = between(bench.store, "remove_older", before=wait)
        keeping_none = asyncio.create_task(asyncio.to_thread(client.keep, "default", success=0))
        await until(lambda: removing.seen_cnt, message="the first batch is under way")
        calling_off = asyncio.create_task(asyncio.to_thread(client.keep, "default"))
        await until(lambda: not bench.worker.parts.features.controls.keeps, message="heard of it")
        opened.set()
        await calling_off
        await keeping_none
        assert bench.count("SUCCESS") == 2 * BATCH
        await asyncio.to_thread(client.keep, "default", success=2 * BATCH - 1)
        await until(lambda: bench.count("SUCCESS") < 2 * BATCH, message="looked again")
        assert bench.count("SUCCESS") == 2 * BATCH - 1


def test_the_newest_by_their_ends_are_kept(client: Client, store: SyncStore) -> None:
    """However old they are, and however many of the other kind have ended since."""
    now = server_now(store)
    ends = {"a": "SUCCESS", "b": "SUCCESS", "c": "SUCCESS", "d": "FAIL", "e": "CANCELED"}
    for place, (key, status) in enumerate(ends.items()):
        client.publish("done", key=key)
        ended = {"task_state.status": status, "task_state.finish_time": now - timedelta(minutes=place)}
        store.tasks.update_one({"key": key}, {"$set": ended, "$unset": {"task_state.next_preempt_time": ""}})
    store.run(change.remove_older("default", [TaskStatus.SUCCESS], 2))
    store.run(change.remove_older("default", [TaskStatus.FAIL, TaskStatus.CANCELED], 1))
    assert sorted(task.key for task in client.find()) == ["a", "b", "d"]


async def test_a_task_that_was_run_again_amid_a_batch_stays(
    working: Working, client: Client, store: SyncStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upkeep, "INTERVAL", 1.0)  # else the second look comes after 30 to 90 s
    app = App()

    @app.task
    async def done() -> None: ...

    finished(client, store, 3)
    async with working(app) as bench:

        async def run_again() -> None:
            await bench.client.rerun("done", "0")
            await bench.status("done:0", "SUCCESS")

        between(bench.store, "remove_older", amid=run_again)
        await asyncio.to_thread(client.keep, "default", success=1)
        await until(lambda: client.count() < 3, message="removed")
        # It is the newest now. So the next look removes the task 2.
        await until(lambda: [task.key for task in client.find()] == ["0"], message="only the task that ran again")


async def test_a_batch_that_comes_when_the_heartbeat_has_run_out_removes_nothing(
    working: Working, client: Client, store: SyncStore
) -> None:
    app = App()
    beats: dict[str, Any] = {"heartbeat_interval": timedelta(hours=1), "heartbeat_timeout": timedelta(seconds=4)}

    @app.task
    async def done() -> None: ...

    finished(client, store, 2)
    async with working(app, **beats) as bench:

        async def wait() -> None:
            until_when = (bench.registry.find_one() or {})["heartbeat_expire_time"]
            await until(lambda: server_now(store) > until_when, message="run out")

        removing = between(bench.store, "remove_older", before=wait)
        bench.worker.parts.pinger.beat_now()
        keeping = asyncio.create_task(asyncio.to_thread(client.keep, "default", success=0))
        await until(lambda: removing.seen_cnt, message="a batch is under way")
        await bench.worker.parts.features.retention.until_landed()
        await keeping
        assert bench.count("SUCCESS") == 2


def test_nothing_is_removed_when_the_heartbeat_has_run_out(client: Client, store: SyncStore) -> None:
    finished(client, store, 2)
    now = server_now(store)
    for until_when, left in ((now, 2), (now + timedelta(minutes=1), 0)):
        store.run(change.remove_older("default", [TaskStatus.SUCCESS], 0, [filters.in_time(until_when)]))
        assert client.count() == left


def test_a_live_worker_that_does_not_answer_is_named(client: Client, store: SyncStore) -> None:
    register(store, "silent", ["done"])
    with pytest.raises(ControlUnconfirmed, match="silent"):
        client.keep("default", success=5, timeout=0.2)
    assert [control.keep_success for control in client.controls()] == [5]
