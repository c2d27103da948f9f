"""Runs that wait for an executor start in their order, and not as they came."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from mtask.features.isolation import pool
from mtask.kernel.worker.running.run import HeldRun
from tests.integration.features.isolation.bench import Isolated, Isolating
from tests.mongo import Client as Mongo
from tests.mongo import until


async def put_in_line(it: Isolated, name: str, priority: int, count: int) -> None:
    """Publish a task, and wait until so many runs wait for an executor."""
    await it.publish(name, f"{priority}", {"folder": str(it.folder)}, priority=priority)
    await until(lambda: len(it.executors._waiting) == count, message="it waits")


@settings(max_examples=2, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
@given(priorities=st.permutations(range(6)))
def test_an_executor_takes_the_first_in_order_of_the_runs_that_wait_for_it(
    isolating: Isolating, database_name: str, mongo: Mongo, tmp_path: Path, priorities: list[int]
) -> None:
    starts, begins = list[int](), HeldRun.begins

    def begun(run: HeldRun) -> None:
        starts.append(run.option.priority)
        begins(run)

    async def scenario() -> None:
        async with isolating(count=1) as it:
            await it.started(await it.publish("hold", "first", {"folder": str(tmp_path)}, priority=9))
            room = it.bench.worker.parts.queue._isolated
            assert room is not None
            setattr(room, "count", lambda: 10)  # noqa: B010 as if handlers had been quick until now
            for count, priority in enumerate(priorities, start=1):
                await put_in_line(it, ("hold", "hold_async")[count % 2], priority, count)
            it.open_gate()
            await until(lambda: it.bench.count("SUCCESS") == 7, message="all ended")

    for left in tmp_path.iterdir():  # of the example before
        left.unlink()
    mongo[database_name]["tasks"].delete_many({})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pool, "PATIENCE", 600.0)
        patch.setattr(HeldRun, "begins", begun)
        asyncio.run(scenario())
    assert starts == [9, 5, 4, 3, 2, 1, 0]
