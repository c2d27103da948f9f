"""Signals: named wake-ups between parts of a worker that do not know each other.

`mtask.worker.assembly` connects each signal to its listeners. A signal calls them at once, in the order in which they
were connected. All signals are sent in the event loop.
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
        """Add listeners: they are called each time the signal is sent."""
        self._listeners += listeners

    def send(self, *args: P.args, **kwargs: P.kwargs) -> None:
        """Call the listeners."""
        for listener in self._listeners:
            listener(*args, **kwargs)


class Barrier:
    """Waits for the work of several parts: for all work that is under way at the time of the call."""

    __slots__ = ("_waits",)

    def __init__(self) -> None:
        self._waits: list[Callable[[], Awaitable[None]]] = []

    def connect(self, *waits: Callable[[], Awaitable[None]]) -> None:
        """Add functions that wait for the work of one part."""
        self._waits += waits

    async def wait(self) -> None:
        """Wait for each part, one after the other."""
        for wait in self._waits:
            await wait()


class Signals:
    """All signals of a worker."""

    def __init__(self) -> None:
        #: A task was queued, and its time may have come.
        self.task_queued: Signal[[]] = Signal()
        #: A handler has ended, and its thread, too: the slot is free.
        self.slot_freed: Signal[[]] = Signal()
        #: The claim of these tasks is over.
        self.claim_landed: Signal[[Iterable[str]]] = Signal()
        #: Slots may be free.
        self.room_made: Signal[[]] = Signal()
        #: The knowledge of these tasks may be wrong: read them again.
        self.tasks_doubtful: Signal[[Iterable[Any]]] = Signal()
        #: Permits are free, and more tasks may wait for them than this worker knows: scan for due tasks.
        self.permits_freed: Signal[[]] = Signal()
        #: A queue or name was resumed: scan for all waiting tasks.
        self.controls_resumed: Signal[[]] = Signal()
        #: Pauses, limits or retention have changed.
        self.controls_changed: Signal[[]] = Signal()
        #: The claims and removals that began before controls changed: they must end before the worker confirms the
        #: change.
        self.under_way = Barrier()
        #: Schedules have changed.
        self.schedules_changed: Signal[[]] = Signal()
        #: The collections were dropped and have been created again.
        self.collections_made: Signal[[]] = Signal()
        #: A heartbeat should be sent at once.
        self.heartbeat_wanted: Signal[[]] = Signal()
        #: A heartbeat was answered with the worker's document; None: the document is gone.
        self.heartbeat_answered: Signal[[dict[str, Any] | None]] = Signal()
