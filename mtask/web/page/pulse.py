"""The pulse: what the hub's events amount to, at most twice a second. All live pages of one tenant share one pulse.

A page does not need each event, only the news that something has changed. So the pulse counts the events as the hub
offers them and keeps none of them: a burst of thousands costs a page two messages a second.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import datetime
from typing import Any

from mtask.client import AsyncClient
from mtask.errors import MtaskError
from mtask.features.events.hub import CLOSING, Gap, Hub
from mtask.features.events.task_events import EventKind, TaskEvent
from mtask.web.access import Caller, client_of

logger = logging.getLogger("mtask.web")
#: Times in seconds. _TICK: the least time between two messages. _LINGER: the time without pages after which the pulse
#: ends. _PAUSE: the time before a failed pulse begins anew. HISTORY: the time that the charts show. RATED: the time
#: over which rates of queues are taken.
_TICK, _LINGER, _PAUSE, HISTORY, RATED = 0.5, 10.0, 1.0, 600, 60
#: The most tasks that one message names, the most tasks whose lateness is read for one second, and the most messages
#: that wait for a slow page.
_MOST_NAMED, _SAMPLE, _MOST_WAITING = 100, 24, 8
_DUE_FIELDS = ("task_state.start_time", "task_state.create_time", "flow.release_time")
_ENDS = frozenset({EventKind.SUCCEEDED, EventKind.FAILED, EventKind.TIMED_OUT})


class Second:
    """What happened in one second of the server's clock."""

    __slots__ = ("by_queue", "ends", "failures", "late_max", "late_mid", "starts")

    def __init__(self) -> None:
        self.starts = self.ends = self.failures = 0
        self.late_mid: float | None = None
        self.late_max: float | None = None
        self.by_queue: Counter[str] = Counter()

    def row(self, at: int) -> list[Any]:
        """Return the second as a row of the charts."""
        return [at, self.starts, self.ends, self.failures, self.late_mid, self.late_max]


class Page:
    """One live page: the messages that it has not had yet."""

    def __init__(self) -> None:
        self._waiting: asyncio.Queue[str | None] = asyncio.Queue(_MOST_WAITING + 1)

    def offer(self, message: str | None) -> None:
        """Keep a message; None: the last one. A page that is too slow misses some, and asks for all at the next one."""
        if message is None and self._waiting.full():
            self._waiting.get_nowait()
        if message is None or self._waiting.qsize() < _MOST_WAITING:
            self._waiting.put_nowait(message)

    async def next(self, timeout: float) -> str | None:
        """Return the next message, "" after `timeout` seconds, or None at the end."""
        try:
            async with asyncio.timeout(timeout):
                return await self._waiting.get()
        except TimeoutError:
            return ""


