"""Places: how many runs of a queue, or of one limit_key in it, there may be at once, and how many may start in a while.

One document in the collection `places` for each queue, or key in a queue, that is limited. Each entry is a run that was
given a place: until when it may be claimed (`claim_by`), and until when it counts as running (`until`). A place is given
before the claim, by one update that counts on the server, and the claim is valid only until `claim_by`; a ping moves
`until` before it moves the lease. So no run is ever live without its place, and the place of a worker that dies is free
when its lease has lapsed. A start counts from `claim_by`, the latest instant at which it can have been: so no window,
wherever it begins, holds more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from pymongo import ReturnDocument

from mtask.store import expressions as x
from mtask.store.operation import Operation, places

Document = dict[str, Any]
_RACES = 5
#: How long a place that nobody uses is kept, in ms.
_KEPT_MS = 3_600_000


@dataclass(frozen=True, slots=True)
class Place:
    """A queue, or one key in it."""

    queue: str
    key: str | None

    @property
    def id(self) -> Document:
        """The `_id`."""
        return {"queue": self.queue, "key": self.key}


@dataclass(frozen=True, slots=True)
class Limit:
    """How many at once, and how many starts in a window; None: any number."""

    concurrency: int | None = None
    starts: int | None = None
    window_ms: int = 0


@dataclass(frozen=True, slots=True)
class Wish:
    """Runs for which places are wanted, the most urgent first, by their run_ids; and how long their leases are, in ms."""

    place: Place
    limit: Limit
    run_ids: Sequence[str]
    leases_ms: Sequence[int]


@dataclass(frozen=True, slots=True)
class Given:
    """What was given: until when each run may be claimed; and when there is more, where the server can tell."""

    claim_by: Mapping[str, datetime]
    next_time: datetime | None
    now: datetime


def claim_ms(limit: Limit) -> int:
    """Return how long a place waits for its claim, in ms: a twentieth of the window, as starts count from its end."""
    return 2_000 if limit.starts is None else max(50, min(2_000, limit.window_ms // 20))


def _counts(now: x.Expression, window_ms: x.Expression) -> x.Expression:
    """Whether an entry still matters: it runs, or its start is within the window."""
    return {
        "$or": [
            {"$gt": ["$$entry.until", now]},
            {"$gt": ["$$entry.claim_by", {"$subtract": [now, window_ms]}]},
        ]
    }


def _size(entries: x.Expression, condition: x.Expression) -> x.Expression:
    return {"$size": {"$filter": {"input": entries, "as": "entry", "cond": condition}}}


def give(wishes: Sequence[Wish], now: x.Expression = x.NOW) -> list[Mapping[str, Any]]:
    """Return the update that gives as many of the wished places as are free, to all these documents at once."""
    ids = [wish.place.id for wish in wishes]

    def mine(values: list[Any]) -> x.Expression:
        return {"$arrayElemAt": [x.literal(values), "$$wish"]}

    window = mine([wish.limit.window_ms for wish in wishes])
    concurrency = mine([wish.limit.concurrency for wish in wishes])
    starts = mine([wish.limit.starts for wish in wishes])
    runs = mine(
        [
            [
                {"run_id": run_id, "claim_ms": claim_ms(wish.limit), "lease_ms": lease_ms}
                for run_id, lease_ms in zip(wish.run_ids, wish.leases_ms, strict=True)
            ]
            for wish in wishes
        ]
    )
    running = _size("$$kept", {"$gt": ["$$entry.until", now]})
    started = _size("$$kept", {"$gt": ["$$entry.claim_by", {"$subtract": [now, "$$window"]}]})
    unlimited = 1_000_000
    free = {
        "$max": [
            0,
            {
                "$min": [
                    {"$subtract": [{"$ifNull": ["$$concurrency", unlimited]}, running]},
                    {"$subtract": [{"$ifNull": ["$$starts", unlimited]}, started]},
                ]
            },
        ]
    }
    given = {
        "$map": {
            "input": {"$slice": ["$$runs", "$$free"]},
            "as": "run",
            "in": {
                "run_id": "$$run.run_id",
                "claim_by": x.add_ms(now, "$$run.claim_ms"),
                "until": {"$add": [now, "$$run.claim_ms", "$$run.lease_ms"]},
            },
        }
    }
    # $slice takes no 0 for its count.
    entries = {"$cond": [{"$gt": ["$$free", 0]}, {"$concatArrays": ["$$kept", given]}, "$$kept"]}
    kept = {
        "$filter": {
            "input": {"$ifNull": ["$entries", []]},
            "as": "entry",
            "cond": {"$let": {"vars": {"window": window}, "in": _counts(now, "$$window")}},
        }
    }
    counted = {
        "$let": {
            "vars": {"kept": kept, "window": window, "concurrency": concurrency, "starts": starts, "runs": runs},
            "in": {"$let": {"vars": {"free": free}, "in": entries}},
        }
    }
    return [
        {
            "$set": {
                "entries": {"$let": {"vars": {"wish": {"$indexOfArray": [x.literal(ids), "$_id"]}}, "in": counted}},
                "expire_time": x.add_ms(now, _KEPT_MS + max(wish.limit.window_ms for wish in wishes)),
            }
        }
    ]


def take(wishes: Sequence[Wish]) -> Operation[list[Given]]:
    """Give as many of the wished places as are free; return for each wish what it got.

    One place is one round trip, several are two; one more where a place is used for the first time.
    """
    ids = [wish.place.id for wish in wishes]
    pipeline = give(wishes)
    found: list[Document]
    for _ in range(_RACES):
        if len(ids) == 1:
            one = yield places(
                "find_one_and_update",
                {"_id": ids[0]},
                pipeline,
                return_document=ReturnDocument.AFTER,
                projection={"entries": 1, "now": x.NOW},
            )
            found = [one] if one is not None else []
        else:
            yield places("update_many", {"_id": {"$in": ids}}, pipeline)
            found = yield places("find", {"_id": {"$in": ids}}, {"entries": 1, "now": x.NOW})
        by_place = {(made["_id"]["queue"], made["_id"]["key"]): made for made in found}
        missing = [wish.place.id for wish in wishes if (wish.place.queue, wish.place.key) not in by_place]
        if not missing:
            return [_given(wish, by_place[wish.place.queue, wish.place.key]) for wish in wishes]
        yield places("insert_new", [{"_id": made, "entries": []} for made in missing])
        # What the others were given is not given again: an entry is known by its run_id, and they are released.
        yield from release({wish.place: wish.run_ids for wish in wishes if wish.place.id not in missing}, unused=True)
    return [Given({}, None, datetime.min) for _ in wishes]


def _given(wish: Wish, document: Document) -> Given:
    wanted = set(wish.run_ids)
    entries: list[Document] = document["entries"]
    claim_by = {entry["run_id"]: entry["claim_by"] for entry in entries if entry["run_id"] in wanted}
    now: datetime = document["now"]
    window = timedelta(milliseconds=wish.limit.window_ms)
    next_time = None
    if wish.limit.starts is not None:
        instants = sorted(entry["claim_by"] for entry in entries)
        if len(instants) >= wish.limit.starts:
            next_time = instants[-wish.limit.starts] + window
    return Given(claim_by, next_time, now)


def release(run_ids: Mapping[Place, Sequence[str]], *, unused: bool = False) -> Operation[None]:
    """Let places go: of runs that have ended, which count as starts all the same; or that were never claimed."""
    if not run_ids:
        return
    ids = [place.id for place in run_ids]
    ended = [run_id for several in run_ids.values() for run_id in several]
    if unused:
        yield places("update_many", {"_id": {"$in": ids}}, {"$pull": {"entries": {"run_id": {"$in": ended}}}})
        return
    is_ended = {"$in": ["$$entry.run_id", x.literal(ended)]}
    closed = {"$mergeObjects": ["$$entry", {"until": {"$min": ["$$entry.until", x.NOW]}}]}
    entries = {
        "$map": {
            "input": {"$ifNull": ["$entries", []]},
            "as": "entry",
            "in": {"$cond": [is_ended, closed, "$$entry"]},
        }
    }
    # Streams tell of it by this field: somebody may wait for the place.
    yield places("update_many", {"_id": {"$in": ids}}, [{"$set": {"entries": entries, "free_time": x.NOW}}])


def extend(run_ids: Mapping[Place, Sequence[str]], lease_ms: int, slack_ms: int) -> Operation[datetime]:
    """Keep the places of these runs for a ping that moves their leases within `slack_ms`; return until when it may."""
    held = [run_id for several in run_ids.values() for run_id in several]
    is_held = {"$in": ["$$entry.run_id", x.literal(held)]}
    until = {"$max": ["$$entry.until", {"$add": [x.NOW, lease_ms, slack_ms]}]}
    entries = {
        "$map": {
            "input": {"$ifNull": ["$entries", []]},
            "as": "entry",
            "in": {"$cond": [is_held, {"$mergeObjects": ["$$entry", {"until": until}]}, "$$entry"]},
        }
    }
    ids = [place.id for place in run_ids]
    yield places("update_many", {"_id": {"$in": ids}}, [{"$set": {"entries": entries, "extend_time": x.NOW}}])
    found: list[Document] = yield places("find", {"_id": {"$in": ids}}, {"extend_time": 1})
    oldest: datetime = min(document["extend_time"] for document in found)
    return oldest + timedelta(milliseconds=slack_ms)
