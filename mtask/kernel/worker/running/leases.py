"""The pinger: sends pings and heartbeats, in a thread of its own with a connection of its own.

So a run keeps its lease even if a handler blocks the event loop. The thread also ends runs whose lease may have lapsed,
and ends the process if a stop takes too long.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import datetime, timedelta
from time import monotonic
from typing import Any

from mtask.errors import DatabaseTimeout, DatabaseUnavailable, MtaskError
from mtask.kernel.document.options import ping_seconds
from mtask.kernel.document.status import RunStatus
from mtask.kernel.driver.stores import SyncStore
from mtask.kernel.operations import claim as claims
from mtask.kernel.operations import workers
from mtask.kernel.statements.finish import Outcome
from mtask.kernel.worker.process.log import fields, logger, told
from mtask.kernel.worker.process.registration import heartbeat
from mtask.kernel.worker.process.state import Scope
from mtask.kernel.worker.running.run import EndReason, HeldRun, trusted_until

#: The most runs that one ping covers.
_GROUP = 500
#: A ping may be early by this fraction of its interval, so that it can be sent together with a ping that is due now.
_SLACK = 0.1
#: The longest time limit of a statement, in seconds. `_MIN_CALL` is the shortest.
_MAX_CALL = 5.0
_MIN_CALL = 0.2
#: The shortest and the longest time limit of a ping that may meet a locked document, in seconds.
_LEAST_WAIT, _MOST_WAIT = 0.5, _MAX_CALL
#: The most runs that are pinged at the same time, each with a ping of its own.
_MAX_APART = 8
#: The time limit for handing back all runs together, in seconds. This is the last resort of a stop.
_HAND_BACK = 2.0
#: The longest wait of the pinger's thread, in seconds.
_IDLE = 3600.0
#: The pause after an unexpected error, in seconds. Due pings are sent after this pause.
_AFTER_FAILURE = 0.1
#: The time for which a run is still pinged after its run_timeout_ms has passed, in seconds. So its FAIL can be written.
#: Tests tune it.
OVERTIME = 10.0
#: The least time between two pings that are sent early because of progress, in seconds.
_BETWEEN_PROGRESS = 1.0


class Pinger:
    """Extends the leases of this worker's runs, and sends this worker's heartbeats."""

    def __init__(
        self,
        scope: Scope,
        store: SyncStore,
        registration: workers.Registration,
        heartbeat_interval: timedelta,
    ) -> None:
        """Only the pinger may use `store`. The caller must create the pinger in the worker's event loop."""
        self._scope = scope
        self._store = store
        self._registration = registration
        self._interval = heartbeat_interval.total_seconds()
        self._worker_loop = asyncio.get_running_loop()
        self._runs: dict[str, HeldRun] = {}
        self._condition = threading.Condition()
        #: The run_ids of the runs whose ping is under way.
        self._under_way: set[str] = set()
        self._tempo = scope.tempo
        #: The threads that each send a ping for a single run. They are created when the first such ping is needed.
        self._apart: ThreadPoolExecutor | None = None
        self._wake_at = 0.0
        self._next_beat = monotonic() + self._interval
        # The worker has just registered, so the database has answered.
        self._answered, self._is_answered = monotonic(), True
        self._is_stopped = self._is_resting = self._is_working = False
        self._deadline: tuple[float, Callable[[], None]] | None = None
        self._thread = threading.Thread(target=self._live, name="mtask-pinger", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def rest(self) -> None:
        """Send no more pings and heartbeats, and wait for the last ones to end.

        The action of `call_at` is still called.
        """
        with self._condition:
            self._is_resting = True
            self._condition.notify_all()
            self._condition.wait_for(lambda: not self._is_working, timeout=_MAX_CALL * 2)

    def stop(self) -> None:
        """Stop the thread and wait for its end."""
        with self._condition:
            self._is_stopped = True
            self._condition.notify_all()
        if self._thread.ident is not None:  # the thread was started
            self._thread.join(timeout=_MAX_CALL * 2)
        if self._apart is not None:
            self._apart.shutdown(cancel_futures=True)

    @property
    def is_alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    @property
    def answered(self) -> tuple[float, bool]:
        """When the database last answered a heartbeat (monotonic seconds), and whether it answered the last one."""
        return self._answered, self._is_answered

    def hold_all(self, runs: Sequence[HeldRun]) -> None:
        """Ping these runs from now on."""
        if not runs:
            return
        with self._condition:
            self._runs.update((run.run_id, run) for run in runs)
            # The first ping of a run is due long before its lease ends.
            if min(run.next_ping for run in runs) < self._wake_at:
                self._condition.notify_all()

    def release(self, run: HeldRun) -> None:
        """Ping this run no more."""
        with self._condition:
            self._runs.pop(run.run_id, None)

    def release_all(self, runs: Iterable[HeldRun]) -> None:
        """Ping these runs no more."""
        with self._condition:
            for run in runs:
                self._runs.pop(run.run_id, None)

    def held(self) -> list[HeldRun]:
        """Return the runs held."""
        with self._condition:
            return list(self._runs.values())

    def expedite(self, run: HeldRun) -> None:
        """Ping this run soon, because it has progress to report.

        The ping is sent at once, but not within one second of the last ping that reported progress.
        """
        with self._condition:
            run.next_ping = min(run.next_ping, max(monotonic(), run.progress_at + _BETWEEN_PROGRESS))
            if run.next_ping < self._wake_at:
                self._condition.notify_all()

    def beat_now(self) -> None:
        """Send a heartbeat at once. The reply holds the orders to this worker."""
        with self._condition:
            self._next_beat = 0.0
            self._condition.notify_all()

    def call_at(self, deadline: float, action: Callable[[], None]) -> None:
        """Call `action` once in the pinger's thread, at the time `deadline` (monotonic seconds).

        The call happens even if the event loop is blocked.
        """
        with self._condition:
            self._deadline = (deadline, action)
            self._condition.notify_all()

    def hand_back(self, outcomes: Sequence[Outcome]) -> None:
        """Hand runs back in the pinger's thread, as the last resort of a stop.

        If some documents are locked, each run is handed back in a statement of its own.

        Raises MtaskError if some run could not be handed back.
        """
        try:
            self._store.run(claims.finish(outcomes, timedelta(seconds=_HAND_BACK)))
            return
        except DatabaseTimeout:
            if len(outcomes) == 1:
                raise
        with ThreadPoolExecutor(_MAX_APART) as apart:
            timeout = timedelta(seconds=_LEAST_WAIT)
            each = [apart.submit(self._store.run, claims.finish([outcome], timeout)) for outcome in outcomes]
        failed = [error for one in each if (error := one.exception()) is not None]
        if failed:
            raise failed[0]

    @contextmanager
    def suspended(self, run: HeldRun) -> Iterator[None]:
        """Send no ping for this run inside the `with` block: a ping would conflict with the run's transaction.

        The block begins when no ping of the run is under way.
        """
        with self._condition:
            run.suspended += 1
        try:
            with self._condition:  # wait for the end of a ping that is under way
                self._condition.wait_for(lambda: run.run_id not in self._under_way)
            yield
        finally:
            with self._condition:
                run.suspended -= 1
                self._condition.notify_all()

    def _live(self) -> None:
        """Ping until `stop`. If the thread ends before, whatever it died of, tell the worker: no lease is kept now."""
        try:
            self._loop()
        finally:
            if not self._is_stopped:
                with suppress(RuntimeError):  # the event loop has closed: the worker has ended
                    self._worker_loop.call_soon_threadsafe(self._scope.signals.pinger_ended.send)

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
                self._is_working = True
            try:
                self.work(monotonic())
            except Exception:
                # The loop goes on after any error, because the leases of the other runs must be kept.
                logger.exception("pinger failed and goes on")
                with self._condition:
                    self._condition.wait(_AFTER_FAILURE)
            finally:
                with self._condition:
                    self._is_working = False
                    self._condition.notify_all()

    def _next_event(self, now: float) -> float:
        moments = [self._deadline[0]] if self._deadline else [now + _IDLE]
        if self._is_resting:
            return moments[0]
        moments.append(self._next_beat)
        moments.extend(
            min(run.next_ping, run.trusted_until) if self._is_to_ping(run, now) else run.trusted_until
            for run in self._runs.values()
            if not run.is_over
        )
        return min(moments)

    def work(self, now: float) -> None:
        """Take one turn of the pinger's thread: send what is due at `now` (monotonic seconds)."""
        with self._condition:
            deadline = self._deadline
            if deadline and deadline[0] <= now:
                self._deadline = None
        if deadline and deadline[0] <= now:
            deadline[1]()
        if self._is_resting:
            return
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
        # A run is pinged no more if its handler has not ended `OVERTIME` after the run's deadline. Then the lease
        # lapses, and the lapse counts as a failure.
        is_wanted = not (run.suspended or run.is_pinged_apart or run.is_over)
        return is_wanted and now < min(run.trusted_until, run.deadline + OVERTIME)

    def _ping_due(self, now: float) -> None:
        with self._condition:
            live = [run for run in self._runs.values() if self._is_to_ping(run, now)]
        if not any(run.next_ping <= now for run in live):
            return
        due = [run for run in live if run.next_ping <= now + _SLACK * run.ping_interval]
        for run in due:
            if run.is_locked:
                self._ping_apart(run)
        due = [run for run in due if not run.is_locked]
        for start in range(0, len(due), _GROUP):
            self._ping(due[start : start + _GROUP])

    def _ping(self, candidates: Sequence[HeldRun]) -> None:
        """Ping these runs together. If a document is locked or refused, send each run's ping in a thread of its own."""
        with self._sending(candidates) as runs:
            if not runs:
                return
            limit = self._limit_of(runs)
            try:
                self._send(runs, limit)
                return
            except MtaskError as error:
                self._put_off(runs, error)
                is_timeout, is_refused = isinstance(error, DatabaseTimeout), not isinstance(error, DatabaseUnavailable)
            # A malformed document makes the ping of its whole group fail. A locked document delays the ping of its
            # whole group. If each run has a ping of its own, the leases of the other runs are kept.
            is_apart = self._is_held_up(runs, limit) if is_timeout else is_refused and len(runs) > 1
        for run in runs if is_apart else ():
            self._ping_apart(run)

    def _send(self, runs: Sequence[HeldRun], limit: float) -> None:
        sent = monotonic()
        reported = {run.run_id: progress for run in runs if (progress := run.progress) is not None}
        leases = {run.run_id: run.lease_ms for run in runs}
        ping = claims.ping({run.run_id: run.task_id for run in runs}, leases, reported, timedelta(seconds=limit))
        documents = self._store.run(ping)
        self._tempo.took(monotonic() - sent)
        self.apply(runs, documents, sent)
        self._note_progress(runs, reported, sent)

    def _put_off(self, runs: Sequence[HeldRun], error: MtaskError) -> None:
        logger.warning("ping failed, will be sent again", extra=fields(runs=len(runs), reason=told(error)))
        again = monotonic() + min(1.0, min(run.ping_interval for run in runs) / 4)
        for run in runs:
            run.next_ping = again

    def _is_held_up(self, runs: Sequence[HeldRun], limit: float) -> bool:
        """Whether a ping of these runs has probably waited for a locked document.

        A read of the same documents decides: a lock does not delay a read, but a busy server does.
        """
        asked = monotonic()
        try:
            self._store.run(claims.held([run.task_id for run in runs], timedelta(seconds=limit)))
        except MtaskError:
            self._tempo.took(limit)
            return False
        is_prompt = monotonic() - asked < limit / 2
        if not is_prompt:
            self._tempo.took(limit)
        return is_prompt

    def _ping_apart(self, run: HeldRun) -> None:
        """Ping this run in another thread. So its locked document does not hold up the other runs."""
        if self._apart is None:
            self._apart = ThreadPoolExecutor(_MAX_APART, thread_name_prefix="mtask-pinger-apart")
        run.is_pinged_apart = True
        self._apart.submit(self._ping_alone, run)

    def _ping_alone(self, run: HeldRun) -> None:
        try:
            with self._sending([run], is_apart=True) as runs:
                if runs and not self._is_stopped and not run.is_over and monotonic() < run.trusted_until:
                    self._send(runs, self._limit_of(runs))
                    run.is_locked = False
        except MtaskError as error:
            run.is_locked = isinstance(error, DatabaseTimeout)
            self._put_off([run], error)
        except Exception:
            logger.exception("ping failed", extra=fields(task=run.task_id, run=run.run_id))
        finally:
            with self._condition:
                run.is_pinged_apart = False
                self._condition.notify_all()

    @contextmanager
    def _sending(self, candidates: Sequence[HeldRun], *, is_apart: bool = False) -> Iterator[list[HeldRun]]:
        """Yield those runs that may be pinged now. Until the end of this block, `suspended` waits."""
        with self._condition:
            runs = [run for run in candidates if not run.suspended and (is_apart or not run.is_pinged_apart)]
            self._under_way.update(run.run_id for run in runs)
        try:
            yield runs
        finally:
            with self._condition:
                self._under_way.difference_update(run.run_id for run in runs)
                self._condition.notify_all()

    def _limit_of(self, runs: Sequence[HeldRun]) -> float:
        """Return the time limit of a ping of these runs, in seconds. The ping must end before any lease can lapse."""
        now = monotonic()
        with self._condition:
            own = {run.run_id for run in runs}
            held = [run for run in self._runs.values() if not (run.is_over or run.suspended)]
        others = [run for run in held if run.run_id not in own]
        left = min((run.trusted_until - now for run in (*runs, *others) if run.trusted_until > now), default=_MAX_CALL)
        if len(runs) == 1 and not others:
            return max(_MIN_CALL, min(_MAX_CALL, left))  # no other run has to wait for this ping
        return max(_MIN_CALL, min(self._tempo.limit(_LEAST_WAIT, _MOST_WAIT), left))

    def _note_progress(self, runs: Sequence[HeldRun], reported: Mapping[str, Mapping[str, Any]], sent: float) -> None:
        for run in runs:
            if run.run_id in reported:
                run.progress_at = sent
                if not run.was_written(reported[run.run_id]):  # the handler has reported more progress meanwhile
                    self.expedite(run)

    def _bound_call(self, left: float) -> None:
        self._store.timeout = timedelta(seconds=max(_MIN_CALL, min(_MAX_CALL, left)))

    def apply(self, runs: Sequence[HeldRun], documents: list[dict[str, Any]], sent: float | None) -> None:
        """Apply the documents of these runs' tasks to the runs: see `mtask.kernel.worker.running.leases`."""
        apply(runs, documents, sent, self._registration.worker_id)

    def _heartbeat(self) -> None:
        self._next_beat = monotonic() + self._interval
        lease_deadline = min((run.next_ping for run in self.held() if not run.suspended), default=_IDLE + monotonic())
        self._bound_call(max(1.0, lease_deadline - monotonic()))
        try:
            document = self._store.run(workers.heartbeat(self._registration, heartbeat(self._scope)))
        except MtaskError as error:
            self._is_answered = False
            logger.warning("heartbeat failed, will be sent again", extra=fields(reason=told(error)))
            self._next_beat = monotonic() + min(1.0, self._interval)
            return
        self._answered, self._is_answered = monotonic(), True
        if not self._worker_loop.is_closed():
            with suppress(RuntimeError):  # the event loop has closed just now
                self._worker_loop.call_soon_threadsafe(self._scope.signals.heartbeat_answered.send, document)


# --- replies ---------------------------------------------------------------------------------------------

# Replies: updates the runs that this worker holds from documents. A ping or a lookup has read the documents.


def apply(runs: Sequence[HeldRun], documents: Sequence[dict[str, Any]], sent: float | None, worker_id: str) -> None:
    """Extend the lease of each run, or end the run, according to the document of its task.

    `sent`: the time at which the ping was sent (monotonic seconds). None: the documents were only read, and no lease is
    extended.
    """
    by_id = {document["_id"]: document for document in documents}
    for run in runs:
        if sent is not None:
            run.next_ping = sent + run.ping_interval
        try:
            apply_one(run, by_id.get(run.task_id), sent, worker_id, is_alone=len(runs) == 1)
        except Exception:
            # Only the lease of this run is not extended. The leases of the other runs are extended.
            logger.exception("a held task cannot be read", extra=fields(task=run.task_id, run=run.run_id))


def apply_one(
    run: HeldRun, document: dict[str, Any] | None, sent: float | None, worker_id: str, *, is_alone: bool
) -> None:
    """Do as `apply` does, for one run. `is_alone`: only this document was asked for."""
    if run.is_finishing:
        if sent is not None and document is not None:
            _extend(run, document, sent)
        return  # the finisher finds out whether this run's lease is lost
    reason = _end_reason(run, document, worker_id)
    if reason is not None:
        if reason is EndReason.REMOVED and sent is not None and is_alone:
            reason = EndReason.LEASE_LOST  # a ping of a single run returns no document in either case
        run.end(reason)
    if document is not None and reason not in (EndReason.REMOVED, EndReason.LEASE_LOST) and sent is not None:
        _extend(run, document, sent)


def _extend(run: HeldRun, document: dict[str, Any], sent: float) -> None:
    if not _is_held(run, document):
        return
    run.trusted_until = max(run.trusted_until, trusted_until(sent, run.lease_ms))
    interval = _option(document, "ping_interval_ms")
    if isinstance(interval, int | float) and 0 < interval < run.lease_ms:
        run.ping_interval = ping_seconds(interval, run.lease_ms)
        run.next_ping = sent + run.ping_interval


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
