"""Signals: the named wake-ups by which parts of a worker reach each other without knowing each other.

`mtask.worker.assembly` connects each signal with the parts that listen to it. A signal calls its listeners at once, in
the order in which they were connected. All of them are sent in the event loop.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Generic, ParamSpec

P = ParamSpec("P")


class Signal(Generic[P]):
    """One named wake-up."""

    __slots__ = ("_listeners",)

    def __init__(self) -> None:
        self._listeners: list[Callable[P, object]] = []

    def connect(self, *listeners: Callable[P, object]) -> None:
        """Call these functions, too, each time the signal is sent."""
        self._listeners += listeners

    def send(self, *args: P.args, **kwargs: P.kwargs) -> None:
        """Call the listeners."""
        for listener in self._listeners:
            listener(*args, **kwargs)


class Barrier:
    """Waits for what is under way in several parts at the time of the call."""

    __slots__ = ("_waits",)

    def __init__(self) -> None:
        self._waits: list[Callable[[], Awaitable[None]]] = []

    def connect(self, *waits: Callable[[], Awaitable[None]]) -> None:
        """Wait for these, too."""
        self._waits += waits

    async def wait(self) -> None:
        """Wait for each of them, one after the other."""
        for wait in self._waits:
            await wait()


class Signals:
    """All signals of a worker."""

    def __init__(self) -> None:
        #: A task was queued whose time may have come.
        self.task_queued: Signal[[]] = Signal()
        #: A handler has really ended, and gives its slot back.
        self.slot_freed: Signal[[]] = Signal()
        #: The claim of these tasks is over.
        self.claim_landed: Signal[[Iterable[str]]] = Signal()
        #: Slots may be free.
        self.room_made: Signal[[]] = Signal()
        #: What is known here of these tasks may be wrong: read them again.
        self.tasks_doubtful: Signal[[Iterable[Any]]] = Signal()
        #: Permits are free, and more tasks may wait for them than are known here: scan for what is due.
        self.permits_freed: Signal[[]] = Signal()
        #: Something was resumed: scan for all that waits.
        self.controls_resumed: Signal[[]] = Signal()
        #: Pauses, limits or retention have changed.
        self.controls_changed: Signal[[]] = Signal()
        #: What must be over before this worker confirms changed controls: claims and removals that began before.
        self.under_way = Barrier()
        #: Schedules have changed.
        self.schedules_changed: Signal[[]] = Signal()
        #: The collections were dropped, and are there again.
        self.collections_made: Signal[[]] = Signal()
        #: The registry should hear of this worker at once.
        self.heartbeat_wanted: Signal[[]] = Signal()
        #: The registry answered a heartbeat, with the worker's document; None: the document is gone.
        self.heartbeat_answered: Signal[[dict[str, Any] | None]] = Signal()
