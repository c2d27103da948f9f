"""The rest of a worker's change stream: while a backlog keeps the worker busy, it looks at intervals instead."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from mtask import App, Context, TaskSpec
from mtask.kernel.driver.stores import SyncStore
from mtask.kernel.operations import change_stream as wakeups
from mtask.kernel.operations.change_stream import Density
from mtask.kernel.worker.discovery import fetch as batches
from mtask.kernel.worker.discovery import fetch_loop as scans
from mtask.kernel.worker.discovery import stream
from tests import build
from tests.integration.worker_harness import Bench, Working, set_queue_capacity
from tests.mongo import until

#: So that nothing is found by a regular scan: each of them is half of it apart.
_FAR = timedelta(hours=1)
BACKLOG = 200


class Gate:
    """Handlers that wait until the test lets them end."""

    def __init__(self) -> None:
        self.app = App()
        self.started: list[str] = []
        self.ended: list[str] = []
        self.is_open = asyncio.Event()

        @self.app.task
        async def work(context: Context) -> None:
            self.started.append(context.task.key)
            try:
                await self.is_open.wait()
            finally:
                self.ended.append(context.task.key)


@pytest.fixture
def dense(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any traffic counts as dense, a few tasks are a backlog, and looks follow each other quickly."""
    monkeypatch.setattr(wakeups, "DENSE_FROM", 0.0)
    monkeypatch.setattr(wakeups, "DENSE_UNTIL", 0.0)
    set_queue_capacity(monkeypatch, 40)
    monkeypatch.setattr(stream, "FULL_EVERY", 1_000_000)
    monkeypatch.setattr(stream, "INTERVAL", 0.05)
    for module in (scans, batches, stream):
        monkeypatch.setattr(module, "HORIZON", _FAR)


@asynccontextmanager
async def resting(working: Working, gate: Gate, concurrency: int = 2, **options: Any) -> AsyncIterator[Bench]:
    """Run a worker whose handlers are held, with a backlog, and whose stream rests. Its full scans come no more."""
    async with working(gate.app, concurrency=concurrency, **options) as bench:
        # No ping tells of the end of a run.
        rare: Any = {"worker_timeout": 7200, "ping_interval": 3600}
        await bench.client.publish_many([TaskSpec("work", {}, key=f"{number}", **rare) for number in range(BACKLOG)])
        loop = bench.worker.parts.stream
        bench.worker.parts.scans.ask_full()
        await until(lambda: not loop.is_open, message="the stream rests")
        await until(lambda: len(gate.started) == concurrency, message="the slots are full")
        try:
            yield bench
        finally:
            gate.is_open.set()


@pytest.mark.usefixtures("dense")
async def test_run_is_ended_while_the_stream_rests(working: Working) -> None:
    gate = Gate()
    async with resting(working, gate) as bench:
        key = gate.started[0]
        await bench.client.cancel("work", key)
        await until(lambda: key in gate.ended, message="the run has ended")
        await bench.status(f"work:{key}", "CANCELED")
        assert not bench.worker.parts.stream.is_open


@pytest.mark.usefixtures("dense")
async def test_pauses_and_orders_are_heard_while_the_stream_rests(working: Working) -> None:
    gate = Gate()
    async with resting(working, gate, heartbeat_interval=timedelta(minutes=5)) as bench:
        await bench.client.set_worker("w1", concurrency=5)
        await until(lambda: len(gate.started) == 5, message="three more are taken")
        # It returns when the worker has confirmed the pause.
        await bench.client.pause(queue="default", timeout=timedelta(seconds=60))
        await bench.client.set_worker("w1", concurrency=9)
        await until(lambda: bench.worker.parts.scope.vitals.concurrency == 9, message="the order is heard")
        assert len(gate.started) == 5


@pytest.mark.usefixtures("dense")
async def test_urgent_task_and_lapsed_run_overtake_the_backlog_while_the_stream_rests(working: Working) -> None:
    gate = Gate()
    async with resting(working, gate) as bench:
        await bench.client.publish("work", key="urgent", priority=5)
        await bench.client.publish("work", key="lapsed")
        _begin_elsewhere(bench, "work:lapsed")
        parts = bench.worker.parts
        await until(lambda: "work:urgent" in parts.queue, message="the urgent task is found")
        found = parts.queue._entries
        await until(lambda: "work:lapsed" in found and found["work:lapsed"].is_begun, message="the lapse is found")
        # One after the other: two claims that are under way at once may be answered in either order.
        await bench.client.set_worker("w1", concurrency=3)
        await until(lambda: len(gate.started) == 3, message="one more is taken")
        await bench.client.set_worker("w1", concurrency=4)
        await until(lambda: len(gate.started) == 4, message="a further one is taken")
        assert gate.started[2:] == ["lapsed", "urgent"]


