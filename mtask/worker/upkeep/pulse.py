"""The pulse: shows whoever watches this worker that its event loop turns and its pinger lives.

A thread of its own shows it, because a disk or a socket may be slow. Before each time the thread asks the event loop
for a sign of life. Without the sign it shows nothing, and whoever watches notices.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Sequence
from time import monotonic
from typing import Protocol

from mtask.health import Health
from mtask.worker.leases.pinger import Pinger
from mtask.worker.state.scope import Vitals

#: The longest time between two beats, in seconds.
INTERVAL = 2.0


class Witness(Protocol):
    """What is shown the pulse of this worker. The thread calls it, and at the first time the event loop."""

    def see(self, health: Health) -> None:
        """Take note that the worker lives."""

    def end(self) -> None:
        """Take note that the worker has ended in order."""


class Pulse:
    """Beats while the worker works."""

    def __init__(
        self,
        worker_id: str,
        vitals: Vitals,
        pinger: Pinger,
        witnesses: Sequence[Witness],
        interval: float = INTERVAL,
    ) -> None:
        """The caller must create it in the worker's event loop. `interval`: the time between two beats, in seconds."""
        self._worker_id = worker_id
        self._vitals = vitals
        self._pinger = pinger
        self._witnesses = witnesses
        self._interval = interval
        self._loop = asyncio.get_running_loop()
        self._has_turned, self._is_awaited, self._is_stopped = threading.Event(), threading.Event(), False
        self._thread = threading.Thread(target=self._run, name="mtask-pulse", daemon=True)

    def start(self) -> None:
        """Beat now, and go on in the thread."""
        self._beat()
        self._thread.start()

    def beat_soon(self) -> None:
        """Beat without waiting for the interval: the worker's status has changed."""
        self._is_awaited.set()

    def stop(self) -> None:
        """Beat no more."""
        self._is_stopped = True
        self._is_awaited.set()
        self._has_turned.set()
        if self._thread.ident is not None:  # the thread was started
            self._thread.join(timeout=INTERVAL)
        for witness in self._witnesses:
            witness.end()

    def _run(self) -> None:
        while not self._is_stopped:
            self._is_awaited.wait(self._interval)
            self._is_awaited.clear()
            self._has_turned.clear()
            try:
                self._loop.call_soon_threadsafe(self._has_turned.set)
            except RuntimeError:  # the event loop has closed: the worker has ended
                return
            self._has_turned.wait()
            if self._pinger.is_alive and not self._is_stopped:
                self._beat()

    def _beat(self) -> None:
        answered, is_answered = self._pinger.answered
        status = self._vitals.status.value
        health = Health(self._worker_id, os.getpid(), status, monotonic(), answered, is_answered)
        for witness in self._witnesses:
            witness.see(health)