class Pulse:
    """The counts of one tenant's events, or of all."""

    def __init__(self, hub: Hub, client: AsyncClient, caller: Caller) -> None:
        self._hub, self._client, self._caller = hub, client_of(client, caller), caller
        self._pages: set[Page] = set()
        self._beating: asyncio.Task[None] | None = None
        self._seconds: dict[int, Second] = {}
        self._kinds: Counter[str] = Counter()
        self._ids: set[str] = set()
        self._sample: dict[str, datetime] = {}
        self._touched: set[int] = set()
        self._first: datetime | None = None
        self._is_quiet = True
        self.began: float | None = None  #: when the present count began, by the loop's clock

    @property
    def page_cnt(self) -> int:
        """The number of live pages."""
        return len(self._pages)

    def history(self) -> list[list[Any]]:
        """Return the rows of the charts, the oldest first. A second in which nothing happened is left out."""
        return [self._seconds[at].row(at) for at in sorted(self._seconds)]

    def rates(self, now: datetime) -> dict[str, float] | None:
        """Return the ends per second of each queue. None: nobody has watched for long enough to tell."""
        if self.began is None:
            return None
        length = min(float(RATED), asyncio.get_running_loop().time() - self.began)
        if length < 5:
            return None
        oldest = int(now.timestamp() - length)
        total: Counter[str] = Counter()
        for at, second in self._seconds.items():
            if at >= oldest:
                total += second.by_queue
        return {queue: count / length for queue, count in total.items()}

    @asynccontextmanager
    async def joined(self) -> AsyncIterator[Page]:
        """Give the block a live page."""
        page = Page()
        self._pages.add(page)
        if self._hub.is_closing:
            page.offer(None)
        elif self._beating is None or self._beating.done():
            self._beating = asyncio.create_task(self._beat())
        try:
            yield page
        finally:
            self._pages.discard(page)

    async def end(self) -> None:
        """End all live pages."""
        self._tell(None)
        if self._beating is not None:
            self._beating.cancel()
            await asyncio.wait((self._beating,))

    def count(self, found: TaskEvent) -> bool:
        """Count one event. Returns whether the pulse is to be woken by it: the first one after each message is."""
        if not self._caller.owns(found):
            return False
        at = int(found.time.timestamp())
        second = self._seconds.setdefault(at, Second())
        self._touched.add(at)
        self._kinds[found.kind.value] += 1
        self._first = self._first or found.time
        if len(self._ids) <= _MOST_NAMED:
            self._ids.add(found.task_id)
        if found.kind is EventKind.CLAIMED:
            second.starts += 1
            if len(self._sample) < _SAMPLE and (found.attempt or 1) == 1:
                self._sample[found.task_id] = found.time
        elif found.kind in _ENDS:
            second.ends += 1
            second.failures += found.kind is not EventKind.SUCCEEDED
            if found.queue is not None:
                second.by_queue[found.queue] += 1
        was_quiet, self._is_quiet = self._is_quiet, False
        return was_quiet

    async def _beat(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while not self._hub.is_closing and (self._pages or loop.time() - self._seen < _LINGER):
                try:
                    await self._follow()
                except MtaskError as error:
                    logger.info("the pulse of the live pages begins anew: %s", type(error).__name__)
                    self._tell(_message("away", {}))
                    await asyncio.sleep(_PAUSE)
        finally:
            self.began = None
            self._tell(None)

    _seen = 0.0

    async def _follow(self) -> None:
        """Pass the events on until no page is left, or the server ends."""
        loop = asyncio.get_running_loop()
        async with self._hub.view(self.count) as viewer:
            self.began = loop.time()
            self._is_quiet = True
            self._tell(_message("tick", {"many": True, "kinds": {}, "ids": [], "rows": []}))
            told = loop.time()
            while True:
                if self._pages:
                    self._seen = loop.time()
                elif loop.time() - self._seen > _LINGER:
                    return
                found = await viewer.next(_PAUSE)
                if found is CLOSING:
                    self._tell(None)
                    return
                if isinstance(found, Gap):
                    self._tell(_message("tick", {"many": True, "kinds": {}, "ids": [], "rows": []}))
                    if viewer.is_over:
                        return
                elif found is not None:
                    await asyncio.sleep(max(0.0, told + _TICK - loop.time()))
                    told = loop.time()
                    self._tick()
                    await self._look_how_late()

    def _tick(self) -> None:
        """Tell all pages what has happened since the last message."""
        now = max(self._seconds, default=0)
        for at in [at for at in self._seconds if at < now - HISTORY]:
            del self._seconds[at]
        is_named = len(self._ids) <= _MOST_NAMED
        self._tell(
            _message(
                "tick",
                {
                    "many": not is_named,
                    "kinds": dict(self._kinds),
                    "ids": sorted(map(self._caller.shown_id, self._ids)) if is_named else [],
                    "rows": self._rows(),
                    "first": None if self._first is None else round(self._first.timestamp() * 1000),
                },
            )
        )
        self._kinds.clear()
        self._ids.clear()
        self._first, self._is_quiet = None, True

    def _rows(self) -> list[list[Any]]:
        rows = [self._seconds[at].row(at) for at in sorted(self._touched) if at in self._seconds]
        self._touched.clear()
        return rows[-_MOST_NAMED:]

    async def _look_how_late(self) -> None:
        """Read when some of the tasks that were claimed had been due, and tell the pages."""
        sample, self._sample = self._sample, {}
        if not sample:
            return
        found = (await self._client.get_many(list(sample), fields=_DUE_FIELDS)).tasks
        late: dict[int, list[float]] = {}
        for task_id, claimed in sample.items():
            dues = [value for value in (found.get(task_id) or {}).values() if isinstance(value, datetime)]
            if dues:
                late.setdefault(int(claimed.timestamp()), []).append(max(0.0, (claimed - max(dues)).total_seconds()))
        for at, each in late.items():
            if at in self._seconds:
                second = self._seconds[at]
                second.late_mid = sorted(each)[len(each) // 2]
                second.late_max = max(*each, second.late_max or 0.0)
                self._touched.add(at)
        if self._touched:
            self._tell(_message("rows", {"rows": self._rows()}))

    def _tell(self, message: str | None) -> None:
        for page in self._pages:
            page.offer(message)


def _message(kind: str, document: dict[str, Any]) -> str:
    return f"event: {kind}\ndata: {json.dumps(document, ensure_ascii=True, separators=(',', ':'))}\n\n"
