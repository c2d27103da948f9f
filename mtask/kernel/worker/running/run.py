"""A run that this process holds, with its lease and the time until which the lease is trusted."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import datetime, timedelta
from enum import Enum
from functools import lru_cache
from math import inf
from time import monotonic
from typing import Any, NamedTuple, Protocol

from mtask.errors import MtaskError
from mtask.kernel.document.handlers import Handler
from mtask.kernel.document.options import ping_seconds
from mtask.kernel.document.task import StoredTask
from mtask.kernel.document.values import Trace, is_sampled, trace_id_in
from mtask.kernel.driver.codec import Codec, owner_of
from mtask.kernel.operations import encode
from mtask.kernel.operations.claim import RunFacts, claimed_params, claimed_task
from mtask.logs import RunMarks

#: The worker does not trust the last part of a lease. `_MARGIN`: the length of that part, as a fraction of the lease.
#: `_MAX_MARGIN`: the greatest length of that part, in seconds.
_MARGIN, _MAX_MARGIN = 0.05, 0.25
_MS = timedelta(milliseconds=1)

#: The sort key of the runs that wait to start: interrupted tasks first, then the highest priority, then the task that
#: has been due longest.
Order = tuple[bool, int, datetime]


class EndReason(Enum):
    """The reasons for which a run is ended by something other than its own handler."""

    CANCELED = "cancel requested"
    EXCLUDED = "specific_worker_ids no longer admits this worker"
    REMOVED = "the task was removed"
    LEASE_LOST = "the lease was lost"
    RUN_TIMEOUT = "it ran longer than run_timeout_ms"
    WORKER_STOP = "the worker stops"
    NO_SLOT = "no slot became free for it"
    UNREADABLE = "it cannot be decrypted here"
    LATE = "its handler could not begin in time"


#: If a run ends for one of these reasons, no outcome is written: the run belongs to another worker, or no longer
#: exists.
SILENT = frozenset({EndReason.REMOVED, EndReason.LEASE_LOST})


def trusted_until(sent: float, lease_ms: int) -> float:
    """Return the monotonic instant (seconds) until which a lease that was requested at `sent` is trusted.

    The lease is counted from the time at which the claim or ping was *sent*: a slow reply must not extend the trust.
    """
    return sent + _trusted_seconds(lease_ms)


def _trusted_seconds(lease_ms: int) -> float:
    lease = lease_ms / 1000
    return lease - min(lease * _MARGIN, _MAX_MARGIN)


class _Lease(NamedTuple):
    """What follows from the length of a run's lease."""

    lease_ms: int
    ping_interval: float
    #: The time for which the lease is trusted from when its claim was sent, in seconds.
    trust: float


# Most runs of one handler have leases of one length.
@lru_cache(maxsize=256)
def _lease_of(length: timedelta, ping_interval_ms: int) -> _Lease:
    lease_ms = length // _MS
    interval = ping_seconds(min(ping_interval_ms, lease_ms / 2), lease_ms)
    return _Lease(lease_ms, interval, _trusted_seconds(lease_ms))


def _encoded(codec: Codec, task: StoredTask, progress: Mapping[str, Any]) -> Mapping[str, Any]:
    try:
        return encode.progress(codec, owner_of(task), progress)
    except MtaskError:  # the end of the run says so
        return {**progress, "message": None}


class Admitted(Protocol):
    """What a gate has given for runs."""

    def release(self, task_id: str, run_id: str, *, is_closed: bool) -> None:
        """Forget a run, and let others pass in its place if `is_closed`: it is closed, or its task was removed."""


