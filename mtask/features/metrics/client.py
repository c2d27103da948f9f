"""The metrics of all workers and queues, as a client reads them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from mtask.client import views
from mtask.features.metrics import operations as counts
from mtask.features.metrics.operations import KEPT, Counts
from mtask.features.metrics.rules import TOTALS_ID
from mtask.kernel.document.status import TaskStatus
from mtask.kernel.document.task import WorkerDocument
from mtask.kernel.driver.operation import Operation, metrics, server_time
from mtask.kernel.operations import workers
from mtask.kernel.worker.process.counts import MAX_PAIRS, Tally, tally_of, total
from mtask.search.by_queue import QueueCounts
from mtask.search.counts import Count

#: After this time without a write, a worker has counted nothing: its rate is 0.
_RECENT = timedelta(seconds=25)


@dataclass(frozen=True, slots=True)
class QueueMetrics:
    """The tasks of a queue, counted up to a bound."""

    queue: str
    counts: Mapping[TaskStatus, Count]
    #: The time for which the oldest due task was due when the tasks were counted. None: no task was due.
    oldest_due_age: timedelta | None


@dataclass(frozen=True, slots=True)
class WorkerMetrics:
    """A live worker."""

    worker: WorkerDocument
    run_cnt: int  #: the ended runs that it has counted since its start
    rate: float  #: the runs that ended in a second, between its last two writes

    @property
    def busy_cnt(self) -> int:
        """The number of slots in which handlers run."""
        return self.worker.running_cnt

    @property
    def free_cnt(self) -> int:
        """The number of slots without a handler."""
        return max(0, self.worker.concurrency - self.worker.running_cnt)


@dataclass(frozen=True, slots=True)
class FleetMetrics:
    """What metrics tell of all workers and queues."""

    time: datetime  #: the server's time
    #: The sum of what all workers have counted, dead ones included.
    tally: Tally
    workers: Sequence[WorkerMetrics] = ()
    queues: Sequence[QueueMetrics] = ()
    #: The time at which the tasks were counted. None: they are being counted for the first time.
    count_time: datetime | None = field(default=None)


def read() -> Operation[FleetMetrics]:
    """Return the metrics of all workers and queues."""
    found = yield from read_fleet()
    now = found.workers[0]["now"] if found.workers else (yield from server_time())
    counts = found.counts
    queues = () if counts is None else [_of_queue(counted, counts.time) for counted in counts.queues]
    workers = [_of_worker(worker, found.recent, now) for worker in views.workers_of(found.workers)]
    return FleetMetrics(now, found.tally, workers, queues, None if counts is None else counts.time)


def _of_queue(counted: QueueCounts, time: datetime) -> QueueMetrics:
    oldest = counted.oldest_preempt_time
    age = None if oldest is None or oldest > time else time - oldest
    return QueueMetrics(counted.queue, counted.counts, age)


def _of_worker(worker: WorkerDocument, recent: Mapping[str, Mapping[str, Any]], now: datetime) -> WorkerMetrics:
    stored = recent.get(worker.incarnation, {})
    return WorkerMetrics(worker, tally_of(stored).run_cnt, _rate_of(stored, now))


def _rate_of(stored: Mapping[str, Any], now: datetime) -> float:
    """Return the runs per second that a tally tells of the time before its last write; 0 if that was long ago."""
    written, seconds, runs = (stored.get(name) for name in ("update_time", "recent_seconds", "recent_runs"))
    if not isinstance(written, datetime) or now - written >= _RECENT:
        return 0.0
    if not isinstance(seconds, int | float) or not isinstance(runs, int) or seconds <= 0:
        return 0.0
    return runs / seconds


# --- fleet -----------------------------------------------------------------------------------------------

# Reads all that metrics tell of.

Document = dict[str, Any]
#: The age of a fold after which the tally itself says that it is in the totals.
_OLD_FOLD = timedelta(hours=1)


@dataclass(frozen=True, slots=True)
class Fleet:
    """All that metrics tell of: the tallies of all workers, dead ones included; the live workers; the counts."""

    tally: Tally
    #: The live workers' documents, each with the server's time as `now`, and what is stored of their last write.
    workers: Sequence[Document]
    recent: Mapping[str, Document] = field(default_factory=dict)
    counts: Counts | None = None


def read_fleet() -> Operation[Fleet]:
    """Return what metrics tell of. The tasks themselves are not read, except by who counts them for all."""
    counted = yield from counts.shared()
    found = yield metrics("find", {"kind": {"$in": ["worker", "totals"]}})
    live = yield from workers.live()
    now = live[0]["now"] if live else None
    admitted = dict.fromkeys(counted.admitted if counted is not None else ())
    tally = total(map(tally_of, _not_folded(found, now))).limited(admitted, is_full=len(admitted) >= MAX_PAIRS)
    recent = {document["incarnation"]: document for document in found if isinstance(document.get("incarnation"), str)}
    return Fleet(tally, live, recent, counted)


def _not_folded(found: Iterable[Document], now: datetime | None) -> list[Document]:
    """Return the totals, and the tallies that are not in them.

    The documents are not read at one instant. Whatever happens between two of them, each tally counts once: by itself,
    as long as the totals that were read do not name it. Totals name a tally for as long as it exists, and for an hour
    at least.
    """
    documents = list(found)
    totals = next((document for document in documents if document["_id"] == TOTALS_ID), {})
    folded = set(totals.get("folded", ()))
    kept = []
    for document in documents:
        expiry = document.get("expire_time")
        is_old = isinstance(expiry, datetime) and now is not None and expiry < now + KEPT - _OLD_FOLD
        if document["_id"] not in folded and not is_old:
            kept.append(document)
    return kept
