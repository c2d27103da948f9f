"""What a process has that runs handlers, a worker or an executor: its signals, its loop's errors, and its exit."""

from __future__ import annotations

import asyncio
import contextvars
import logging
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from threading import Thread
from types import FrameType
from typing import Any, NoReturn, TypeVar

import mtask
from mtask.kernel.driver.types import DRIVER_FOLDERS
from mtask.kernel.worker.process.log import fields, logger
from mtask.logs import RUN

#: The signals that ask a process to end. A closed terminal sends SIGHUP.
_ENDS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
#: Where the code is whose asyncio tasks handlers have not started, even if it runs in a handler's context.
_OWN = tuple(f"{folder}{os.sep}" for folder in (*mtask.__path__, *DRIVER_FOLDERS))

#: Whether a handler, or what it uses, has forked this process from one that runs handlers.
is_forked = False


def end_forked(error: BaseException | None) -> NoReturn:
    """End this process, which a handler has forked: it must not go on as its parent does.

    `error`: what the handler has raised in it. Processes of `multiprocessing` end before they come here.
    """
    code: object = 0
    try:
        if isinstance(error, SystemExit):
            code = 0 if error.code is None else error.code
            if not isinstance(code, int):
                sys.stderr.write(f"{code}\n")
        elif error is not None:
            code = 1
            traceback.print_exception(error)
        for flush in (sys.stdout.flush, sys.stderr.flush):
            with suppress(Exception):
                flush()
    finally:
        os._exit(code & 0xFF if isinstance(code, int) else 1)


def handle_ends(handler: Callable[[int, FrameType | None], object]) -> None:
    """Let this process call `handler` when a signal asks it to end. A process under `nohup` ignores SIGHUP as before.

    Call this once in a process, in its main thread. The handler runs even while a handler of tasks blocks the event
    loop; those of `loop.add_signal_handler` do not. Processes that handlers fork do not inherit it: else SIGTERM would
    not end them.
    """
    has_hung_up = False

    def take(number: int, frame: FrameType | None) -> None:
        nonlocal has_hung_up
        if number == signal.SIGHUP and has_hung_up:
            return  # a closed terminal may send it twice: its shell passes it on, and ends
        has_hung_up |= number == signal.SIGHUP
        handler(number, frame)

    wanted = [number for number in _ENDS if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN]
    former = {number: signal.signal(number, take) for number in wanted}
    masks = threading.local()  # of the signals that the thread blocks which forks

    def before() -> None:
        # A signal that reached the child before it had signals of its own would be lost.
        masks.former = signal.pthread_sigmask(signal.SIG_BLOCK, former)

    def after() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, masks.former)

    def in_child() -> None:
        global is_forked
        is_forked = True
        signal.set_wakeup_fd(-1)  # else its signals would wake the event loop of its parent
        for number, was in former.items():
            if signal.getsignal(number) is take:  # else the app has a handler of its own
                signal.signal(number, signal.SIG_DFL if was is None else was)
        after()

    os.register_at_fork(before=before, after_in_parent=after, after_in_child=in_child)


def handle_loop_error(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Log what a callback of the event loop has raised, as asyncio does.

    If a log handler of the app raises then, asyncio would let that end the loop.
    """
    try:
        loop.default_exception_handler(context)
    except Exception:
        error = context.get("exception")
        logger.error("a callback failed", extra=fields(reason=context.get("message")), exc_info=error)


def run_job(loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, None]) -> None:
    """Run this to its end in a loop that it shares with handlers, whatever these do to the loop.

    A handler, or a task or a callback that it started, may call `sys.exit` or `loop.stop()`, or cancel all asyncio
    tasks. It sees only its own ones, so it does not cancel those of this process.
    """
    loop.set_exception_handler(handle_loop_error)
    loop.set_task_factory(_make_task)
    job = loop.create_task(coroutine)
    while True:
        try:
            loop.run_until_complete(job)
            return
        except (SystemExit, KeyboardInterrupt):
            logger.exception("a handler's own task tried to exit the process")
            if job.done():
                raise
        except RuntimeError:
            if job.done():
                raise
            logger.error("a handler stopped the event loop, which goes on: handlers must not call loop.stop()")


def _make_task(loop: asyncio.AbstractEventLoop, coroutine: Any, **given: Any) -> asyncio.Task[Any]:
    """Make an asyncio task. `asyncio.all_tasks` tells only of those that handlers have started."""
    task = asyncio.Task(coroutine, loop=loop, **given)
    code = getattr(coroutine, "cr_code", None)
    if RUN.get() is None or (code is not None and code.co_filename.startswith(_OWN)):
        asyncio._unregister_task(task)
    return task


def exit_now(code: int = 0) -> NoReturn:
    """Exit without waiting for the threads, whatever the app's log handlers and closed streams raise."""
    try:
        for flush in (logging.shutdown, sys.stdout.flush, sys.stderr.flush):
            with suppress(Exception):
                flush()
    finally:
        os._exit(code)


# --- aside -----------------------------------------------------------------------------------------------

# Calls of the engine that block, each in a thread of its own: handlers may hold all threads of `asyncio.to_thread`.

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
