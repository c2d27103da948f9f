"""Threads for plain handlers. What they bring back is handed to the event loop together, not call by call."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from typing import Any

from mtask.worker.log import fields, logger

Call = Callable[[], Any]


class ThreadCall:
    """A call in a thread, as its loop sees it."""

    __slots__ = ("_call", "_context", "_error", "_on_end", "_returned", "future", "is_over")

    def __init__(self, call: Call, future: asyncio.Future[None]) -> None:
        self._call = call
        self._context = contextvars.copy_context()
        self._on_end: Callable[[], None] | None = None
        self.future = future  #: done when the loop has heard of the end
        self.is_over = False  #: the loop has heard of the end
        self._returned: Any = None
        self._error: BaseException | None = None

    def run(self) -> None:
        """Call it, in the thread, unless it is too late; keep whatever it raises, `SystemExit` too."""
        if self.future.cancelled():
            return
        try:
            self._returned = self._context.run(self._call)
        except BaseException as error:
            self._error = error

    def take(self) -> tuple[Any, BaseException | None]:
        """Return what it returned and what it raised, and keep neither: an exception holds on to its frames."""
        taken = self._returned, self._error
        self._returned = self._error = None
        return taken

    def when_over(self, tell: Callable[[], None]) -> None:
        """Have `tell` called in the loop when the thread comes back."""
        self._on_end = tell

    def deliver(self) -> None:
        """Tell the loop, in the loop."""
        self.is_over = True
        if self.future.done():
            self.take()  # it was cancelled: nobody else will
        else:
            self.future.set_result(None)
        if self._on_end is not None:
            self._on_end()


class Threads:
    """As many threads as calls are under way; idle ones are used again."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._calls: SimpleQueue[ThreadCall | None] = SimpleQueue()
        self._ended: deque[ThreadCall] = deque()
        self._is_told = False
        self._is_closed = False
        self._is_short = False
        #: Calls whose end the loop has not heard of.
        self._busy = 0
        self._threads = 0

    def start(self, call: Call) -> ThreadCall:
        """Have it called in a thread, at once; from the loop. Raises RuntimeError where no thread can be had."""
        loop = asyncio.get_running_loop()
        made = ThreadCall(call, loop.create_future())
        while self._busy - len(self._ended) >= self._threads and self._add_thread(loop):
            pass
        self._busy += 1
        self._calls.put(made)
        return made

    def close(self) -> None:
        """Let the threads go, each when its call has ended; what has not begun never will."""
        self._is_closed = True
        for _ in range(self._threads):
            self._calls.put(None)

    def _add_thread(self, loop: asyncio.AbstractEventLoop) -> bool:
        """Start one more; return whether that could be done. Where there are some, calls can wait for one."""
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
            del call  # an idle thread keeps nothing of its last call
            if not self._is_told:
                self._is_told = True
                with suppress(RuntimeError):  # the loop has closed: nobody is left to hear of it
                    loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        # In this order: what a thread adds without telling of it was added before the end of this.
        self._is_told = False
        while self._ended:
            self._busy -= 1
            self._ended.popleft().deliver()