@pytest.mark.usefixtures("dense")
async def test_lapsed_run_that_a_scan_finds_again_stays_in_the_queue(working: Working) -> None:
    gate = Gate()
    async with resting(working, gate) as bench:
        await bench.client.publish("work", key="lapsed")
        _begin_elsewhere(bench, "work:lapsed")
        inbox, queue = bench.worker.parts.inbox, bench.worker.parts.queue
        await until(lambda: any(entry.is_begun for entry in queue._entries.values()), message="the lapse is found")
        document = bench.tasks.find_one({"_id": "work:lapsed"})
        assert document is not None
        inbox.push("work:lapsed", document)
        assert "work:lapsed" in queue
        # One that was taken over, or closed, meanwhile is read again.
        for changed in ({"next_preempt_time": datetime.now(UTC)}, {"status": "INIT"}):
            await until(lambda: "work:lapsed" in queue, message="it is read")
            inbox.push("work:lapsed", {**document, "task_state": {**document["task_state"], **changed}})
            assert "work:lapsed" not in queue


def _begin_elsewhere(bench: Bench, task_id: str) -> None:
    """Write a run of a worker that has died, whose lease has just lapsed."""
    now = datetime.now(UTC)
    lapsed = now - timedelta(seconds=1)
    run = build.run("RUNNING", now - timedelta(seconds=2), lapsed, run_id="gone-1", worker_id="gone")
    state = {
        "task_state.status": "RUNNING",
        "task_state.worker_states": [run],
        "task_state.next_preempt_time": lapsed,
        "quiet_time": now,
    }
    assert bench.tasks.update_one({"_id": task_id}, {"$set": state}).modified_count == 1


@pytest.mark.usefixtures("dense")
async def test_schedule_that_is_added_while_the_stream_rests_fires(working: Working) -> None:
    gate = Gate()
    async with resting(working, gate) as bench:
        await bench.client.add_schedule("soon", "work", timedelta(seconds=1))
        await until(lambda: bench.tasks.count_documents({}) > BACKLOG, message="it has published a task")


@pytest.mark.usefixtures("dense")
async def test_stream_is_open_again_after_the_backlog_and_misses_nothing(working: Working) -> None:
    gate = Gate()
    async with resting(working, gate) as bench:
        gate.is_open.set()
        await until(lambda: bench.count("SUCCESS") == BACKLOG, message="the backlog is done")
        await bench.scanned()
        bench.stop_scans()
        await bench.client.publish("work", key="later")
        await bench.status("work:later", "SUCCESS")


async def test_stream_that_waits_for_long_is_interrupted_when_a_backlog_has_come(
    working: Working, store: SyncStore, dense: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The backlog comes by a scan, so that no event ends the wait of the stream."""
    monkeypatch.setattr(wakeups, "MAX_AWAIT_MS", dict.fromkeys(Density, 300_000))
    monkeypatch.setattr(wakeups, "WINDOW", 1e9)  # only the reads of the test tell how dense writes are
    interrupt, interrupted = wakeups.Stream.interrupt, []

    async def noted(self: wakeups.Stream) -> None:
        interrupted.append(self)
        await interrupt(self)

    monkeypatch.setattr(wakeups.Stream, "interrupt", noted)
    read, told = wakeups.Stream.next, 0
    is_waiting = False

    async def noted_read(self: wakeups.Stream) -> wakeups.Event | None:
        nonlocal told, is_waiting
        is_waiting = True
        event = await read(self)
        is_waiting = False
        told += event is not None
        return event

    monkeypatch.setattr(wakeups.Stream, "next", noted_read)
    gate = Gate()
    async with working(gate.app, concurrency=1) as bench:
        bench.stop_stream()
        await bench.client.publish_many([TaskSpec("work", {}, key=f"{number}") for number in range(BACKLOG)])
        loop = bench.worker.parts.stream
        await until(lambda: told == BACKLOG and is_waiting, message="the stream waits for further events")
        monkeypatch.setattr(wakeups, "WINDOW", 0.01)
        bench.worker.parts.scans.ask_full()
        await until(lambda: not loop.is_open, message="the wait of the stream is over")
        assert interrupted
        gate.is_open.set()
        await until(lambda: bench.count("SUCCESS") == BACKLOG, message="the backlog is done")


async def test_stream_goes_on_where_writes_are_few(
    working: Working, dense: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wakeups, "DENSE_FROM", 1e9)
    monkeypatch.setattr(wakeups, "DENSE_UNTIL", 1e9)
    gate = Gate()
    async with working(gate.app, concurrency=1) as bench:
        await bench.client.publish_many([TaskSpec("work", {}, key=f"{number}") for number in range(BACKLOG)])
        parts = bench.worker.parts
        parts.scans.ask_full()
        await until(lambda: parts.scans.is_in_backlog and gate.started, message="there is a backlog")
        key = gate.started[0]
        await bench.client.cancel("work", key)
        await until(lambda: key in gate.ended, message="the event of the order has come")
        assert parts.stream.is_open
        gate.is_open.set()
