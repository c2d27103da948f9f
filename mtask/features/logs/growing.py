"""The last lines of one run: bounded in number and in bytes. Any thread may add lines."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from mtask.features.logs.operations import RunLines
from mtask.features.logs.rules import MAX_BYTES, MAX_TEXT, MAX_TRACEBACK
from mtask.kernel.worker.process.log import exception_of, fields_of, instant_of, message_of
from mtask.logs import RunMarks, first_of

Line = dict[str, Any]
#: The fields that the document of a run tells anyway.
_KNOWN = ("task", "run")
#: About the bytes that a stored line takes beside its texts.
_OVERHEAD = 100


def line_of(record: logging.LogRecord) -> Line:
    """Return the line of a record as it is stored. The fields of mtask's own lines stand after the message."""
    own = {name: value for name, value in fields_of(record).items() if value is not None and name not in _KNOWN}
    told = [f"{name}={value}" for name, value in own.items()]
    message = " ".join([message_of(record), *told])
    line = {
        "time": instant_of(record),
        "level": _storable(record.levelname, 20),
        "logger": _storable(record.name, 200),
        "message": _storable(first_of(message, MAX_TEXT + 1), MAX_TEXT),
    }
    exception = exception_of(record)
    return line if exception is None else {**line, "exception": _storable_end(exception, MAX_TRACEBACK)}


def size_of(line: Line) -> int:
    """Return about the bytes that a line takes."""
    texts = (line["message"], line["logger"], line.get("exception", ""))
    return _OVERHEAD + sum(len(text.encode()) for text in texts)


def _storable(text: str, most: int) -> str:
    sound = text.encode("utf-8", "replace").decode()
    return sound if len(sound) <= most else sound[: most - 1] + "…"


def _storable_end(text: str, most: int) -> str:
    sound = text.encode("utf-8", "replace").decode()
    return sound if len(sound) <= most else "…" + sound[1 - most :]


class GrowingLog:
    """The last lines of one run."""

    __slots__ = ("_lines", "_lock", "_marks", "_most", "_on_change", "_sizes", "first", "is_dirty", "is_over", "size")

    def __init__(self, marks: RunMarks, most: int, on_change: Callable[[GrowingLog], None]) -> None:
        """`on_change` is called, in any thread, when there is something to write and was nothing before."""
        self._marks = marks
        self._most = most
        self._on_change = on_change
        self._lines: deque[Line] = deque()
        self._sizes: deque[int] = deque()
        self._lock = threading.RLock()
        self.first = 0  #: the number of lines that have left
        self.size = 0  #: of the lines, in bytes
        self.is_over = False
        self.is_dirty = False  #: whether something is to be written

    @property
    def run_id(self) -> str:
        """The run's id."""
        return self._marks.run_id

    def add(self, line: Line) -> None:
        """Add a line. The oldest ones make room for it."""
        size = size_of(line)
        with self._lock:
            if self.is_over:
                return  # something that the handler has left behind goes on
            self._lines.append(line)
            self._sizes.append(size)
            self.size += size
            while len(self._lines) > self._most or (self.size > MAX_BYTES and len(self._lines) > 1):
                self._drop_first()
        self.mark()

    @property
    def kept_cnt(self) -> int:
        """The number of lines that are kept."""
        return len(self._lines)

    def skip(self, number: int) -> None:
        """Note that so many lines before the next one were lost."""
        with self._lock:
            while self._lines:
                self._drop_first()
            self.first += number

    def _drop_first(self) -> None:
        self._lines.popleft()
        self.size -= self._sizes.popleft()
        self.first += 1

    def end(self) -> None:
        """Note that the run is over. No line is added any more."""
        with self._lock:
            self.is_over = True
        self.mark(again=True)

    def mark(self, *, again: bool = False) -> None:
        """Say that there is something to write."""
        with self._lock:
            is_new, self.is_dirty = not self.is_dirty, True
        if is_new or again:
            self._on_change(self)

    def taken(self, worker_id: str) -> RunLines:
        """Return the lines as they are to be stored now."""
        with self._lock:
            self.is_dirty = False
            marks = self._marks
            return RunLines(
                marks.run_id,
                marks.task,
                marks.key,
                marks.queue,
                worker_id,
                marks.attempt,
                self.first,
                list(self._lines),
                self.is_over,
                marks.trace_id,
                self.size,
                key_name=marks.sealed,
                tenant=marks.tenant,
            )
