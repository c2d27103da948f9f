"""A publisher that goes on through a break, as a service with an idempotency key would."""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from typing import Self

import mtask
from mtask.errors import DatabaseUnavailable


class SteadyPublisher:
    """Publishes one `noop` after the other in a thread; what failed is published again, under its key."""

    def __init__(self, uri: str, database: str, interval: float = 0.02) -> None:
        self._client = mtask.Client(uri, database=database, server_timeout=timedelta(seconds=2))
        self._interval = interval
        self._is_stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="publisher", daemon=True)
        #: When the server had each task, on the monotonic clock.
        self.published: dict[str, float] = {}
        self.failures = 0
        self.error: BaseException | None = None

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> dict[str, float]:
        """Publish the one under way to its end, and stop."""
        self._is_stopped.set()
        self._thread.join(60)
        self._client.close()
        assert not self._thread.is_alive()
        assert self.error is None, self.error
        return self.published

    def _run(self) -> None:
        number = 0
        try:
            while not self._is_stopped.is_set():
                number += 1
                task_id = self._publish(f"steady/{number}")
                self.published[task_id] = time.monotonic()
                time.sleep(self._interval)
        except BaseException as error:
            self.error = error

    def _publish(self, key: str) -> str:
        while True:
            try:
                return self._client.publish("noop", {"value": key}, key=key).task_id
            except DatabaseUnavailable:
                self.failures += 1
                time.sleep(0.05)
