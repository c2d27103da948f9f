"""Calls aside: however many threads handlers hold, with the caller's context, result and error, and cancelled calls."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar

import pytest

from mtask.kernel.worker.process import runtime

_WHO = ContextVar("_WHO", default="nobody")


async def test_call_is_made_though_the_loops_threads_are_all_held() -> None:
    release = threading.Event()
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
    held = asyncio.ensure_future(asyncio.to_thread(release.wait))
    _WHO.set("the caller")
    assert await runtime.to_thread(_WHO.get) == "the caller"
    assert not held.done()
    release.set()
    await held


@pytest.mark.parametrize("error", [ValueError("no"), SystemExit(3)], ids=repr)
async def test_error_of_a_call_is_raised_where_it_is_awaited(error: BaseException) -> None:
    def fail() -> None:
        raise error

    with pytest.raises(type(error)) as raised:
        await runtime.to_thread(fail)
    assert raised.value is error


async def test_cancelled_call_goes_on_to_its_end() -> None:
    release, is_over = threading.Event(), threading.Event()

    def work() -> None:
        release.wait()
        is_over.set()

    call = asyncio.ensure_future(runtime.to_thread(work))
    await asyncio.sleep(0)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    release.set()
    assert await asyncio.to_thread(is_over.wait, 60)
