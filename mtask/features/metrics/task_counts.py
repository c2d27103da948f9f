"""Counts tasks for all who read metrics. One process counts at a time, under a lease; then a pause follows."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from pymongo import ReturnDocument

from mtask.database import setup
from mtask.errors import AccessDenied, DuplicateKey
from mtask.features.metrics.rules import COUNTS_ID, TOTALS_ID
from mtask.kernel.document.status import TaskStatus
from mtask.kernel.document.task import SCHEMA_VERSION
from mtask.kernel.driver.operation import Operation, command, metrics
from mtask.kernel.statements import expressions as x
from mtask.kernel.worker.process.tally import MAX_PAIRS, OTHER, Pair, tally_of
from mtask.search import by_queue
from mtask.search.by_queue import QueueCounts
from mtask.search.counts import Count

Document = dict[str, Any]
_MS = timedelta(milliseconds=1)
#: The most tasks of a queue and status that metrics count, by keys of an index.
MOST_COUNTED = 100_000
#: The longest time for which one process counts for all; and the least time for which counts are fresh. They are fresh
#: for `_TIMES` the time that the counting took. So counts take a third of a hundredth of one core of the database.
_LEASE, _FRESH, _TIMES = timedelta(seconds=60), timedelta(seconds=2), 300


@dataclass(frozen=True, slots=True)
class Counts:
    """The tasks of all queues as somebody has counted them, and the pairs that metrics show."""

    queues: Sequence[QueueCounts]
    time: datetime
    admitted: Sequence[Pair]


def shared() -> Operation[Counts | None]:
    """Return the shared counts of tasks. If they are not fresh, count anew, unless another process does.

    None: another process makes the first counts now.
    """
    known = yield from _known()
    if known is not None and known["is_fresh"]:
        return _counts_of(known)
    holder = secrets.token_hex(8)
    try:
        has_lease = yield from _take_lease(holder, exists=known is not None)
    except AccessDenied:  # a user who may only read counts for itself
        queues, now = yield from _counted()
        return Counts(queues, now, (yield from _admission(known or {})))
    if has_lease:
        yield from _refresh(holder, known or {})
        known = yield from _known()
    return None if known is None else _counts_of(known)


def _known() -> Operation[Document | None]:
    fields = {"queues": 1, "count_time": 1, "admitted": 1, "is_fresh": {"$gt": ["$fresh_until", x.NOW]}}
    found: Document | None = yield metrics("find_one", {"_id": COUNTS_ID}, fields)
    return found


def _take_lease(holder: str, *, exists: bool) -> Operation[bool]:
    if not exists:
        yield from setup.make_sure(["metrics"])
        with suppress(DuplicateKey):
            yield metrics("insert_one", {"_id": COUNTS_ID, "kind": "counts", "schema_version": SCHEMA_VERSION})
    over = [{"$lte": [{"$ifNull": [f"${name}", x.NOW]}, x.NOW]} for name in ("lease_expire_time", "fresh_until")]
    lease = {"holder": holder, "lease_expire_time": x.add_ms(x.NOW, _LEASE // _MS)}
    taken = yield metrics(
        "find_one_and_update",
        {"_id": COUNTS_ID, "$expr": {"$and": over}},
        [{"$set": lease}],
        projection={"_id": 1},
        return_document=ReturnDocument.AFTER,
    )
    return taken is not None


def _refresh(holder: str, known: Mapping[str, Any]) -> Operation[None]:
    queues, _ = yield from _counted()
    admitted = yield from _admission(known)
    # Both instants are the server's, so no process needs a clock.
    began = {"$subtract": ["$lease_expire_time", _LEASE // _MS]}
    took_ms = {"$subtract": [x.NOW, began]}
    fields = {
        "queues": x.literal([_stored(counted) for counted in queues]),
        "count_time": began,
        "fresh_until": x.add_ms(x.NOW, {"$max": [_FRESH // _MS, {"$multiply": [_TIMES, took_ms]}]}),
        "admitted": x.literal([list(pair) for pair in admitted]),
        "lease_expire_time": x.NOW,
        "update_time": x.NOW,
    }
    yield metrics("update_one", {"_id": COUNTS_ID, "holder": holder}, [{"$set": fields}])


def _counted() -> Operation[tuple[list[QueueCounts], datetime]]:
    hello = yield command("hello")
    now: datetime = hello["localTime"]
    return (yield from by_queue.queues(MOST_COUNTED)), now


def _admission(known: Mapping[str, Any]) -> Operation[list[Pair]]:
    """Return the pairs that metrics show: those of before, and new ones as long as there is room.

    A pair is never taken off the list, because its counter would fall.
    """
    found = yield metrics("find", {"kind": {"$in": ["worker", "totals"]}}, {"pairs.queue": 1, "pairs.name": 1})
    admitted = dict.fromkeys(_pairs(known))
    for document in sorted(found, key=lambda document: (document["_id"] != TOTALS_ID, str(document["_id"]))):
        for pair in tally_of(document).pairs:
            if len(admitted) < MAX_PAIRS and pair != OTHER:
                admitted.setdefault(pair)
    return list(admitted)


def _stored(counted: QueueCounts) -> Document:
    numbers = {status.value: [count.count, count.is_more] for status, count in counted.counts.items()}
    return {"queue": counted.queue, "counts": numbers, "oldest_due_time": counted.oldest_preempt_time}


def _counts_of(found: Document) -> Counts | None:
    time = found.get("count_time")
    if not isinstance(time, datetime):
        return None
    queues = [
        QueueCounts(
            str(stored["queue"]),
            {
                TaskStatus(status): Count(int(number), bool(is_more))
                for status, (number, is_more) in stored["counts"].items()
            },
            stored.get("oldest_due_time"),
        )
        for stored in found.get("queues", ())
    ]
    return Counts(queues, time, _pairs(found))


def admitted() -> Operation[tuple[set[Pair], bool]]:
    """Return the pairs that metrics show, and whether there is no room for more."""
    counts = yield metrics("find_one", {"_id": COUNTS_ID}, {"admitted": 1})
    pairs = _pairs(counts or {})
    return set(pairs), len(pairs) >= MAX_PAIRS


def _pairs(counts: Mapping[str, Any]) -> list[Pair]:
    return [Pair(*entry) for entry in counts.get("admitted", ()) if isinstance(entry, list) and len(entry) == 2]
