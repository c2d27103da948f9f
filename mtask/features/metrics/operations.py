"""Stores the tallies of workers, and folds those of dead workers into the totals.

A tally is one document for each incarnation of a worker. It holds all that the incarnation has counted, so writing it
twice changes nothing. Only its incarnation writes it, and only until it is folded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

from mtask.database import setup
from mtask.errors import DuplicateKey
from mtask.features.metrics import task_counts as counts
from mtask.features.metrics.rules import TOTALS_ID
from mtask.kernel.document.task import SCHEMA_VERSION
from mtask.kernel.driver.operation import Operation, metrics
from mtask.kernel.operations import workers
from mtask.kernel.statements import expressions as x
from mtask.kernel.worker.process.tally import MAX_PAIRS, Pair, Tally, tally_of, total

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
    admitted, is_full = yield from counts.admitted()
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
