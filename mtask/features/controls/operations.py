"""Operations on the controls of queues and task names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pymongo import ReturnDocument

from mtask.database import setup
from mtask.errors import DuplicateKey
from mtask.features.controls.rules import Kind, control_id
from mtask.kernel.document.options import MAX_COUNT
from mtask.kernel.document.task import SCHEMA_VERSION
from mtask.kernel.driver.operation import Operation, controls
from mtask.kernel.statements import expressions as x
from mtask.search.order import end_of_prefix

Document = dict[str, Any]
_RACES = 5


def put(kind: Kind, target: str, changes: Mapping[str, Any]) -> Operation[Document]:
    """Change or make a control; return the control. If nothing changes, its revision stays the same."""
    yield from setup.make_sure(["controls", "places"] if any("limit" in name for name in changes) else ["controls"])
    given = {name: x.literal(value) for name, value in changes.items()}
    revision = {"$convert": {"input": "$revision", "to": "long", "onError": 0, "onNull": 0}}
    can_count_on = {"$and": [{"$gt": [revision, 0]}, {"$lt": [revision, MAX_COUNT]}]}
    wanted = {"kind": kind, "target": x.literal(target), "schema_version": SCHEMA_VERSION, **given}
    change = {
        "paused": {"$ifNull": ["$paused", False]},
        # Workers report the revisions that they have seen. A control may be removed and made again. Its new revisions
        # must be greater than its former ones, so they begin with the server's time in ms.
        "revision": {"$add": [{"$cond": [can_count_on, revision, {"$toLong": x.NOW}]}, 1]},
        "update_time": x.NOW,
        **wanted,
    }
    # A control with malformed fields is always written again, so that workers can read it.
    is_sound = [can_count_on, {"$eq": [revision, "$revision"]}, {"$eq": [{"$type": "$update_time"}, "date"]}]
    is_so = {"$and": [*is_sound, *({"$eq": [f"${name}", value]} for name, value in wanted.items())]}
    pipeline = [{"$replaceWith": {"$cond": [is_so, "$$ROOT", {"$mergeObjects": ["$$ROOT", change]}]}}]
    for _ in range(_RACES):
        try:
            document: Document = yield controls(
                "find_one_and_update",
                {"_id": control_id(kind, target)},
                pipeline,
                upsert=True,
                return_document=ReturnDocument.AFTER,
            )
        except DuplicateKey:
            continue
        return document
    raise DuplicateKey(f"control {control_id(kind, target)} is being made by many at once; try again")


def of(queues: Sequence[str], names: Sequence[str]) -> Operation[list[Document]]:
    """Return the controls of these queues and task names, and those of all tenants."""
    ids = [*(control_id("queue", queue) for queue in queues), *(control_id("name", name) for name in names)]
    of_tenants = {"$gte": control_id("tenant", ""), "$lt": end_of_prefix(control_id("tenant", ""))}
    found: list[Document] = yield controls("find", {"$or": [{"_id": {"$in": ids}}, {"_id": of_tenants}]})
    return found


def every() -> Operation[list[Document]]:
    """Return all controls, ordered by id."""
    found: list[Document] = yield controls("find", {}, sort=[("_id", 1)])
    return found
