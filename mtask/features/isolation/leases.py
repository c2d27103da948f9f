"""The leases of an executor's runs. The worker holds them; here it is asked to pause pings, and told of progress."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

from mtask.features.isolation.channel import Message
from mtask.kernel.worker.running import leases
from mtask.kernel.worker.running.run import HeldRun

#: The least time between two messages of progress, in seconds.
_BETWEEN_PROGRESS = 0.1


class RemoteLeases:
    """Stands for the worker's pinger: it does in messages what the pinger does in the worker's process.

    Threads of handlers call its methods, except where they say otherwise.
    """

    def __init__(self, send: Callable[[Message], None], worker_id: str) -> None:
        """`send` sends a message to the worker. Create this in the event loop; `send` is called there."""
        self._loop = asyncio.get_running_loop()
        self._send_in_loop = send
        self._worker_id = worker_id
        self._paused: dict[str, Future[float]] = {}
        self._next_progress: asyncio.TimerHandle | None = None
        self._is_progress_due = False

    def paused(self, run_id: str, until: float) -> None:
        """Take the worker's answer: it sends no ping of this run now. Call this in the event loop."""
        waiting = self._paused.get(run_id)
        if waiting is not None and not waiting.done():
            waiting.set_result(until)

    @contextmanager
    def suspended(self, run: HeldRun) -> Iterator[None]:
        """Let the worker send no ping for this run inside the `with` block. See `Pinger.suspended`."""
        waiting: Future[float] = Future()
        self._paused[run.run_id] = waiting
        try:
            self._send("pause", run)
            run.trusted_until = max(run.trusted_until, waiting.result())
        finally:
            del self._paused[run.run_id]
        run.suspended += 1
        try:
            yield
        finally:
            run.suspended -= 1
            self._send("resume", run)

    def apply(self, runs: Sequence[HeldRun], documents: list[dict[str, Any]], sent: float | None) -> None:
        """Apply the document that a renewal has read, and tell the worker how long the lease holds."""
        leases.apply(runs, documents, sent, self._worker_id)
        for run in runs:
            self._send("renewed", run, until=run.trusted_until)

    def release(self, run: HeldRun) -> None:
        """Tell the worker that the transaction has committed: the run needs its lease no more."""
        self._send("committed", run, goes_on=run.goes_on, owes_value=run.owes_value)

    def expedite(self, run: HeldRun) -> None:
        """Tell the worker of the run's progress: at once, but not more than ten times a second."""
        if not self._is_progress_due:
            self._is_progress_due = True
            self._loop.call_soon_threadsafe(self._tell_progress, run)

    def _tell_progress(self, run: HeldRun) -> None:
        if self._next_progress is not None:
            return  # the timer calls this again
        self._is_progress_due = False
        progress = run.progress
        if progress is not None:
            run.was_written(progress)
            self._send_in_loop({"kind": "progress", "run_id": run.run_id, "progress": dict(progress)})
            self._next_progress = self._loop.call_later(_BETWEEN_PROGRESS, self._may_tell_again, run)

    def _may_tell_again(self, run: HeldRun) -> None:
        self._next_progress = None
        if self._is_progress_due:
            self._tell_progress(run)

    def _send(self, kind: str, run: HeldRun, **more: Any) -> None:
        message = {"kind": kind, "run_id": run.run_id, **more}
        self._loop.call_soon_threadsafe(self._send_in_loop, message)
