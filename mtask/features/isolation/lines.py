"""The lines that handlers log in an executor: it sends them to its worker, which keeps them."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from mtask.features.isolation.channel import Message
from mtask.features.logs.growing import Line, line_of
from mtask.features.logs.worker import RunLogHandler
from mtask.logs import RunMarks

#: The time for which lines gather for one message, in seconds.
_GATHER = 0.05


class RunLines:
    """Gathers the lines of the run in this executor. Any thread may add lines; the event loop sends them."""

    def __init__(self, send: Callable[[Message], None], most: int) -> None:
        """`most`: the most lines that wait to be sent. The worker would keep no more of them."""
        self._send = send
        self._loop = asyncio.get_running_loop()
        self._lock = threading.RLock()
        self._lines: deque[Line] = deque(maxlen=most)
        self._lost = 0
        self._run_id = ""
        logging.getLogger().addHandler(RunLogHandler(self))

    def begin(self, run_id: str) -> None:
        """Take the lines of this run from now on."""
        with self._lock:
            self._run_id = run_id
            self._lines.clear()
            self._lost = 0

    def take(self, marks: RunMarks, record: logging.LogRecord) -> None:
        """Take a line of a run."""
        line = line_of(record)
        with self._lock:
            if marks.run_id != self._run_id:  # something that an earlier run has left behind goes on
                return
            is_first = not self._lines
            self._lost += len(self._lines) == self._lines.maxlen
            self._lines.append(line)
        if is_first:
            with suppress(RuntimeError):  # the loop has closed
                self._loop.call_soon_threadsafe(self._loop.call_later, _GATHER, self.send)

    def send(self) -> None:
        """Send the lines that wait. Call this in the event loop."""
        with self._lock:
            lines, lost, self._lost = list(self._lines), self._lost, 0
            self._lines.clear()
        if lines:
            self._send({"kind": "log", "run_id": self._run_id, "lines": lines, "lost": lost})
