"""The pinger: leases and heartbeats, in a thread of its own with a connection of its own.

A handler that blocks the event loop does not lose its lease by it. The thread also watches the deadline up to
which each lease may be trusted, and the end of a stop that takes too long.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime, timedelta
from time import monotonic
from typing import Any

from mtask.errors import DatabaseUnavailable, MtaskError
from mtask.model.status import RunStatus
from mtask.store import claims, workers
from mtask.store.driver import SyncStore
from mtask.store.pipelines import Outcome
from mtask.worker.log import fields, logger
from mtask.worker.run import EndReason, HeldRun, trusted_until

_GROUP = 500
#: Pings due within this part of their interval go along with one that is due.
_SLACK = 0.1
_MAX_CALL = 5.0
_MIN_CALL = 0.2
_IDLE = 3600.0
#: After a failure that nobody foresaw, in seconds: what is due still is.
_AFTER_FAILURE = 0.1
#: How long a run is pinged beyond its run_timeout_ms, in seconds: enough for its FAIL to be written.
_OVERTIME = 10.0
#: Between two pings that are sent for the sake of progress, in seconds.
_BETWEEN_PROGRESS = 1.0


class Pinger:
    """Holds the leases of this worker's runs, and its place in the registry."""

    def __init__(
        self,
        store: SyncStore,
        registration: workers.Registration,
        heartbeat_interval: timedelta,
        beat: Callable[[], workers.Heartbeat],
        on_registered: Callable[[dict[str, Any] | None], None],
    ) -> None:
        self._store = store
        self._registration = registration
        self._interval = heartbeat_interval.total_seconds()
        self._beat = beat
        self._on_registered = on_registered
        self._runs: dict[str, HeldRun] = {}
        self._condition = threading.Condition()
        self._pinging = threading.Lock()
        self._wake_at = 0.0
        self._next_beat = monotonic() + self._interval
        self._is_stopped = False
        self._deadline: tuple[float, Callable[[], None]] | None = None
        self._thread = threading.Thread(target=self._loop, name="mtask-pinger", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread and wait for it."""
        with self._condition:
            self._is_stopped = True
            self._condition.notify()
        self._thread.join(timeout=_MAX_CALL * 2)

    def hold(self, run: HeldRun) -> None:
        """Keep this run's lease alive from now on."""
        with self._condition:
            self._runs[run.run_id] = run
            if min(run.next_ping, run.trusted_until) < self._wake_at:
                self._condition.notify()

    def release(self, run: HeldRun) -> None:
        """Let go of a run."""
        with self._condition:
            self._runs.pop(run.run_id, None)

    def held(self) -> list[HeldRun]:
        """Return the runs held."""
        with self._condition:
            return list(self._runs.values())

    def expedite(self, run: HeldRun) -> None:
        """Ping this run soon, to tell of its progress: at once, but for a second after the last time."""
        with self._condition:
            run.next_ping = min(run.next_ping, max(monotonic(), run.progress_at + _BETWEEN_PROGRESS))
            if run.next_ping < self._wake_at:
                self._condition.notify()

    def beat_now(self) -> None:
        """Send a heartbeat at once, and read what is asked of this worker."""
        with self._condition:
            self._next_beat = 0.0
            self._condition.notify()

    def call_at(self, deadline: float, action: Callable[[], None]) -> None:
        """Call `action` in this thread once, at a monotonic instant (seconds): it works though the loop is blocked."""
        with self._condition:
            self._deadline = (deadline, action)
            self._condition.notify()

    def hand_back(self, outcomes: Sequence[Outcome]) -> None:
        """Give runs back from this thread, in the last resort."""
        self._store.timeout = timedelta(seconds=_MAX_CALL)
        self._store.run(claims.finish(outcomes))

    @contextmanager
    def suspended(self, run: HeldRun) -> Iterator[None]:
        """Send no ping for this run meanwhile: it would conflict with the run's own transaction. May block."""
        with self._condition:
            run.suspended += 1
        try:
            with self._pinging:  # one that is under way has ended
                pass
            yield
        finally:
            with self._condition:
                run.suspended -= 1
                self._condition.notify()

    def _loop(self) -> None:
        while True:
            with self._condition:
                while not self._is_stopped:
                    now = monotonic()
                    self._wake_at = self._next_event(now)
                    if self._wake_at <= now:
                        break
                    self._condition.wait(min(self._wake_at - now, _IDLE))
                if self._is_stopped:
                    return
            try:
                self._work(monotonic())
            except Exception:
                # Whatever it is, the leases of the other runs must go on.
                logger.exception("pinger failed and goes on")
                with self._condition:
                    self._condition.wait(_AFTER_FAILURE)

    def _next_event(self, now: float) -> float:
        moments = [self._next_beat]
        if self._deadline:
            moments.append(self._deadline[0])
        moments.extend(
            min(run.next_ping, run.trusted_until) if self._is_to_ping(run, now) else run.trusted_until
            for run in self._runs.values()
            if not run.is_over
        )
        return min(moments)

    def _work(self, now: float) -> None:
        with self._condition:
            deadline = self._deadline
            if deadline and deadline[0] <= now:
                self._deadline = None
        if deadline and deadline[0] <= now:
            deadline[1]()
        self._expire(now)
        self._ping_due(now)
        self._expire(monotonic())
        if self._next_beat <= monotonic():
            self._heartbeat()

    def _expire(self, now: float) -> None:
        for run in self.held():
            if run.trusted_until <= now and not run.is_over:
                logger.warning("lease lost", extra=fields(task=run.task_id, run=run.run_id))
                run.end(EndReason.LEASE_LOST)

    @staticmethod
    def _is_to_ping(run: HeldRun, now: float) -> bool:
        # A run out of time whose handler cannot be ended is not kept alive: its lease lapses, and it counts.
        return not run.suspended and not run.is_over and now < min(run.trusted_until, run.deadline + _OVERTIME)

    def _ping_due(self, now: float) -> None:
        with self._condition:
            live = [run for run in self._runs.values() if self._is_to_ping(run, now)]
        if not any(run.next_ping <= now for run in live):
            return
        by_lease: dict[int, list[HeldRun]] = defaultdict(list)
        for run in live:
            if run.next_ping <= now + _SLACK * run.ping_interval:
                by_lease[run.lease_ms].append(run)
        for lease_ms, runs in by_lease.items():
            for start in range(0, len(runs), _GROUP):
                self._ping(runs[start : start + _GROUP], lease_ms)

    def _ping(self, candidates: list[HeldRun], lease_ms: int) -> None:
        with self._pinging:
            runs = [run for run in candidates if not run.suspended]
            if not runs:
                return
            sent = monotonic()
            # A call that hangs must not hide another run's deadline.
            self._bound_call(min(run.trusted_until for run in runs) - sent)
            told = {run.run_id: progress for run in runs if (progress := run.progress) is not None}
            try:
                ping = claims.ping({run.run_id: run.task_id for run in runs}, lease_ms, told)
                documents = self._store.run(ping)
            except MtaskError as error:
                logger.warning("ping failed, will be sent again", extra=fields(runs=len(runs), reason=str(error)))
                again = monotonic() + min(1.0, min(run.ping_interval for run in runs) / 4)
                for run in runs:
                    run.next_ping = again
                is_refused = not isinstance(error, DatabaseUnavailable)
            else:
                self.apply(runs, documents, sent)
                self._note_told(runs, told, sent)
                return
        if is_refused and len(runs) > 1:
            # One malformed document fails its whole group: the others' leases are kept one by one.
            for run in runs:
                self._ping([run], lease_ms)

    def _note_told(self, runs: Sequence[HeldRun], told: Mapping[str, Mapping[str, Any]], sent: float) -> None:
        for run in runs:
            if run.run_id in told:
                run.progress_at = sent
                if not run.was_told(told[run.run_id]):  # the handler has told more meanwhile
                    self.expedite(run)

    def _bound_call(self, left: float) -> None:
        self._store.timeout = timedelta(seconds=max(_MIN_CALL, min(_MAX_CALL, left)))

    def apply(self, runs: list[HeldRun], documents: list[dict[str, Any]], sent: float | None) -> None:
        """Take what the tasks say of these runs; `sent` is when a ping was sent, None where it was only a look."""
        by_id = {document["_id"]: document for document in documents}
        for run in runs:
            if sent is not None:
                run.next_ping = sent + run.ping_interval
            try:
                self._apply(run, by_id.get(run.task_id), sent, is_alone=len(runs) == 1)
            except Exception:
                # Its lease is not trusted any longer than it was; those of the others are.
                logger.exception("a held task cannot be read", extra=fields(task=run.task_id, run=run.run_id))

    def _apply(self, run: HeldRun, document: dict[str, Any] | None, sent: float | None, *, is_alone: bool) -> None:
        if run.is_finishing:
            if sent is not None and document is not None:
                self._extend(run, document, sent)
            return  # how it ends is the finisher's to find out
        reason = _end_reason(run, document, self._registration.worker_id)
        if reason is not None:
            if reason is EndReason.REMOVED and sent is not None and is_alone:
                reason = EndReason.LEASE_LOST  # a single ping's fence tells no more than that
            run.end(reason)
        if document is not None and reason not in (EndReason.REMOVED, EndReason.LEASE_LOST) and sent is not None:
            self._extend(run, document, sent)

    def _extend(self, run: HeldRun, document: dict[str, Any], sent: float) -> None:
        if not _is_held(run, document):
            return
        run.trusted_until = max(run.trusted_until, trusted_until(sent, run.lease_ms))
        interval = _option(document, "ping_interval_ms")
        if isinstance(interval, int | float) and 0 < interval < run.lease_ms:
            run.ping_interval = interval / 1000
            run.next_ping = sent + run.ping_interval

    def _heartbeat(self) -> None:
        self._next_beat = monotonic() + self._interval
        lease_deadline = min((run.next_ping for run in self.held() if not run.suspended), default=_IDLE + monotonic())
        self._bound_call(max(1.0, lease_deadline - monotonic()))
        try:
            document = self._store.run(workers.heartbeat(self._registration, self._beat()))
        except MtaskError as error:
            logger.warning("heartbeat failed, will be sent again", extra=fields(reason=str(error)))
            self._next_beat = monotonic() + min(1.0, self._interval)
            return
        self._on_registered(document)


def _option(document: dict[str, Any], name: str) -> Any:
    option = document.get("task_option")
    return option.get(name) if isinstance(option, dict) else None


def _is_held(run: HeldRun, document: dict[str, Any]) -> bool:
    own = claims.run_of(document, run.run_id)
    if own is None or own.get("status") != RunStatus.RUNNING:
        return False
    expiry = own.get("ping_expire_time")
    return isinstance(expiry, datetime) and expiry > document["now"]


def _end_reason(run: HeldRun, document: dict[str, Any] | None, worker_id: str) -> EndReason | None:
    if document is None:
        return EndReason.REMOVED
    if not _is_held(run, document):
        return EndReason.LEASE_LOST
    if document["task_state"].get("cancel_requested"):
        return EndReason.CANCELED
    admitted = _option(document, "specific_worker_ids")
    if isinstance(admitted, list) and admitted and worker_id not in admitted:
        return EndReason.EXCLUDED
    return None
