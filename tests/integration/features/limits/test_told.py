"""What clients are told of the permits that real workers hold, and of the tasks that wait in them."""

from __future__ import annotations

import asyncio
from datetime import timedelta

from mtask import App
from mtask.features.limits.doctor import PermitHolder, PermitUse, PermitWaiter
from tests.integration.worker_harness import Working
from tests.mongo import until


async def test_two_workers_are_told_by_who_holds_the_permit_and_who_waits(working: Working) -> None:
    app, gate = App(), asyncio.Event()

    @app.task
    async def work() -> None:
        await gate.wait()

    async with working(app, worker_id="w1") as bench, working(app, worker_id="w2"):
        await bench.client.limit("default", concurrency=1)
        await bench.client.publish("work", key="first")
        await bench.status("work:first", "RUNNING")
        for key, priority in (("low", 0), ("high", 5), ("higher", 9)):
            await bench.client.publish("work", key=key, priority=priority)

        async def told() -> list[PermitUse]:
            uses = await bench.client.permits("default")
            return [use for use in uses if [waiter.task_cnt for waiter in use.waiters] == [3, 3]]

        (use,) = await until(told, message="both workers are listed")
        holder = bench.document("work:first")["task_state"]["worker_states"][0]["worker_id"]
        assert use.holders == (PermitHolder("work:first", holder, False),)
        assert (use.running_cnt, use.start_cnt) == (1, 0)
        assert use.waiters == (PermitWaiter("w1", 3, "work:higher"), PermitWaiter("w2", 3, "work:higher"))
        reasons = (await bench.client.inspect("work:low")).reasons
        assert [reason.message for reason in reasons] == [
            "the limit of the queue 'default', 1 at once, is reached: "
            f"work:first (running in {holder}) holds its permit",
            "2 better tasks wait for a permit of the queue 'default' before it, in w1, w2",
        ]
        assert [(await bench.client.position("work", key)).ahead for key in ("low", "high", "higher")] == [2, 1, 0]
        findings = await bench.client.diagnose(patience=timedelta(milliseconds=1))
        told_of = {found.check: found.level.value for found in findings if found.check in ("due tasks", "permits")}
        assert told_of == {"due tasks": "OK"}
        gate.set()
        for key in ("low", "high", "higher"):
            await bench.status(f"work:{key}", "SUCCESS")
