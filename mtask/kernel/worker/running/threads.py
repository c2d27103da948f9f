"""Threads for sync handlers. If several calls end at about the same time, they wake the event loop only once."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from typing import Any

from mtask.kernel.worker.process.log import fields, logger
from mtask.kernel.worker.process.runtime import end_if_forked

Call = Callable[[], Any]


class ThreadCall:
    """A call of a function in a thread. In the event loop, `future` tells when the call has ended."""

    __slots__ = ("_call", "_context", "_error", "_on_end", "_returned", "future", "is_over")

    def __init__(self, call: Call, future: asyncio.Future[None]) -> None:
        self._call = call
        self._context = contextvars.copy_context()
        self._on_end: Callable[[], None] | None = None
        self.future = future  #: done when the event loop knows that the call has ended
        self.is_over = False  #: whether the event loop knows that the call has ended
        self._returned: Any = None
        self._error: BaseException | None = None

    def run(self) -> None:
        """Make the call, in the thread, unless the call was cancelled. Keep any exception, even `SystemExit`."""
        if self.future.cancelled():
            return
        try:
            self._returned = self._context.run(self._call)
        except BaseException as error:
            self._error = error
        end_if_forked(self._error)

    def take(self) -> tuple[Any, BaseException | None]:
        """Return the result and the exception, and forget both. An exception would keep its frames in memory."""
        taken = self._returned, self._error
        self._returned = self._error = None
        return taken

    def when_over(self, callback: Callable[[], None]) -> None:
        """Call `callback` in the event loop when this call has ended."""
        self._on_end = callback

    def deliver(self) -> None:
        """Mark the call as ended, and wake the code that waits for the call. Call this in the event loop."""
        self.is_over = True
        if self.future.done():
            self.take()  # the future was cancelled, so nobody else takes the result
        else:
            self.future.set_result(None)
        if self._on_end is not None:
            self._on_end()


class Threads:
    """A pool of threads. It starts a new thread only if a call finds no idle thread."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._calls: SimpleQueue[ThreadCall | None] = SimpleQueue()
        self._ended: deque[ThreadCall] = deque()
        self._is_delivery_due = False
        self._is_closed = False
        self._is_short = False
        #: The number of calls that have not ended, as far as the event loop knows.
        self._busy = 0
        self._threads = 0

    def start(self, call: Call) -> ThreadCall:
        """Start a call in a thread. Call this in the event loop.

        Raises RuntimeError if the pool has no thread and cannot start one.
        """
        loop = asyncio.get_running_loop()
        made = ThreadCall(call, loop.create_future())
        while self._busy - len(self._ended) >= self._threads and self._add_thread(loop):
            pass
        self._busy += 1
        self._calls.put(made)
        return made

    def close(self) -> None:
        """End each thread after its current call. Calls that have not begun are dropped."""
        self._is_closed = True
        for _ in range(self._threads):
            self._calls.put(None)

    def _add_thread(self, loop: asyncio.AbstractEventLoop) -> bool:
        """Start one more thread; return whether it started. If it did not, calls wait until another thread is idle.

        Raises RuntimeError if the pool has no other thread.
        """
        name = f"{self._name}-{self._threads}"
        thread = threading.Thread(target=self._work, args=(loop,), name=name)
        try:
            thread.start()
        except RuntimeError:
            if not self._threads:
                raise
            if not self._is_short:
                logger.warning("no further thread can be started, for now", extra=fields(threads=self._threads))
            self._is_short = True
            return False
        self._is_short = False
        self._threads += 1
        return True

    def _work(self, loop: asyncio.AbstractEventLoop) -> None:
        while (call := self._calls.get()) is not None:
            if not self._is_closed:
                call.run()
            self._ended.append(call)
            del call  # an idle thread must not keep its last call in memory
            if not self._is_delivery_due:
                self._is_delivery_due = True
                with suppress(RuntimeError):  # the loop has closed: nobody waits for the call
                    loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        # The flag is cleared first, so a call that ends from now on causes another delivery.
        self._is_delivery_due = False
        while self._ended:
            self._busy -= 1
            self._ended.popleft().deliver()
