"""The hub: one stream of events for all viewers of the process, open while someone listens.

A viewer that begins at an earlier event first reads a stream of its own, the catch-up. It goes on with the hub once the
catch-up has reached the events that the hub has kept for it meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from mtask.client import AsyncClient
from mtask.errors import EventsLost, MtaskError
from mtask.features.events.events_aio import AsyncEvents
from mtask.features.events.task_events import TaskEvent
from mtask.web.settings import WebSettings

logger = logging.getLogger("mtask.web")
#: Times in seconds. _POLL: the length of one request for events. LINGER: the time without viewers after which the hub
#: closes its stream. _PAUSE: the time before a failed stream is opened again. Tests tune `LINGER`.
_POLL, LINGER, _PAUSE = 1.0, 10.0, 1.0

Selects = Callable[[TaskEvent], bool]


@dataclass(frozen=True, slots=True)
class Gap:
    """What a viewer gets in place of events that it cannot have, or at the end of its stream."""

    word: str  #: "lost": history is lost; "behind": the viewer was too slow; "closing": the server ends


LOST, BEHIND, CLOSING = Gap("lost"), Gap("behind"), Gap("closing")


def place_of(token: str | None) -> tuple[str, int]:
    """Return the place of a token in the order of events: of two tokens, the later one has the greater place."""
    change, _, rest = (token or "").partition(".")
    count = rest.partition(".")[0]
    # A token without a number lies behind all events of its change.
    return change, int(count) if count.isdecimal() else 2**31


class Viewer:
    """One reader of the hub's events. It keeps at most `most` events that were not read yet."""

    def __init__(self, selects: Selects, most: int) -> None:
        self._selects = selects
        self._kept: asyncio.Queue[TaskEvent | Gap] = asyncio.Queue(most + 2)
        self._most = most
        self.is_over = False
        self.begins_at: str | None = None  #: the token of the hub's place when the viewer came

    def offer(self, found: TaskEvent | Gap) -> None:
        """Keep an event for the viewer. A viewer that is too far behind gets no more events."""
        if self.is_over or (isinstance(found, TaskEvent) and not self._selects(found)):
            return
        if self._kept.qsize() >= self._most and found is not CLOSING:
            found = BEHIND
        self.is_over = found in (BEHIND, CLOSING)
        self._kept.put_nowait(found)

    async def next(self, timeout: float) -> TaskEvent | Gap | None:
        """Return the next event or gap, or None after `timeout` seconds."""
        if not self._kept.empty():
            return self._kept.get_nowait()
        try:
            async with asyncio.timeout(timeout):
                return await self._kept.get()
        except TimeoutError:
            return None


class Hub:
    """The one stream of events, and its viewers."""

    def __init__(self, client: AsyncClient, settings: WebSettings) -> None:
        self._client = client
        self._settings = settings
        self._viewers: set[Viewer] = set()
        self._opening = asyncio.Lock()
        self._events: AsyncEvents | None = None
        self._reading: asyncio.Task[None] | None = None
        self.is_closing = False

    @property
    def viewer_cnt(self) -> int:
        """The number of viewers."""
        return len(self._viewers)

    @property
    def is_open(self) -> bool:
        """Whether the hub's stream is open."""
        return self._events is not None

    @asynccontextmanager
    async def view(self, selects: Selects) -> AsyncIterator[Viewer]:
        """Give the block a viewer of all events after this moment."""
        viewer = Viewer(selects, self._settings.max_behind)
        async with self._opening:
            # The viewer joins while the stream is certainly open, and before its next event.
            await self._open()
            self._viewers.add(viewer)
            viewer.begins_at = self._events.token if self._events is not None else None
        if self.is_closing:
            viewer.offer(CLOSING)
        try:
            yield viewer
        finally:
            self._viewers.discard(viewer)

    @asynccontextmanager
    async def catch_up(self, after: str, until: str | None) -> AsyncIterator[AsyncIterator[TaskEvent]]:
        """Give the block the events between two tokens. Raises InvalidInput or EventsLost."""
        old = self._client.events(after=after)
        try:
            await old.open()
            yield self._between(old, until)
        finally:
            await old.close()

    async def _between(self, old: AsyncEvents, until: str | None) -> AsyncIterator[TaskEvent]:
        end = place_of(until)
        while not self.is_closing:
            found = await old.poll(_POLL)
            if found is not None and place_of(found.token) <= end:
                yield found
            elif place_of(old.token) >= end:
                return

    def close(self) -> None:
        """End the streams of all viewers at once. Call this on a signal to end, from the event loop's thread."""
        self.is_closing = True
        for viewer in tuple(self._viewers):
            viewer.offer(CLOSING)

    async def end(self) -> None:
        """Close the hub, and its stream."""
        self.close()
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.wait((self._reading,))

    async def _open(self) -> None:
        if self._events is not None or self.is_closing:
            return
        events = self._client.events()
        await events.open()
        self._events = events
        self._reading = asyncio.create_task(self._read())

    async def _read(self) -> None:
        loop = asyncio.get_running_loop()
        seen = loop.time()
        try:
            while self._events is not None:
                await self._pass_on(self._events)
                if self._viewers:
                    seen = loop.time()
                elif loop.time() - seen > LINGER:
                    async with self._opening:
                        if not self._viewers:
                            return
        finally:
            events, self._events = self._events, None
            # After an unforeseen error, viewers are left. They connect again, and go on from their last event.
            for viewer in tuple(self._viewers):
                viewer.offer(BEHIND)
            if events is not None:
                await events.close()

    async def _pass_on(self, events: AsyncEvents) -> None:
        try:
            found = await events.poll(_POLL)
            if found is not None:
                for viewer in tuple(self._viewers):
                    viewer.offer(found)
        except MtaskError as error:
            logger.warning("the stream of events failed and begins anew: %s", type(error).__name__)
            await events.close()
            await asyncio.sleep(_PAUSE)
            after = None if isinstance(error, EventsLost) else events.token
            self._events = self._client.events(after=after)
            if after is None:
                for viewer in tuple(self._viewers):
                    viewer.offer(LOST)
