"""When the start of a handler on the event loop is counted."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from mtask.kernel.worker.running.call import Beginning


def begun(handler: Callable[[list[str]], Awaitable[Any]]) -> tuple[asyncio.Task[Any], list[str]]:
    """Return the call of a handler under way, and what happens."""
    events: list[str] = []

    async def call() -> Any:
        return await Beginning(handler(events), lambda: events.append("told"))  # type: ignore[arg-type]

    return asyncio.get_running_loop().create_task(call()), events


async def simple(events: list[str]) -> str:
    events.append("first line")
    return "value"


async def long(events: list[str]) -> str:
    events.append("first line")
    try:
        await asyncio.sleep(0)
        events.append("next step")
        await asyncio.Event().wait()
    except asyncio.CancelledError:
        events.append("cancelled")
        raise
    return "never"


async def broken(events: list[str]) -> None:
    events.append("first line")
    raise ValueError("broken")


async def test_start_is_told_once_after_the_first_lines_of_the_handler() -> None:
    call, events = begun(simple)
    assert await call == "value"
    assert events == ["first line", "told"]
    call, events = begun(long)
    for _ in range(3):
        await asyncio.sleep(0)
    assert events == ["first line", "told", "next step"]
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert events == ["first line", "told", "next step", "cancelled"]


async def test_start_of_a_handler_that_raises_at_once_is_told() -> None:
    call, events = begun(broken)
    with pytest.raises(ValueError, match="broken"):
        await call
    assert events == ["first line", "told"]
