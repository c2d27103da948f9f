"""Signals: named wake-ups. By a signal, one part of a worker wakes parts that it does not know.

`mtask.parts.assembly` connects each signal to its listeners. A signal calls its listeners at once, in the order in
which they were connected. All signals are sent in the event loop.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Generic, ParamSpec

P = ParamSpec("P")


class Signal(Generic[P]):
    """One named wake-up."""

    __slots__ = ("_listeners", "send")

    #: Calls the listeners. With only one listener, it is that listener: some signals are sent for each task.
    send: Callable[P, object]

    def __init__(self) -> None:
        self._listeners: list[Callable[P, object]] = []
        self.send = self._send

    def connect(self, *listeners: Callable[P, object]) -> None:
        """Add listeners: they are called each time the signal is sent."""
        self._listeners += listeners
        self.send = self._listeners[0] if len(self._listeners) == 1 else self._send

    def _send(self, *args: P.args, **kwargs: P.kwargs) -> None:
        for listener in self._listeners:
            listener(*args, **kwargs)


class Barrier:
    """Waits until several parts have ended the work that was under way when the wait began."""

    __slots__ = ("_waits",)

    def __init__(self) -> None:
        self._waits: list[Callable[[], Awaitable[None]]] = []

    def connect(self, *waits: Callable[[], Awaitable[None]]) -> None:
        """Add functions. Each function waits for the work of one part."""
        self._waits += waits

    async def wait(self) -> None:
        """Wait for the work of each part, one part after the other."""
        for wait in self._waits:
            await wait()


class Signals:
    """All signals of a worker."""

    def __init__(self) -> None:
        #: A task was put into the preemption queue, and the task may be due.
        self.task_queued: Signal[[]] = Signal()
        #: A slot is free: a handler has ended and, if it ran in a thread, the thread, too.
        self.slot_freed: Signal[[]] = Signal()
        #: The claim of the given tasks is over.
        self.claim_landed: Signal[[Iterable[str]]] = Signal()
        #: Slots may be free.
        self.room_made: Signal[[]] = Signal()
        #: A run has left its slot. It is sent for each run, so it does no more than wake the claimer.
        self.slot_left: Signal[[]] = Signal()
        #: The claimer has room, and is about to check the preemption queue. It may have taken most of its tasks before.
        self.queue_checked: Signal[[]] = Signal()
        #: What this worker knows about the given tasks may be wrong, so the tasks must be read again.
        self.tasks_doubtful: Signal[[Iterable[Any]]] = Signal()
        #: Permits of a pool are left for tasks that wait in this worker.
        self.permits_called: Signal[[str, int]] = Signal()
        #: More tasks may wait for permits than this worker knows, so a scan for due tasks is needed.
        self.permits_freed: Signal[[]] = Signal()
        #: A queue or task name was resumed, so a scan for all waiting tasks is needed.
        self.controls_resumed: Signal[[]] = Signal()
        #: Pauses, limits or retention have changed.
        self.controls_changed: Signal[[]] = Signal()
        #: Waits for the claims and removals that began before a control changed. They must end before the worker
        #: confirms the change.
        self.under_way = Barrier()
        #: Schedules have changed.
        self.schedules_changed: Signal[[]] = Signal()
        #: The collections were dropped and have been created again.
        self.collections_made: Signal[[]] = Signal()
        #: A heartbeat should be sent at once.
        self.heartbeat_wanted: Signal[[]] = Signal()
        #: A heartbeat was answered with the worker's document; None: the document is gone.
        self.heartbeat_answered: Signal[[dict[str, Any] | None]] = Signal()
        #: The thread that pings has ended by itself: the leases of all runs will lapse.
        self.pinger_ended: Signal[[]] = Signal()
