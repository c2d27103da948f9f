"""Statements of publishing that gathers.

Calls under one key are ordered by the server's time that each call read before it was sent, then by their ids. So the
result does not depend on the order in which calls arrive, and a call that is sent twice counts once.

- A **round** is the life of a task from its publish, or from a new publish after its end, until its end.
- A call of the kind "latest" gives a round its params if no newer call has. A call of the kind "calls" adds its params
  to the list that the round collects.
- While a run holds the task, calls go to the **next round**, `again`. It begins in the same update that ends the last
  run. A round that collects begins only when the present round has ended, because its tries need the collected calls.

How the next round of a task begins is in `mtask.kernel.statements.rounds`: every general update ends with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mtask.kernel.document.status import FINAL, RunStatus, TaskStatus
from mtask.kernel.document.task import MAX_CALLS, GatherKind
from mtask.kernel.statements import expressions as x
from mtask.kernel.statements.rounds import (
    CONTENT,
    GATHER,
    NEWEST,
    Stage,
    begin,
    begun,
    collects,
    has_begun,
    has_live,
    without_calls,
)

#: The largest BSON size of the params of a round that collects, in bytes.
MAX_GATHERED_BYTES = 4 * 1024 * 1024

_KNOWN = [f"{GATHER}.ids", f"{GATHER}.seen", f"{x.AGAIN}.gather.ids"]


#: The present round of a task, in the form of a next round.
_PRESENT = {
    "params": "$params",
    "queue": "$queue",
    "task_option": "$task_option",
    "lookup": "$lookup",
    "sealed": "$sealed",
    "version": "$version",
    "start_time": f"{x.STATE}.start_time",
    "gather": {"$ifNull": [GATHER, {}]},
}


@dataclass(frozen=True, slots=True)
class SentCall:
    """A publish call that gathers, as it is sent."""

    asked_time: x.Expression  #: an instant, or an expression in a transaction
    call_id: str
    kind: GatherKind
    #: params, queue, task_option, and lookup where it is given.
    content: Mapping[str, Any]
    #: The start_time of a call without debounce.
    start: x.Expression = None
    debounce_ms: int | None = None
    max_wait_ms: int | None = None
    #: Whether the caller has chosen the call_id. Then the caller may repeat the call, with a newer asked_time.
    is_own_id: bool = False

    def remembers(self) -> bool:
        """Whether the document remembers the id of the call."""
        return self.kind == "calls" or self.is_own_id

    def mark(self) -> dict[str, x.Expression]:
        """Return the place of the call in the order of all calls."""
        return {"asked_time": self.asked_time, "call_id": x.literal(self.call_id)}

    def waits(self) -> dict[str, int]:
        """Return the durations of the call that are given."""
        given = {"debounce_ms": self.debounce_ms, "max_wait_ms": self.max_wait_ms}
        return {name: value for name, value in given.items() if value is not None}


def last_asked_time() -> x.Expression:
    """Return the asked_time of the newest call in the document, or null."""
    return {"$max": [f"{NEWEST}.asked_time", f"{x.AGAIN}.gather.newest.asked_time"]}


def asked_time(now: x.Expression = x.NOW) -> x.Expression:
    """Return the asked_time of a call inside a transaction. This is the server's form of `gathering.asked_time`."""
    return {"$max": [now, {"$add": [last_asked_time(), 1]}]}


def is_known(call_id: str) -> x.Expression:
    """Whether a round has remembered this call. This is the server's form of `gathering.is_known`."""
    return {"$or": [{"$in": [x.literal(call_id), {"$ifNull": [ids, []]}]} for ids in _KNOWN]}


def must_wait(now: x.Expression) -> x.Expression:
    """Whether a call goes to the next round. This is the server's form of `gathering.must_wait`."""
    is_tried = {"$and": [collects(), has_begun(), {"$not": [x.is_final()]}]}
    return {"$or": [x.AGAIN, has_live(now), is_tried]}


def start_time(gather: str, given: x.Expression, now: x.Expression) -> x.Expression:
    """Return the start of a round, or null. This is the server's form of `gathering.start_time`."""
    by_newest = x.add_ms({"$min": [f"{gather}.newest.asked_time", now]}, f"{gather}.debounce_ms")
    by_first = x.add_ms(f"{gather}.first_time", f"{gather}.max_wait_ms")
    # $min ignores null and missing values, and a sum with one of them is null.
    computed = {"$cond": [{"$gt": [f"{gather}.debounce_ms", None]}, {"$min": [by_newest, by_first]}, given]}
    return {
        "$let": {
            "vars": {"start": {"$ifNull": [computed, None]}},
            "in": {
                "$cond": [{"$and": ["$$start", f"{gather}.full"]}, {"$min": ["$$start", now]}, "$$start"],
            },
        }
    }