class HeldRun:
    """A run that this worker holds. The event loop, the pinger and handler threads read and set its fields."""

    __slots__ = (
        "_document",
        "_end_lock",
        "_task",
        "admission",
        "asyncio_task",
        "attempt",
        "began_at",
        "begin_by",
        "codec",
        "deadline",
        "end_reason",
        "goes_on",
        "handler",
        "has_result",
        "is_finishing",
        "is_interrupted",
        "is_locked",
        "is_misfit",
        "is_pinged_apart",
        "is_simple",
        "key",
        "lease_ms",
        "loop",
        "marks",
        "name",
        "next_ping",
        "not_before",
        "on_begin",
        "on_end",
        "option",
        "order",
        "owes",
        "owes_value",
        "ping_interval",
        "progress",
        "progress_at",
        "queue",
        "result",
        "run_id",
        "stored_trace",
        "succeeded_in_transaction",
        "suspended",
        "takes_turns",
        "task_id",
        "took",
        "trace",
        "trusted_until",
    )

    def __init__(self, facts: RunFacts, task: StoredTask | dict[str, Any], handler: Handler, sent: float) -> None:
        """`task` may be the document from which `simple_facts` made the facts. The task is then made when it is read.

        `sent`: the time at which the claim was sent (monotonic seconds).
        """
        self._task: StoredTask | None = None
        self._document: dict[str, Any] | None = None
        if isinstance(task, StoredTask):
            self._task = task
        else:
            self._document = task
        (
            self.task_id,
            self.name,
            self.key,
            self.queue,
            option,
            self.run_id,
            self.attempt,
            claim_time,
            ping_expire_time,
            self.is_simple,
            self.owes,
            due,
            self.is_interrupted,
        ) = facts
        self.option = option
        since = due if due.tzinfo is None else due.replace(tzinfo=None)  # each is in UTC
        self.order: Order = (not self.is_interrupted, -option.priority, since)
        #: Whether the run goes behind the runs of its queue that were claimed before it: the queue has fair turns.
        self.takes_turns = False
        self.handler = handler
        # The claim wrote the times of the run. The options were read after the claim, and may be newer.
        self.lease_ms, self.ping_interval, trust = _lease_of(ping_expire_time - claim_time, option.ping_interval_ms)
        #: The monotonic instant (seconds) at which run_timeout_ms is over. It is set when the handler begins.
        self.deadline = inf
        #: The monotonic instant (seconds) at which the handler began; and the seconds that it took, once it has ended.
        self.began_at: float | None = None
        self.took: float | None = None
        self.trusted_until = sent + trust
        self.next_ping = sent + self.ping_interval
        #: The progress that is not written yet.
        self.progress: Mapping[str, Any] | None = None
        #: The time at which a ping last carried progress (monotonic seconds).
        self.progress_at = -inf
        #: The number of open blocks of `Pinger.suspended` for this run. While a block is open, no ping is sent.
        self.suspended = 0
        #: Whether a ping that is sent for this run alone is under way or queued.
        self.is_pinged_apart = False
        #: Whether the last ping that was sent for this run alone has timed out. The usual cause: an open transaction
        #: has locked the document.
        self.is_locked = False
        #: Whether the params do not fit the handler.
        self.is_misfit = False
        #: What the gate has given for this run; None: its task did not wait there.
        self.admission: Admitted | None = None
        self.end_reason: EndReason | None = None
        self.is_finishing = False
        self.succeeded_in_transaction = False
        #: What the handler set as its result with `context.set_result`, if `has_result`.
        self.result: Any = None
        self.has_result = False
        #: Whether the task goes on as another task, by a SUCCESS that a transaction has committed.
        self.goes_on = False
        #: Whether the SUCCESS that a transaction has committed says that the value is still to follow.
        self.owes_value = False
        #: What the lines of its log tell of it, once its handler has begun.
        self.marks: RunMarks | None = None
        #: The span of the run, and the same if it is stored with what comes of the run.
        self.trace: Trace | None = None
        self.stored_trace: Trace | None = None
        self.asyncio_task: asyncio.Task[Any] | None = None
        self.loop: asyncio.AbstractEventLoop | None = None
        #: The function to call when the run is ended. Its arguments are the run and the reason. The function must not
        #: refer to the run: such a reference cycle would keep the task in memory until the cycle collector runs.
        self.on_end: Callable[[HeldRun, EndReason], None] | None = None
        #: The earliest start of the handler (monotonic seconds), and what to call when it begins, in its thread.
        self.not_before = 0.0
        #: The latest start of the handler (monotonic seconds): the gate counts it for no later time.
        self.begin_by = inf
        self.on_begin: Callable[[], object] | None = None
        #: Encodes the progress. None: it is stored as it is, or by another process.
        self.codec: Codec | None = None
        self._end_lock = threading.Lock()

    @property
    def task(self) -> StoredTask:
        """The task as it was at the claim of this run. It is made when it is first read; any thread may read it."""
        if self._task is None:
            with self._end_lock:
                if self._task is None:
                    assert self._document is not None
                    self._task = claimed_task(self._document)
                    self._document = None
        return self._task

    @property
    def params(self) -> Any:
        """The params of the task, without making the task."""
        document = self._document
        return self.task.params if document is None else claimed_params(document)

    @property
    def version(self) -> int:
        """The version of the handler for which the params were made, without making the task."""
        document = self._document
        return self.task.handler_version if document is None else document.get("version", 1)

    @property
    def declared(self) -> str | None:
        """The hash of what the publisher knew of the handler, without making the task."""
        document = self._document
        return self.task.declared if document is None else document.get("declared")

    def begins(self) -> None:
        """Start to count run_timeout_ms. The time for which the run waited for a slot does not count."""
        limit_ms = self.option.run_timeout_ms
        self.began_at = monotonic()
        if limit_ms is not None:
            self.deadline = self.began_at + limit_ms / 1000

    def note_end(self) -> None:
        """Note that the handler has ended, if it had begun."""
        if self.began_at is not None and self.took is None:
            self.took = monotonic() - self.began_at

    def leave_gate(self, *, is_closed: bool) -> None:
        """Give back what the gate has given for this run. `is_closed`: the run is closed, or its task was removed."""
        if self.admission is not None:
            self.admission.release(self.task_id, self.run_id, is_closed=is_closed)

    def marked(self) -> RunMarks:
        """Return what the lines of its log tell of it."""
        if self.marks is None:
            self.marks = RunMarks(self.name, self.key, self.run_id, self.attempt, self.queue)
            document = self._document
            # The task is not made for this.
            self.marks.tenant = self.task.tenant if document is None else document.get("tenant")
            if self.codec is not None:
                self.marks.sealed = self.task.sealed
        return self.marks

    def follow(self, trace: Trace, *, is_stored: bool) -> None:
        """Note the span of the run. With `is_stored`, store it with what comes of the run."""
        self.trace = trace
        self.stored_trace = trace if is_stored else None
        if is_sampled(trace):
            self.marked().trace_id = trace_id_in(trace)

    @property
    def ended_because(self) -> str | None:
        """The reason for which the run was ended by something other than its own handler."""
        return None if self.end_reason is None else self.end_reason.value

    @property
    def ended_as(self) -> str | None:
        """What becomes of a run that the worker ended: FAIL, CANCELED, or LOST if nothing is written."""
        if self.end_reason is None:
            return None
        if self.end_reason in SILENT:
            return "LOST"
        return "FAIL" if self.end_reason is EndReason.RUN_TIMEOUT else "CANCELED"

    @property
    def is_over(self) -> bool:
        """Whether this worker no longer needs the lease.

        That is so if the lease is lost, the task is removed, or a transaction has committed the SUCCESS.
        """
        return self.end_reason in SILENT or self.succeeded_in_transaction

    @property
    def is_lease_valid(self) -> bool:
        """Whether this worker may still trust the lease, by the monotonic clock of this process."""
        return self.end_reason not in SILENT and monotonic() < self.trusted_until

    @property
    def is_cancelled(self) -> bool:
        """Whether the handler should end. Once its transaction has committed, a lost lease is no reason to end."""
        return self.end_reason is not None or not (self.succeeded_in_transaction or self.is_lease_valid)

    @property
    def is_in_transaction(self) -> bool:
        """Whether a transaction of the handler is open."""
        return self.suspended > 0

    def set_result(self, result: Any) -> None:
        """Keep what the handler returns. It stands for what the handler returns in the end."""
        if self.succeeded_in_transaction and not self.owes_value:
            raise RuntimeError("the transaction has committed without this result: call set_result in its block")
        self.result, self.has_result = result, True

    def report(self, progress: Mapping[str, Any]) -> None:
        """Keep this progress until a ping or the finish has written it. Newer progress replaces it."""
        if self.codec is not None:
            progress = _encoded(self.codec, self.task, progress)
        with self._end_lock:
            self.progress = progress

    def was_written(self, progress: Mapping[str, Any]) -> bool:
        """Note that this progress is written; return whether no newer progress waits to be written."""
        with self._end_lock:
            if self.progress is progress:
                self.progress = None
            return self.progress is None

    def end(self, reason: EndReason) -> None:
        """End the run for this reason. Any thread may call this.

        If the run was ended before, the earlier reason stays. But a reason in `SILENT` replaces a reason that is not in
        `SILENT`.
        """
        with self._end_lock:
            if self.succeeded_in_transaction:
                return
            if self.end_reason is not None and not (reason in SILENT and self.end_reason not in SILENT):
                return
            first = self.end_reason is None
            self.end_reason = reason
        if first or reason in SILENT:
            self._wake(reason)

    def _wake(self, reason: EndReason) -> None:
        loop, callback = self.loop, self.on_end
        if loop is not None and callback is not None:
            with suppress(RuntimeError):  # the loop has closed: the worker has stopped
                loop.call_soon_threadsafe(callback, self, reason)
