"""Stores the tallies of workers, and folds those of dead workers into the totals.

A tally is one document for each incarnation of a worker. It holds all that the incarnation has counted, so writing it
twice changes nothing. Only its incarnation writes it, and only until it is folded.
"""

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
from mtask.kernel.driver.operation import Operation, metrics, server_time
from mtask.kernel.operations import workers
from mtask.kernel.statements import expressions as x
from mtask.kernel.worker.process.counts import MAX_PAIRS, OTHER, Pair, Tally, tally_of, total
from mtask.search import by_queue
from mtask.search.by_queue import QueueCounts
from mtask.search.counts import Count

#: The time for which a folded tally is kept. A worker that was frozen can still read what became of its tally.
KEPT = timedelta(days=2)
_MS = timedelta(milliseconds=1)
_RACES = 20


def record(tally_id: str, fields: Mapping[str, Any], *, is_first: bool) -> Operation[bool]:
    """Store a worker's tally; return False if it was folded, or removed, so that nothing is stored.

    `is_first`: the tally is not stored yet, as far as the worker knows.
    """
    if is_first:
        yield from setup.make_sure(["metrics"])
    change = {
        "$set": {**fields, "kind": "worker", "schema_version": SCHEMA_VERSION},
        "$currentDate": {"update_time": True},
    }
    try:
        result = yield metrics(
            "update_one", {"_id": tally_id, "fold_time": {"$exists": False}}, change, upsert=is_first
        )
    except DuplicateKey:  # the first write had landed, though its reply was lost; and then the tally was folded
        return False
    return bool(result.matched_count or result.upserted_id is not None)


def find_tally(tally_id: str) -> Operation[Tally | None]:
    """Return a tally as it is stored, or None if it is not there."""
    found = yield metrics("find_one", {"_id": tally_id})
    return None if found is None else tally_of(found)


def fold() -> Operation[int]:
    """Add the tallies of dead workers to the totals, each of them once; return the number of tallies added.

    Any number of processes may do this at once, and each may die at any step.
    """
    # The tallies are read before the workers: a worker registers before it stores its tally.
    there = yield metrics("find", {"kind": "worker"}, {"incarnation": 1})
    if not there:
        return 0
    alive = {document["incarnation"] for document in (yield from workers.live())}
    dead = [document["_id"] for document in there if document.get("incarnation") not in alive]
    if not dead:
        return 0
    # From here on, not even a worker that only seemed dead changes these tallies.
    unfolded = {"_id": {"$in": dead}, "fold_time": {"$exists": False}}
    yield metrics("update_many", unfolded, {"$currentDate": {"fold_time": True}})
    added = yield from _add_to_totals(dead, {document["_id"] for document in there})
    totals = yield metrics("find_one", {"_id": TOTALS_ID}, {"folded": 1})
    in_totals = [tally_id for tally_id in (totals or {}).get("folded", ()) if tally_id in dead]
    lasting = {"_id": {"$in": in_totals}, "expire_time": {"$exists": False}}
    yield metrics("update_many", lasting, [{"$set": {"expire_time": x.add_ms(x.NOW, KEPT // _MS)}}])
    return added


def _add_to_totals(dead: Sequence[str], there: set[str]) -> Operation[int]:
    """Add these tallies to the totals, but not those that are in it; return the number of tallies added."""
    admitted, is_full = yield from read_admitted()
    for _ in range(_RACES):
        totals = (yield metrics("find_one", {"_id": TOTALS_ID})) or {}
        folded, revision = list(totals.get("folded", ())), int(totals.get("revision", 0))
        wanted = [tally_id for tally_id in dead if tally_id not in folded]
        # A tally without fold_time came after the mark was set: the next fold takes it.
        frozen = yield metrics("find", {"_id": {"$in": wanted}, "fold_time": {"$exists": True}})
        if not frozen:
            return 0
        sum_of_all = total([tally_of(totals), *map(tally_of, frozen)])
        fields = {
            **_bounded(sum_of_all, admitted, is_full=is_full).document(),
            # A tally that is gone cannot come back, so it need not be named any more.
            "folded": [tally_id for tally_id in folded if tally_id in there] + [found["_id"] for found in frozen],
            "revision": revision + 1,
            "kind": "totals",
            "schema_version": SCHEMA_VERSION,
        }
        change = {"$set": fields, "$currentDate": {"update_time": True}}
        with suppress(DuplicateKey):  # another process has made the totals
            guard = {"_id": TOTALS_ID, "revision": revision}
            result = yield metrics("update_one", guard, change, upsert=not totals)
            if result.matched_count or result.upserted_id is not None:
                return len(frozen)
    return 0


def _bounded(tally: Tally, admitted: set[Pair], *, is_full: bool) -> Tally:
    """Bound the pairs of the totals. Pairs that metrics show, or may show one day, stay apart."""
    room = 0 if is_full else 2 * MAX_PAIRS
    apart = {pair for index, pair in enumerate(tally.pairs) if pair in admitted or index < room}
    return tally.limited(dict.fromkeys(apart), is_full=True)


# --- task counts -----------------------------------------------------------------------------------------

# Counts tasks for all who read metrics. One process counts at a time, under a lease; then a pause follows.

Document = dict[str, Any]
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
    now = yield from server_time()
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


def read_admitted() -> Operation[tuple[set[Pair], bool]]:
    """Return the pairs that metrics show, and whether there is no room for more."""
    counts = yield metrics("find_one", {"_id": COUNTS_ID}, {"admitted": 1})
    pairs = _pairs(counts or {})
    return set(pairs), len(pairs) >= MAX_PAIRS


def _pairs(counts: Mapping[str, Any]) -> list[Pair]:
    return [Pair(*entry) for entry in counts.get("admitted", ()) if isinstance(entry, list) and len(entry) == 2]
