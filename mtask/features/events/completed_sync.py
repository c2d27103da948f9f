# Generated from mtask/features/events/completed_aio.py: edit that one, then run `make generate`.
"""The iterator over tasks as they end, for sync code. One stream of events serves all tasks."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from types import TracebackType
from typing import Self

from mtask.client.connection_sync import SyncConnection
from mtask.errors import AccessDenied, OperationFailed
from mtask.features.events import completed as several
from mtask.features.events import following
from mtask.features.events.completed import WaitForMany
from mtask.features.events.events_sync import Events
from mtask.kernel.document.task import Task


class Completed:
    """An iterator over tasks in the order in which they end. Use it in a `with` block, or call `close`.

    It closes itself after the last task, and after an error.
    """

    def __init__(self, client: SyncConnection, waiting: WaitForMany) -> None:
        self._client = client
        self._waiting = waiting
        self._began = time.monotonic()
        self._ended: deque[Task] = deque()
        self._events: Events | None = None
        self._is_closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __iter__(self) -> Iterator[Task]:
        return self

    def __next__(self) -> Task:
        try:
            while not self._ended and self._waiting.pending and not self._is_closed:
                self._ended.extend(self._client._run(several.ended(self._waiting)))
                if not self._ended and self._waiting.pending:
                    self._wait()
        except BaseException:
            self.close()
            raise
        if not self._ended:
            self.close()
            raise StopIteration
        return self._ended.popleft()

    def close(self) -> None:
        """End the iteration. The tasks are left as they are."""
        self._is_closed = True
        self._ended.clear()
        happening, self._events = self._events, None
        if happening is not None:
            happening.close()

    def _wait(self) -> None:
        """Wait until a task may have ended. Raises WaitTimeout."""
        waiting = self._waiting
        elapsed = time.monotonic() - self._began
        pause = waiting.timing.next_pause(elapsed)
        if pause is None:
            raise waiting.give_up()
        if waiting.is_value_near():
            self._client._sleep(pause)
            waiting.read_owing()
            return
        patience = waiting.patience(elapsed)
        if patience is None:
            self._client._sleep(pause)
            waiting.read_all()
            return
        try:
            if self._events is None:
                # All tasks are read once more after the stream is open, so that no end is missed.
                self._events = Events(
                    self._client._store, following.follow_tasks(list(waiting.pending)), self._client._make_ready
                )
                self._events.open()
                waiting.read_all()
            else:
                waiting.note(self._events.poll(patience))
        except (AccessDenied, OperationFailed):
            waiting.timing.can_follow = False  # the user lacks the right to open a change stream
            waiting.read_all()
