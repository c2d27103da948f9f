"""Operations on the controls of queues and task names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

from pymongo import ReturnDocument

from mtask.database import setup
from mtask.errors import DuplicateKey
from mtask.features.controls.rules import MAX_LIMITED_KEYS, Kind, control_id
from mtask.kernel.document.options import MAX_COUNT
from mtask.kernel.document.task import SCHEMA_VERSION
from mtask.kernel.driver.operation import Collection, Operation, controls
from mtask.kernel.operations.publish import milliseconds
from mtask.kernel.statements import expressions as x
from mtask.search.order import end_of_prefix

Document = dict[str, Any]
_RACES = 5


def put(kind: Kind, target: str, changes: Mapping[str, Any]) -> Operation[Document]:
    """Change or make a control; return the control. If nothing changes, its revision stays the same.

    A timedelta stands for the instant so long from now, by the server's clock.
    """
    limits = any(name.endswith("limit") for name in changes)
    given = {
        name: from_now(value) if isinstance(value, timedelta) else x.literal(value) for name, value in changes.items()
    }
    return (yield from write(kind, target, given, also=["places"] if limits else []))


def from_now(wait: timedelta) -> x.Expression:
    """Return the instant so long from now, by the server's clock."""
    return x.add_ms(x.NOW, milliseconds(wait))


def hold(kind: Kind, target: str, wait: timedelta, limit_key: str | None = None) -> Operation[Document]:
    """Let the tasks of a queue, a name, or a limit_key of a queue wait for so long. A longer wait stays."""
    until = from_now(wait)
    if limit_key is None:
        return (yield from write(kind, target, {"limited_until": {"$max": ["$limited_until", until]}}))
    key = x.literal(limit_key)
    there = {"$cond": [{"$isArray": ["$limited_keys"]}, "$limited_keys", []]}
    others = {"$and": [{"$gt": ["$$one.until", x.NOW]}, {"$ne": ["$$one.limit_key", key]}]}
    own = {"$filter": {"input": there, "as": "one", "cond": {"$eq": ["$$one.limit_key", key]}}}
    mine = {
        "limit_key": key,
        "until": {"$max": [{"$max": {"$map": {"input": own, "as": "one", "in": "$$one.until"}}}, until]},
    }
    keys = {"$concatArrays": [{"$filter": {"input": there, "as": "one", "cond": others}}, [mine]]}
    return (yield from write(kind, target, {"limited_keys": {"$slice": [keys, -MAX_LIMITED_KEYS]}}))


def write(
    kind: Kind, target: str, given: Mapping[str, x.Expression], also: Sequence[Collection] = ()
) -> Operation[Document]:
    """Change or make a control: `given` holds the expressions of its fields. `also`: further collections it needs."""
    yield from setup.make_sure(["controls", *also])
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
