"""The log keeper: writes the last lines of each run to the database.

A line costs no write. The lines of a run are written when it ends, and every few seconds while it goes on, together
with those of other runs. If the database is away, the lines wait up to a bound. Then the oldest ones are dropped: a log
never holds up a run.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from time import monotonic
from typing import Any, Protocol

from mtask.errors import MtaskError
from mtask.features.logs import operations as run_logs
from mtask.features.logs.operations import RunLines
from mtask.features.logs.options import LogOptions
from mtask.features.logs.rules import MAX_BYTES, MAX_TEXT, MAX_TRACEBACK
from mtask.kernel.driver.stores import AsyncStore
from mtask.kernel.worker.process.log import exception_of, fields, fields_of, instant_of, logger, message_of, told
from mtask.kernel.worker.process.part import Part, Service
from mtask.kernel.worker.process.time import Backoff, wake_or_wait
from mtask.logs import RUN, RunMarks, first_of

#: The time from a line of a run that goes on to its write, and from the end of a run to the write of its last lines, in
#: seconds. Meanwhile, others join the write. Tests tune both.
EVERY, AFTER_END = 3.0, 0.2
#: The most runs and about the most bytes of one write.
_MAX_GROUP, _MAX_GROUP_BYTES = 200, 4 * 1024 * 1024
#: The most bytes of lines that wait to be written, of runs that are over. Tests tune it.
MAX_WAITING_BYTES = 16 * 1024 * 1024
#: The pauses between tries to write, in seconds. Tests tune both.
PAUSE, MAX_PAUSE = 1.0, 30.0
#: The time that the last lines get at a stop, in seconds.
_LAST_WRITES = 3.0


class LogKeeper(Part):
    """Keeps the lines of a worker's runs. Use it in the worker's event loop, but for the adding of lines."""

    def __init__(self, store: AsyncStore, worker_id: str, options: LogOptions) -> None:
        self._store = store
        self._worker_id = worker_id
        self._options = options
        self._loop = asyncio.get_running_loop()
        # A signal handler, or the end of an object, may log in the middle of a line of the same thread.
        self._lock = threading.RLock()
        #: The runs with something to write, by run_id: those that go on, and those that are over.
        self._live: dict[str, GrowingLog] = {}
        self._over: dict[str, GrowingLog] = {}
        self._over_bytes = 0
        #: The time at which the first one joined each of the two (monotonic seconds).
        self._live_since = self._over_since = 0.0
        self._wake = asyncio.Event()
        self._is_woken = False
        self._stopped = asyncio.Event()
        self._is_made = False
        self._pauses = Backoff(PAUSE, MAX_PAUSE)
        self._handler = RunLogHandler(self)
        self.write_cnt = 0
        self.dropped_cnt = 0  #: lines that were given up
        self._told_cnt = 0

    def services(self) -> Sequence[Service]:
        """Take and write lines until all runs have ended, and then write those that are left."""
        return (Service(self.run, self.stop, drain=self.drain, lasts=True),)

    def take(self, marks: RunMarks, record: logging.LogRecord) -> None:
        """Take a line of a run. Any thread may call this."""
        self.log_of(marks).add(line_of(record))

    def log_of(self, marks: RunMarks) -> GrowingLog:
        """Return the log of a run; make it for its first line."""
        with self._lock:
            if marks.log is None:
                marks.log = GrowingLog(marks, self._options.keep, self._changed)
            log: GrowingLog = marks.log
            return log

    def _changed(self, log: GrowingLog) -> None:
        """Note that a run has something to write. Any thread may call this."""
        with self._lock:
            if log.is_over:
                self._live.pop(log.run_id, None)
                self._join_over(log)
            else:
                if not self._live:
                    self._live_since = monotonic()
                self._live[log.run_id] = log
            if self._is_woken:
                return
            self._is_woken = True
        with suppress(RuntimeError):  # the loop has closed: the worker has stopped
            self._loop.call_soon_threadsafe(self._wake.set)

    def _join_over(self, log: GrowingLog) -> None:
        if log.run_id in self._over:
            return
        if not self._over:
            self._over_since = monotonic()
        self._over[log.run_id] = log
        self._over_bytes += log.size
        while self._over_bytes > MAX_WAITING_BYTES and len(self._over) > 1:
            dropped = self._over.pop(next(iter(self._over)))
            self._over_bytes -= dropped.size
            self.dropped_cnt += dropped.kept_cnt

    # --- writes ---------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Take the lines that handlers write, and write them as they come, until `stop`."""
        logging.getLogger().addHandler(self._handler)
        while not self._stopped.is_set():
            with self._lock:
                self._is_woken = False
                self._wake.clear()
                pause = self._seconds_left()
            if pause is None or pause > 0:
                await wake_or_wait(self._wake, pause)
            elif await self._write_all():
                self._pauses.reset()
            else:
                await wake_or_wait(self._stopped, self._pauses.next())

    def stop(self) -> None:
        """End `run`. `drain` writes the rest."""
        self._stopped.set()
        self._wake.set()

    async def drain(self) -> None:
        """Take no more lines, and write those that are left, within a bound of time."""
        logging.getLogger().removeHandler(self._handler)
        with suppress(TimeoutError):
            async with asyncio.timeout(_LAST_WRITES):
                await self._write_all()
        left = sum(log.kept_cnt for log in (*self._live.values(), *self._over.values()))
        if left:
            logger.warning("kept log lines not written", extra=fields(lines=left))

    def _seconds_left(self) -> float | None:
        """Return the time until the next write. None: there is nothing to write."""
        due = [self._over_since + AFTER_END] if self._over else []
        if self._live:
            due.append(self._live_since + EVERY)
        return max(0.0, min(due) - monotonic()) if due else None

    async def _write_all(self) -> bool:
        """Write what is there now; return whether the database took it."""
        for group in self._groups():
            lines = [log.taken(self._worker_id) for log in group]
            try:
                await self._write(lines)
            except BaseException as error:
                self._put_back(group)
                if not isinstance(error, MtaskError):
                    raise
                logger.warning("kept log lines not written, will be tried again", extra=fields(reason=told(error)))
                self._tell_of_dropped()
                return False
        self._tell_of_dropped()
        return True

    async def _write(self, lines: list[RunLines]) -> None:
        if not self._is_made:
            await self._store.run(run_logs.make_ready())
            self._is_made = True
        encoded = await self._store.run(run_logs.encoded(lines))
        self.write_cnt += 1
        await self._store.run(run_logs.write(encoded, self._options.kept_for))

    def _groups(self) -> Iterator[list[GrowingLog]]:
        """Take out the runs with something to write, in groups. What comes meanwhile waits for the next round."""
        with self._lock:
            left = len(self._over) + len(self._live)
        while left > 0:
            group: list[GrowingLog] = []
            size = 0
            with self._lock:
                for waiting in (self._over, self._live):
                    while waiting and left > 0 and len(group) < _MAX_GROUP and size < _MAX_GROUP_BYTES:
                        log = waiting.pop(next(iter(waiting)))
                        self._over_bytes -= log.size if waiting is self._over else 0
                        size += log.size
                        left -= 1
                        group.append(log)
            if not group:
                return
            yield group

    def _put_back(self, group: list[GrowingLog]) -> None:
        for log in group:
            log.mark(again=True)

    def _tell_of_dropped(self) -> None:
        new, self._told_cnt = self.dropped_cnt - self._told_cnt, self.dropped_cnt
        if new:
            logger.warning("kept log lines dropped: the database took none for too long", extra=fields(lines=new))


class LineTaker(Protocol):
    """What takes the lines of runs: the keeper of a worker, or an executor."""

    def take(self, marks: RunMarks, record: logging.LogRecord) -> None:
        """Take a line of a run. Any thread may call this."""


class RunLogHandler(logging.Handler):
    """Passes the lines of handlers on. It ignores all other lines."""

    def __init__(self, taker: LineTaker) -> None:
        super().__init__()
        self._taker = taker

    def emit(self, record: logging.LogRecord) -> None:
        """Pass a line on if a handler of this worker has written it."""
        marks = RUN.get()
        if marks is None or marks.keeper is not self._taker:
            return
        try:
            self._taker.take(marks, record)
        except Exception:
            self.handleError(record)


# --- growing ---------------------------------------------------------------------------------------------

# The last lines of one run: bounded in number and in bytes. Any thread may add lines.

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
