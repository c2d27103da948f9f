"""What a dead worker leaves behind is taken up again before new work of its priority, however much of that waits."""

from __future__ import annotations

import asyncio
from datetime import timedelta

import pytest

from mtask import App, TaskSpec
from mtask.kernel.driver.stores import SyncStore
from mtask.kernel.operations import claim as claims
from tests.integration.worker_harness import Working, set_horizon, set_queue_capacity
from tests.mongo import PATIENCE


@pytest.mark.parametrize("lease_ms", [1_000, 3_000], ids=["lease-within-the-horizon", "lease-beyond-it"])
async def test_lapsed_task_goes_before_a_backlog_that_is_longer_due(
    working: Working, store: SyncStore, monkeypatch: pytest.MonkeyPatch, lease_ms: int
) -> None:
    set_queue_capacity(monkeypatch, 50)
    set_horizon(monkeypatch, timedelta(seconds=2))
    app = App()

    @app.task
    async def work() -> None:
        await asyncio.sleep(0.03)

    async with working(app, concurrency=2) as bench:
        with bench.backed_up():
            await bench.client.publish("work", key="begun", worker_timeout=lease_ms / 1000, ping_interval=0.5)
            await asyncio.to_thread(store.run, claims.claim(["work:begun"], "dead", "token"))
            await bench.client.publish_many([TaskSpec("work", key=str(number)) for number in range(800)])
        await bench.status("work:begun", "SUCCESS", PATIENCE)
        dead, rescue = bench.state("work:begun")["worker_states"]
        assert (dead["status"], rescue["status"]) == ("TIMEOUT", "SUCCESS")
        between = {"$gt": dead["ping_expire_time"], "$lt": rescue["claim_time"]}
        overtaken = bench.tasks.count_documents({"task_state.worker_states": {"$elemMatch": {"claim_time": between}}})
        assert bench.count("INIT") > 100, "there was more that had waited longer"
        assert overtaken < 60, "a second's work at most: what was under way, and the next regular scan"
