"""What no task may do, whatever it holds or asks for: crowd out others, keep a place, storm the server with pings."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any

import pytest

from mtask import App, Client, Context, Retry, TaskSpec
from mtask.errors import MAX_DELAY
from mtask.kernel.driver.stores import SyncStore
from tests.integration.worker_harness import Working, set_queue_capacity
from tests.mongo import until


async def test_tasks_that_are_left_alone_do_not_fill_the_scans(
    working: Working, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_queue_capacity(monkeypatch, 40)
    app = App()

    @app.task
    async def work() -> None: ...

    async with working(app, concurrency=5) as bench:
        bench.stop_stream()  # it told of those that come now, and not of what was there before
        held_up = [f"head-{number}" for number in range(200)]
        for key in held_up:  # as where they could not be claimed in time: someone's open transaction
            bench.worker.parts.quarantine.leave_alone(f"work:{key}", 600.0)
        await asyncio.to_thread(client.publish_many, [TaskSpec("work", {}, key=key, priority=9) for key in held_up])
        await asyncio.to_thread(client.publish_many, [TaskSpec("work", {}, key=f"good-{n}") for n in range(60)])
        bench.worker.parts.scans.ask_full()
        await until(lambda: bench.count("SUCCESS") == 60, message="what stands behind is done")
        assert bench.count("INIT") == len(held_up)


async def test_run_that_cannot_be_started_keeps_no_place(working: Working, client: Client) -> None:
    app = App()

    @app.task
    async def work() -> None: ...

    client.limit("default", concurrency=1)
    async with working(app) as bench:
        known: Any = bench.worker.parts.adoption._handlers
        handlers = dict(known)
        known.clear()
        await asyncio.to_thread(client.publish, "work", {}, key="without a handler")
        state = await bench.status("work:without a handler", "FAIL")
        assert "cannot be run here" in state["worker_states"][0]["fail_reason"]
        await until(lambda: not bench.worker.parts.features.limits._held, message="its place is let go")
        known.update(handlers)
        await asyncio.to_thread(client.publish, "work", {}, key="next")
        await bench.status("work:next", "SUCCESS")
        await until(lambda: not bench.worker.parts.features.limits._held, message="and this one's")


async def test_stored_task_that_asks_for_a_storm_of_pings_gets_as_many_as_are_sensible(
    working: Working, client: Client, store: SyncStore
) -> None:
    app = App()
    gate, begun = asyncio.Event(), asyncio.Event()

    @app.task
    async def work() -> None:
        begun.set()
        await gate.wait()

    delay = timedelta(seconds=2)
    async with working(app) as bench:
        await asyncio.to_thread(client.publish, "work", {}, key="stormy", delay=delay)
        # As an older version took it.
        changed = store.tasks.update_one({"_id": "work:stormy"}, {"$set": {"task_option.ping_interval_ms": 1}})
        assert changed.modified_count == 1
        await begun.wait()
        run: Any = bench.worker.parts.scope.ledger.held_run("work:stormy")
        assert run.ping_interval == 0.1
        lease = bench.state("work:stormy")["worker_states"][0]["ping_expire_time"]
        await until(
            lambda: bench.state("work:stormy")["worker_states"][0]["ping_expire_time"] > lease, message="a ping"
        )
        assert run.ping_interval == 0.1
        gate.set()
        await bench.status("work:stormy", "SUCCESS")


async def test_retry_whose_delay_was_changed_beyond_all_bounds_waits_ten_years(
    working: Working, client: Client
) -> None:
    app = App()

    @app.task
    async def work(context: Context) -> None:
        verdict = Retry(0, "much later")
        verdict.delay = timedelta.max
        raise verdict

    @app.task
    async def refused() -> None:
        raise Retry(timedelta(days=3_000_000))

    async with working(app) as bench:
        await asyncio.to_thread(client.publish, "work", {}, key="k")
        await asyncio.to_thread(client.publish, "refused", {}, key="k", max_retries=0)
        state = await bench.status("refused:k", "FAIL")
        assert "3000000 days: use 0 to 10 years" in state["worker_states"][0]["fail_reason"]
        await until(lambda: bench.state("work:k")["worker_states"], message="claimed")
        await until(lambda: bench.state("work:k")["worker_states"][0]["status"] == "CANCELED", message="given back")
        run = bench.state("work:k")["worker_states"][0]
        assert run["retry_time"] - run["fail_time"] == MAX_DELAY