def add(call: SentCall, now: x.Expression = x.NOW) -> list[Stage]:
    """Return the stages that add a call to a task. Stages that close lapsed runs and derive must come before."""
    is_over = {"$or": [has_begun(), x.is_final()]}
    # base_round in `tests/oracles/gathering.py`
    base = {"$cond": ["$$waits", {"$ifNull": [x.AGAIN, None]}, {"$cond": [is_over, None, _PRESENT]}]}
    is_in_place = {"$and": [{"$not": ["$$waits"]}, "$$base"]}
    gather = {"$cond": ["$$base", "$$round.gather", begun("$$round")]}
    into_round = {
        "$cond": [
            "$$waits",
            {"$mergeObjects": ["$$ROOT", {"again": "$$round"}]},
            begin("$$round", gather, now, {"$not": ["$$base"]}),
        ]
    }
    consumed = {"$cond": [is_in_place, f"{GATHER}.consumed", NEWEST]}
    changed = _with_base(base, consumed, into_round, call, now)
    return [{"$replaceWith": {"$let": {"vars": {"waits": must_wait(now)}, "in": changed}}}]


def reopen(call: SentCall, now: x.Expression = x.NOW) -> Stage:
    """Open a task that has ended although a run holds it. This is the server's form of `gathering.reopens`.

    A task can end so if concurrent_worker_cnt is lowered. Nobody looks for lapsed runs of a task that has ended, so the
    call would wait for ever if that run's worker died. As in a retry, the live run belongs to the opened round. This
    must come before the stages that derive the status.
    """
    is_repeated = is_known(call.call_id) if call.remembers() else False
    is_late = False if call.kind == "calls" else {"$lte": [call.mark(), {"$ifNull": [NEWEST, None]}]}
    has_no_part = {"$or": [x.FLOW, is_repeated, is_late]}
    opens = {"$and": [x.is_final(), has_live(now), {"$not": [has_no_part]}]}
    stays = {"$eq": ["$$run.status", RunStatus.RUNNING.value]}
    aged = {"$cond": [stays, "$$run", {"$mergeObjects": ["$$run", {"past": True}]}]}
    opened = {
        "status": TaskStatus.INIT.value,
        "failed_cnt": 0,
        "worker_states": {"$map": {"input": x.RUNS, "as": "run", "in": aged}},
    }
    return {"$set": {"task_state": {"$cond": [opens, {"$mergeObjects": [x.STATE, opened]}, x.STATE]}}}


def untouched(task_id: str) -> dict[str, Any]:
    """Match the task if its round is open and has not begun. This is the guard of `add_untouched`."""
    is_alone = {"_id": task_id, "task_state.status": TaskStatus.INIT.value, "again": None, "flow": None}
    return {**is_alone, "$expr": is_untouched()}


def is_untouched() -> x.Expression:
    """Whether the task is INIT and no claim has begun its round."""
    return {"$and": [{"$eq": [x.STATUS, TaskStatus.INIT.value]}, {"$not": [has_begun()]}]}


def add_untouched(call: SentCall, now: x.Expression = x.NOW) -> list[Stage]:
    """Add a call to a task that matches `untouched`, with the same change as all stages together.

    Many calls come before the first claim. No lease can have lapsed then, so half of the stages is not needed.
    """
    into_round = begin("$$round", "$$round.gather", now, False)
    return [{"$replaceWith": _with_base(_PRESENT, f"{GATHER}.consumed", into_round, call, now)}]


def _with_base(
    base: x.Expression, consumed: x.Expression, into_round: x.Expression, call: SentCall, now: x.Expression
) -> x.Expression:
    changed = {"$cond": ["$$round", into_round, "$$ROOT"]}
    merged = {"$let": {"vars": {"round": _gathered(call, consumed, now)}, "in": changed}}
    return {"$let": {"vars": {"base": base}, "in": merged}}


def _gathered(call: SentCall, consumed: x.Expression, now: x.Expression) -> x.Expression:
    """Return the round after the call, or null. This is the server's form of `gathering.gathered`."""
    is_calls = call.kind == "calls"
    is_other_kind = {"$ne": [{"$eq": ["$$base.gather.kind", "calls"]}, is_calls]}
    is_out = {"$or": [x.FLOW, {"$and": ["$$base", is_other_kind]}]}
    if is_calls:
        return {"$cond": [{"$or": [is_out, is_known(call.call_id), "$$base.gather.full"]}, None, _collected(call, now)]}
    is_late = {"$lte": [call.mark(), {"$ifNull": [consumed, None]}]}
    is_repeated = is_known(call.call_id) if call.is_own_id else False
    taken = merged(call, x.literal(call.content["params"]), None, now)
    return {"$cond": [{"$or": [is_out, is_late, is_repeated]}, None, taken]}


