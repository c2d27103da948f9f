"""Calls of the engine that block, in threads that it does not share with the handlers' `asyncio.to_thread`."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

T = TypeVar("T")

#: It starts a thread only for a call that finds no idle one. No call lasts longer than a ping of the leases or so.
_threads = ThreadPoolExecutor(64, thread_name_prefix="mtask-aside")


async def to_thread(function: Callable[..., T], *given: object) -> T:
    """Do the same as `asyncio.to_thread`, however many threads the handlers hold."""
    call = partial(contextvars.copy_context().run, function, *given)
    return await asyncio.get_running_loop().run_in_executor(_threads, call)


def close() -> None:
    """End the idle threads. The process makes no more such calls."""
    _threads.shutdown(wait=False)
