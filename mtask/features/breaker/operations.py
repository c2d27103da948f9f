"""The writes of breakers. Each is one update of a control, whose conditions the server checks by its clock."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from mtask.features.breaker.rules import GRACE, HOLD
from mtask.features.controls import operations as controls
from mtask.features.controls.rules import Kind
from mtask.kernel.document.handlers import MAX_BREAKER_WAIT_MS
from mtask.kernel.driver.operation import Operation
from mtask.kernel.statements import expressions as x

Document = dict[str, Any]
_OPENED = {"$ifNull": ["$opened", None]}


def open_(kind: Kind, target: str, worker_id: str, wait_ms: int, reason: str) -> Operation[Document]:
    """Open a breaker, unless it is open. This worker makes the first probe."""
    made = {
        "by": x.literal(worker_id),
        "time": x.NOW,
        "wait_ms": wait_ms,
        "until": x.add_ms(x.NOW, wait_ms),
        "held_until": x.add_ms(x.NOW, wait_ms + _ms(GRACE)),
        "reason": x.literal(reason),
    }
    return (yield from controls.write(kind, target, {"opened": {"$ifNull": ["$opened", made]}}))


def take_probe(kind: Kind, target: str, worker_id: str) -> Operation[Document]:
    """Take the probe of an open breaker, or keep it, if its wait is over and no other worker has it."""
    me = x.literal(worker_id)
    is_free = {"$or": [{"$eq": ["$opened.by", me]}, {"$lte": ["$opened.held_until", x.NOW]}]}
    may = {"$and": [{"$gt": ["$opened.until", None]}, {"$lte": ["$opened.until", x.NOW]}, is_free]}
    taken = {"$mergeObjects": ["$opened", {"by": me, "held_until": controls.from_now(HOLD)}]}
    return (yield from controls.write(kind, target, {"opened": {"$cond": [may, taken, _OPENED]}}))


def close(kind: Kind, target: str, worker_id: str) -> Operation[Document]:
    """Close a breaker after the success of this worker's probe."""
    return (yield from _judge(kind, target, worker_id, None))


def reopen(kind: Kind, target: str, worker_id: str, reason: str) -> Operation[Document]:
    """Let an open breaker wait twice as long after the failure of this worker's probe."""
    wait = {"$min": [{"$multiply": ["$opened.wait_ms", 2]}, MAX_BREAKER_WAIT_MS]}
    times = {
        "wait_ms": wait,
        "until": x.add_ms(x.NOW, wait),
        "held_until": x.add_ms(x.NOW, {"$add": [wait, _ms(GRACE)]}),
        "reason": x.literal(reason),
    }
    return (yield from _judge(kind, target, worker_id, {"$mergeObjects": ["$opened", times]}))


def _judge(kind: Kind, target: str, worker_id: str, then: x.Expression) -> Operation[Document]:
    is_mine = {"$eq": ["$opened.by", x.literal(worker_id)]}
    return (yield from controls.write(kind, target, {"opened": {"$cond": [is_mine, then, _OPENED]}}))


def _ms(wait: timedelta) -> int:
    return wait // timedelta(milliseconds=1)
