"""The documents of the collection `metrics`: a worker's tally, the totals of dead workers, and the counts of tasks."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from mtask.kernel.document.options import Count
from mtask.kernel.document.task import Instant, Text
from mtask.kernel.document.values import Stored

#: A sum of durations, in seconds. The bound is far above all sums.
Seconds = Annotated[float, Field(ge=0, le=1e15)]
#: The `_id` of the totals of dead workers, and of the counts of tasks.
TOTALS_ID, COUNTS_ID = "totals", "counts"


class HistogramDocument(Stored):
    """Durations by buckets. `mtask.kernel.worker.process.counts.BOUNDS` has the bounds of the buckets."""

    counts: list[Count]
    seconds: Seconds


class PairDocument(Stored):
    """What is counted of the runs of one name in one queue."""

    queue: Text
    name: Text
    runs: dict[str, Any]  #: the number of ended runs by their status
    wait: HistogramDocument
    run: HistogramDocument


class QueueDocument(Stored):
    """The counted tasks of one queue."""

    queue: Text
    counts: dict[str, Any]  #: by status: the number, and whether there are more
    oldest_due_time: Instant | None = None


class MetricsDocument(Stored):
    """One document of `metrics`."""

    id: Annotated[Text, Field(alias="_id")]
    kind: Literal["worker", "totals", "counts"]
    update_time: Instant | None = None
    schema_version: Literal[1] = 1
    # --- of a worker: its tally; of the totals: the sum of the tallies of dead workers.
    worker_id: Text | None = None
    incarnation: Text | None = None
    pairs: list[PairDocument] = Field(default_factory=list)
    leases_lapsed: Count = 0
    claims_lost: Count = 0
    lateness: HistogramDocument | None = None
    #: The runs that have ended between the last two writes, and the time between them.
    recent_runs: Count = 0
    recent_seconds: Seconds = 0.0
    #: The time since which a dead worker's tally does not change any more, because it is about to be folded.
    fold_time: Instant | None = None
    expire_time: Instant | None = None  #: the time at which the TTL index removes the tally, after it was folded
    # --- of the totals
    folded: list[Text] = Field(default_factory=list)  #: the tallies that are in the totals and not yet removed
    revision: Count = 0
    # --- of the counts
    queues: list[QueueDocument] = Field(default_factory=list)
    count_time: Instant | None = None
    fresh_until: Instant | None = None
    admitted: list[list[Text]] = Field(default_factory=list)  #: the pairs that metrics show, each queue and name
    holder: Text | None = None  #: who counts now, and until when
    lease_expire_time: Instant | None = None
