"""Workers that are only on record: real workers take them for live peers, which claim nothing and cost nothing."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from itertools import count

from benchmarks.measuring.fleet import DEFAULT_CONCURRENCY
from benchmarks.measuring.server import Scratch, Server
from mtask.kernel.document.status import WorkerStatus
from mtask.kernel.driver.stores import SyncStore
from mtask.kernel.operations import workers
from mtask.kernel.worker.process.registration import registration

#: Nobody sends heartbeats for them.
_LIFE = timedelta(days=1)


class RegisteredWorkers:
    """Live workers without processes."""

    def __init__(self, server: Server, scratch: Scratch, size: int, names: Sequence[str]) -> None:
        self._store = SyncStore(server.mongo, scratch.name)
        self._names = names
        self._numbers = count(1)
        self._live: deque[workers.Registration] = deque()
        for _ in range(size):
            self._come()

    def change(self, seconds: float, interval: float) -> None:
        """For some seconds, have a new worker come or the oldest one stop after each interval, in turn."""
        end = time.monotonic() + seconds
        for step in count():
            if time.monotonic() + interval > end:
                break
            time.sleep(interval)
            if step % 2:
                self._go()
            else:
                self._come()
        time.sleep(max(0.0, end - time.monotonic()))

    def _come(self) -> None:
        me = registration(f"peer-{next(self._numbers)}", ["default"], self._names, DEFAULT_CONCURRENCY, _LIFE)
        self._store.run(workers.register(me))
        self._live.append(me)

    def _go(self) -> None:
        last = workers.Heartbeat(WorkerStatus.STOPPED, 0, DEFAULT_CONCURRENCY, [])
        self._store.run(workers.heartbeat(self._live.popleft(), last))
