"""Calls of the engine that block, each in a thread of its own: handlers may hold all threads of `asyncio.to_thread`."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from threading import Thread
from typing import TypeVar

T = TypeVar("T")


async def to_thread(function: Callable[..., T], *given: object) -> T:
    """Do the same as `asyncio.to_thread`, however many threads the handlers hold.

    A call starts a thread, which takes about 0.1 ms: they are few, and a pool would have to be ended.
    """
    call = partial(contextvars.copy_context().run, function, *given)
    made: Future[T] = Future()
    made.set_running_or_notify_cancel()  # from now on nobody can cancel it: the call goes on
    Thread(target=_make, args=(call, made), name="mtask-aside").start()
    return await asyncio.wrap_future(made)


def _make(call: Callable[[], T], made: Future[T]) -> None:
    try:
        made.set_result(call())
    except BaseException as error:
        made.set_exception(error)
    finally:
        del made  # else an exception would keep its frames in memory
