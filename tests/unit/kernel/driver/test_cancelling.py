"""A cancellation that is dropped on its way is repeated."""

from __future__ import annotations

import asyncio

import pytest

from mtask.kernel.driver.failover import cancel
from tests.mongo import PATIENCE


async def _ask_again(event: asyncio.Event) -> None:
    """Wait as the driver does while it looks for a server: after each wait, it looks and waits again."""
    while True:
        await asyncio.wait_for(event.wait(), PATIENCE)
        event.clear()


@pytest.mark.parametrize("steps", range(6))
async def test_call_that_is_cancelled_at_any_step_of_the_end_of_a_wait_ends(steps: int) -> None:
    event = asyncio.Event()
    asking = asyncio.create_task(_ask_again(event))
    await asyncio.sleep(0)
    event.set()
    for _ in range(steps):
        await asyncio.sleep(0)
    async with asyncio.timeout(PATIENCE):
        await cancel(asking)
    assert asking.cancelled()


async def test_call_that_has_ended_keeps_its_result() -> None:
    done = asyncio.create_task(asyncio.sleep(0, "result"))
    await done
    await cancel(done)
    assert done.result() == "result"
