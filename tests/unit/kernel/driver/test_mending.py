"""The driver's lock is free after a call has waited for a server, whenever the call is given up."""

from __future__ import annotations

import asyncio

import pymongo.asynchronous.pool
import pymongo.asynchronous.topology
import pymongo.lock
import pytest

from mtask.kernel.driver.failover import mend_waits, wait_for_condition
from tests.mongo import PATIENCE

#: The most turns of the event loop that the end of a wait takes.
_STEPS = 12


@pytest.fixture(autouse=True)
def mended() -> None:
    """Let the driver wait as a store makes it."""
    mend_waits()


class Driver:
    """A lock of the driver, and calls that wait for a change of what it guards."""

    def __init__(self) -> None:
        self.lock = pymongo.lock._async_create_lock()
        self.condition = pymongo.lock._async_create_condition(self.lock)
        self.told: list[bool] = []

    async def call(self, limit: float) -> None:
        async with self.lock:
            self.told.append(await pymongo.lock._async_cond_wait(self.condition, limit))

    async def hold(self, steps: int, *, notify: int = 0) -> None:
        """Hold the lock for some turns of the loop, as the driver's monitor does."""
        async with self.lock:
            self.condition.notify(notify)
            for _ in range(steps):
                await asyncio.sleep(0)

    async def waiting(self, limit: float = PATIENCE) -> asyncio.Task[None]:
        """Return a call that waits."""
        call = asyncio.create_task(self.call(limit))
        for _ in range(_STEPS):
            await asyncio.sleep(0)
        assert not self.lock.locked()
        return call

    async def assert_free(self) -> None:
        async with asyncio.timeout(PATIENCE):
            async with self.lock:
                pass
            for _ in range(_STEPS):
                await asyncio.sleep(0)
        assert not self.lock.locked()


@pytest.mark.parametrize("times", [1, 2, 3])
@pytest.mark.parametrize("steps", range(_STEPS))
async def test_lock_is_free_whenever_a_call_is_cancelled_that_was_woken(steps: int, times: int) -> None:
    driver = Driver()
    call = await driver.waiting()
    holder = asyncio.create_task(driver.hold(_STEPS, notify=1))
    for _ in range(steps):
        await asyncio.sleep(0)
    for _ in range(times):
        call.cancel()
        await asyncio.sleep(0)
    await asyncio.wait((call, holder), timeout=PATIENCE)
    holder.result()
    assert call.cancelled() or call.result() is None
    await driver.assert_free()


async def test_lock_is_free_if_a_call_is_cancelled_after_its_time_limit_while_another_holds_the_lock() -> None:
    driver = Driver()
    call = await driver.waiting(0.01)
    async with driver.lock:
        await asyncio.sleep(0.02)  # the loop runs timers in their order
        call.cancel()
        for _ in range(_STEPS):
            await asyncio.sleep(0)
        assert not call.done(), "it would give back a lock that it does not hold"
    await asyncio.wait((call,), timeout=PATIENCE)
    assert call.cancelled()
    await driver.assert_free()


async def test_wait_tells_whether_it_was_woken_or_timed_out() -> None:
    driver = Driver()
    woken = await driver.waiting()
    await driver.hold(0, notify=1)
    await woken
    await driver.call(0.01)
    await driver.call(-1)
    assert driver.told == [True, False, False]
    await driver.assert_free()


@pytest.mark.parametrize("steps", range(_STEPS))
async def test_call_that_is_cancelled_when_it_is_woken_wakes_another(steps: int) -> None:
    driver = Driver()
    first, second = await driver.waiting(), await driver.waiting()
    await driver.hold(2, notify=1)
    for _ in range(steps):
        await asyncio.sleep(0)
    first.cancel()
    await asyncio.wait((first,), timeout=PATIENCE)
    if first.cancelled():
        await asyncio.wait((second,), timeout=PATIENCE)
    second.cancel()
    await asyncio.wait((second,), timeout=PATIENCE)
    assert driver.told == [True], "one was woken, and one was told"
    await driver.assert_free()


@pytest.mark.parametrize("steps", range(_STEPS))
async def test_cancelled_call_that_was_just_woken_is_cancelled(steps: int) -> None:
    driver = Driver()
    first, second = await driver.waiting(), await driver.waiting()
    first.cancel()  # it wakes the second one in its place
    for _ in range(steps):
        await asyncio.sleep(0)
    is_done = second.done()
    second.cancel()
    await asyncio.wait((first, second), timeout=PATIENCE)
    assert second.cancelled() or is_done
    await driver.assert_free()


async def test_driver_waits_in_this_way() -> None:
    for module in (pymongo.lock, pymongo.asynchronous.pool, pymongo.asynchronous.topology):
        assert vars(module)["_async_cond_wait"] is wait_for_condition


async def test_error_and_message_of_a_cancellation_pass() -> None:
    driver = Driver()
    with pytest.raises(RuntimeError, match="un-acquired lock"):
        await wait_for_condition(driver.condition, PATIENCE)
    call = await driver.waiting()
    call.cancel("by a scope")
    with pytest.raises(asyncio.CancelledError, match="by a scope"):
        await call
