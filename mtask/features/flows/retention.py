"""Begins the retention of a flow's steps when the whole flow has ended.

Any worker does this once a minute. The first step of a flow shows the state: its `flow.end_time` is null until the flow
has ended. So an index holds only the flows that have not ended.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

from mtask.errors import DatabaseTimeout, DuplicateKey, OperationFailed
from mtask.features.flows import statements as flows
from mtask.features.flows.read import part_of
from mtask.kernel.driver.indexes import FLOW_INDEX, UNENDED_INDEX
from mtask.kernel.driver.operation import Operation, tasks
from mtask.kernel.driver.stores import TASKS

Document = dict[str, Any]
#: The most steps that one statement changes, and the most flows that one call ends.
BATCH = 500
_LONG = timedelta(seconds=60)
#: After so many timeouts, the other flows are left to the next call.
_MAX_TIMEOUTS = 3
_ONE = [{"$limit": 1}, {"$project": {"_id": 1}}]


def end_flows() -> Operation[int]:
    """Begin the retention of the flows in which nothing is open and nothing is owed; return their number.

    If the server refuses some flow, OperationFailed is raised after all others have been ended.
    """
    heads = yield tasks("rows", _ended_heads(), hint=UNENDED_INDEX).within(_LONG)
    # A malformed, too large or locked step holds up its own flow only. The order differs each time, so that a few
    # locked steps do not hold up the same flows for ever.
    random.shuffle(heads)
    refusal: OperationFailed | None = None
    ended_cnt = timeout_cnt = 0
    for head in heads:
        part = head.get("flow")
        key = part.get("key") if isinstance(part, dict) else None
        if not isinstance(key, str):
            continue
        try:
            yield from _end(head["_id"], key)
            ended_cnt += 1
        except OperationFailed as error:
            refusal = error
        except DatabaseTimeout:
            timeout_cnt += 1
            if timeout_cnt == _MAX_TIMEOUTS:
                raise
    if refusal is not None:
        raise refusal
    return ended_cnt


def _ended_heads() -> list[Document]:
    def among(matched: Document) -> Document:
        stages = [{"$match": matched}, *_ONE]
        same = {"localField": "flow.key", "foreignField": "flow.key"}
        return {"$lookup": {"from": TASKS, **same, "as": "found", "pipeline": stages}}

    none: Document = {"$match": {"found": []}}
    return [
        {"$match": flows.unended()},
        {"$project": {"flow.key": 1}},
        among(flows.open_steps()),
        none,
        among(flows.owed_steps()),
        none,
        {"$limit": BATCH},
    ]


def _end(head_id: str, key: str) -> Operation[None]:
    for ids in (yield from _batches({"flow.key": key})):
        yield tasks("update_many", {"_id": {"$in": ids}}, flows.begin_retention(), hint="_id_")
    yield tasks("update_one", {"_id": head_id}, flows.end_flow())
    # A step may have been opened again since the first look. Whoever settles that change and finds no end_time yet does
    # nothing about it.
    for matched in (flows.open_steps(), flows.owed_steps(), flows.without_retention()):
        if (yield tasks("find_one", {"flow.key": key, **matched}, {"_id": 1})) is not None:
            yield from _revive(head_id, key)
            return


def revive(keys: Sequence[str]) -> Operation[None]:
    """End the retention of these flows, because a step was opened again.

    A worker may have died while it ended the flow. Then steps expire, although the first step has no end_time yet.
    """
    for key in keys:
        # Without a hint: a collection that is sharded by another field lacks the index on heads.
        head = yield tasks("find_one", {"flow.head": key, "flow.key": key}, {"flow.end_time": 1})
        if head is None:
            yield from appoint_head(key)
            continue
        expiring = {"flow.key": key, "expire_time": {"$exists": True}}
        if part_of(head).get("end_time") or (yield tasks("find_one", expiring, {"_id": 1}, hint=FLOW_INDEX)):
            yield from _revive(head["_id"], key)


def appoint_head(key: str) -> Operation[None]:
    """Let another step be the first step of a flow, because the first step was removed or has expired.

    Without a first step, nobody would notice the end of the flow, and no retention would begin.
    """
    step = yield tasks("find_one", {"flow.key": key}, {"_id": 1}, hint=FLOW_INDEX)
    if step is not None:
        appointed = {"flow.head": key, "flow.end_time": None}
        with suppress(DuplicateKey):  # another process was faster
            yield tasks("update_one", {"_id": step["_id"], "flow.key": key}, {"$set": appointed})


def _revive(head_id: str, key: str) -> Operation[None]:
    yield tasks("update_one", {"_id": head_id}, {"$set": {"flow.end_time": None}})
    for ids in (yield from _batches({"flow.key": key, "expire_time": {"$exists": True}})):
        yield tasks("update_many", {"_id": {"$in": ids}}, {"$unset": {"expire_time": 1}}, hint="_id_")


def _batches(matched: Document) -> Operation[list[list[str]]]:
    found = yield tasks("find", matched, {"_id": 1}, hint=FLOW_INDEX).within(_LONG)
    ids = [document["_id"] for document in found]
    return [ids[place : place + BATCH] for place in range(0, len(ids), BATCH)]