def _collected(call: SentCall, now: x.Expression) -> x.Expression:
    more = {"$concatArrays": [{"$ifNull": ["$$base.params.calls", []]}, [x.literal(call.content["params"])]]}
    ids = {"$concatArrays": [{"$ifNull": ["$$base.gather.ids", []]}, [x.literal(call.call_id)]]}
    has_room = {
        "$and": [{"$lte": [{"$size": "$$ids"}, MAX_CALLS]}, {"$lte": [{"$bsonSize": "$$more"}, MAX_GATHERED_BYTES]}]
    }
    full = {"$mergeObjects": ["$$base.gather", {"full": True}]}
    refused = {
        "$let": {
            "vars": {"gather": full},
            "in": {
                "$mergeObjects": [
                    "$$base",
                    {"gather": "$$gather", "start_time": start_time("$$gather", "$$base.start_time", now)},
                ]
            },
        }
    }
    taken = merged(call, "$$more", "$$ids", now)
    return {
        "$let": {
            "vars": {"more": {"calls": more}, "ids": ids},
            "in": {"$cond": [{"$or": [{"$not": ["$$base"]}, has_room]}, taken, refused]},
        }
    }


def merged(call: SentCall, params: x.Expression, ids: x.Expression, now: x.Expression) -> x.Expression:
    """Return the round with the call. `ids` are those of a round that collects."""
    is_newest = {"$gt": [call.mark(), {"$ifNull": ["$$base.gather.newest", None]}]}
    content = {name: x.literal(value) for name, value in call.content.items() if name != "params"}
    content |= {name: "$$REMOVE" for name in ("lookup", "sealed", "version") if call.content.get(name) is None}
    common: dict[str, x.Expression] = {
        "kind": call.kind,
        # $min ignores null and missing values.
        "first_time": {"$min": ["$$base.gather.first_time", call.asked_time, now]},
    }
    if ids is not None:
        is_full = {"$or": ["$$base.gather.full", {"$gte": [{"$size": ids}, MAX_CALLS]}]}
        common |= {"ids": ids, "full": {"$cond": [is_full, True, "$$REMOVE"]}}
    elif call.is_own_id:
        more = {"$concatArrays": [{"$ifNull": ["$$base.gather.ids", []]}, [x.literal(call.call_id)]]}
        common["ids"] = {"$slice": [more, -MAX_CALLS]}
    of_newest = {**common, "newest": call.mark(), **call.waits()}
    lasting = {name: f"$$base.gather.{name}" for name in ("consumed", "seen", "ids")}
    older = {
        "$let": {
            "vars": {"gather": {"$mergeObjects": ["$$base.gather", common]}},
            "in": {
                "$mergeObjects": [
                    "$$base",
                    {"params": params} if ids is not None else {},
                    {"gather": "$$gather", "start_time": start_time("$$gather", "$$base.start_time", now)},
                ]
            },
        }
    }
    newer = {
        "$let": {
            "vars": {"gather": {**lasting, **of_newest}},
            "in": {
                **content,
                "params": params,
                "gather": "$$gather",
                "start_time": start_time("$$gather", call.start, now),
            },
        }
    }
    return {"$cond": [is_newest, newer, older]}


def first_round(call: SentCall, now: x.Expression = x.NOW) -> tuple[dict[str, x.Expression], x.Expression]:
    """Return gather and start_time of a task that this call creates."""
    first = {"$min": [call.asked_time, now]}
    gather: dict[str, x.Expression] = {"kind": call.kind, "first_time": first}
    if call.remembers():
        gather["ids"] = [x.literal(call.call_id)]
    waits = call.waits()
    start = x.add_ms(first, min(waits.values())) if waits else call.start
    return {**gather, "newest": call.mark(), **waits}, start


def outside_window(task_id: str, window_ms: int) -> dict[str, Any]:
    """Match the task if it has ended, and has not succeeded within the window. A task of a flow does not match."""
    has_passed = {"$lte": [x.add_ms(f"{x.STATE}.finish_time", window_ms), x.NOW]}
    is_over = {"$or": [{"$ne": [x.STATUS, TaskStatus.SUCCESS.value]}, has_passed]}
    ended = {"task_state.status": {"$in": FINAL}}
    return {"_id": task_id, "flow": None, **ended, "$expr": {"$and": [{"$not": [has_live(x.NOW)]}, is_over]}}


def renew(content: Mapping[str, Any], start: x.Expression, now: x.Expression = x.NOW) -> list[Stage]:
    """Begin a new round of a task that has ended, with this content."""
    following = {name: x.literal(content[name]) for name in CONTENT if name in content}
    begun = begin("$$round", without_calls(), now)
    if "trace" in content:
        begun = {"$mergeObjects": [begun, {"trace": x.literal(content["trace"])}]}
    return [{"$replaceWith": {"$let": {"vars": {"round": {**following, "start_time": start}}, "in": begun}}}]


def verdict(call: SentCall) -> dict[str, x.Expression]:
    """Return the projection that tells what has become of a call, on the document right after it."""
    newest = [f"{path}.call_id" for path in (NEWEST, f"{x.AGAIN}.gather.newest")]
    is_newest = {"$in": [x.literal(call.call_id), newest]}
    kind = {"$cond": [x.AGAIN, f"{x.AGAIN}.gather.kind", f"{GATHER}.kind"]}
    return {
        "is_in": is_known(call.call_id) if call.remembers() else is_newest,
        "is_of_kind": {"$eq": [{"$eq": [kind, "calls"]}, call.kind == "calls"]},
        "has_flow": {"$gt": [x.FLOW, None]},
    }
