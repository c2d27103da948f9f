"""Operations of bulk changes: plan, begin, carry out batch by batch, read.

A bulk change goes through its tasks in an order that does not move, and takes only those up to its cutoff. Each batch
is one guarded write, so a batch that is done twice changes nothing more. One process at a time carries a bulk change
out, under a lease; if it dies, another process goes on where the last written batch ended.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from pymongo import ReturnDocument

from mtask.database import setup
from mtask.errors import BulkNotFound, DatabaseError, DuplicateKey, InvalidInput
from mtask.features.bulk.rules import SECRET_ID, Action, BulkDocument, Plan, order_of, plan_of
from mtask.features.flows import change as operating
from mtask.kernel.document.parts import Sealed, is_sealed
from mtask.kernel.document.status import TaskStatus
from mtask.kernel.document.task import SCHEMA_VERSION
from mtask.kernel.driver.codec import GET_CODEC, Codec
from mtask.kernel.driver.extended_json import parse_extended
from mtask.kernel.driver.operation import Operation, bulks, tasks
from mtask.kernel.operations.change import NEEDED_BY_NONE
from mtask.kernel.operations.relays import Relay, settle_all
from mtask.kernel.statements import expressions as x
from mtask.kernel.statements import filters
from mtask.kernel.statements import publish as requests
from mtask.search import lists as listing
from mtask.search.order import cursor_of, place_of
from mtask.search.walks import Asked

Document = dict[str, Any]
#: The most tasks of one batch.
BATCH = 500
#: The time for which a process may carry out a bulk change without a sign of life.
LEASE = timedelta(seconds=30)
#: The time for which the document of a bulk change is kept.
KEPT = timedelta(days=7)
_MS = timedelta(milliseconds=1)


def secret() -> Operation[bytes]:
    """Return the secret by which this database's plans are signed. The first call makes it."""
    found = yield bulks("find_one", {"_id": SECRET_ID})
    if found is None:
        yield from setup.make_sure(["bulks"])
        fresh = {"secret": secrets.token_hex(32), "schema_version": SCHEMA_VERSION}
        with suppress(DuplicateKey):  # another process was faster
            yield bulks("update_one", {"_id": SECRET_ID}, {"$setOnInsert": fresh}, upsert=True)
        found = yield bulks("find_one", {"_id": SECRET_ID})
    return bytes.fromhex(found["secret"])


def begin(text: str, action: Action | None, within: str | None, now: datetime) -> Operation[Document]:
    """Store the bulk change of a plan; return its document. A plan is begun once, however often this is called."""
    plan = plan_of(text, (yield from secret()), within, now)
    if action is not None and plan.action != action:
        raise InvalidInput(f"plan: it is to {plan.action} tasks, not to {action} them.", field="plan")
    return (yield from _insert(plan))


def _insert(plan: Plan) -> Operation[Document]:
    fresh = {
        "action": plan.action,
        "criteria": x.literal(plan.criteria),
        "within": x.literal(plan.within),
        "cutoff": plan.cutoff,
        "begin_time": x.NOW,
        "done_cnt": 0,
        "left_cnt": 0,
        "expire_time": x.add_ms(x.NOW, KEPT // _MS),
        "schema_version": SCHEMA_VERSION,
    }
    is_new = {"$eq": ["$$ROOT", {"_id": "$_id"}]}
    pipeline = [{"$replaceWith": {"$cond": [is_new, {"$mergeObjects": ["$$ROOT", fresh]}, "$$ROOT"]}}]
    while True:
        try:
            made: Document = yield bulks(
                "find_one_and_update",
                {"_id": plan.bulk_id},
                pipeline,
                upsert=True,
                return_document=ReturnDocument.AFTER,
            )
        except DuplicateKey:
            continue
        return made


def get(bulk_id: str) -> Operation[Document]:
    """Return the document of a bulk change; raise BulkNotFound."""
    found: Document | None = None if bulk_id == SECRET_ID else (yield bulks("find_one", {"_id": {"$eq": bulk_id}}))
    if found is None:
        raise BulkNotFound(bulk_id)
    return found


def every(limit: int, within: str | None = None) -> Operation[list[Document]]:
    """Return the documents of the newest bulk changes, of all, or of those that were restricted to these keys."""
    of_changes = {"_id": {"$ne": SECRET_ID}, **({} if within is None else {"within": within})}
    found: list[Document] = yield bulks("find", of_changes, sort=[("begin_time", -1), ("_id", -1)], limit=limit)
    return found


@dataclass(frozen=True, slots=True)
class Step:
    """What became of one batch."""

    document: Document
    is_ours: bool  #: whether this process carries out the bulk change


def step(bulk_id: str, holder: str, relays: Sequence[Relay]) -> Operation[Step]:
    """Carry out the next batch of a bulk change, unless another process does; raise BulkNotFound."""
    is_free = {"$lte": [{"$ifNull": ["$lease_expire_time", x.NOW]}, x.NOW]}
    free = {
        "_id": {"$eq": bulk_id, "$ne": SECRET_ID},
        "end_time": None,
        "$expr": {"$or": [{"$eq": ["$holder", x.literal(holder)]}, is_free]},
    }
    lease = {"holder": x.literal(holder), "lease_expire_time": x.add_ms(x.NOW, LEASE // _MS)}
    document: Document | None = yield bulks(
        "find_one_and_update", free, [{"$set": lease}], return_document=ReturnDocument.AFTER
    )
    if document is None:
        return Step((yield from get(bulk_id)), False)
    bulk = BulkDocument.model_validate(document)
    criteria = yield from criteria_of(bulk)
    if isinstance(criteria.get("params"), Sealed):
        raise criteria["params"].error
    order = order_of(criteria)
    place = None if bulk.cursor is None else place_of(bulk.cursor, order)
    asked = Asked(criteria, until=bulk.cutoff + _MS, by=order)
    page = yield from listing.page(asked, BATCH, place, ["flow.key"])
    ids = [row["_id"] for row in page.documents]
    flow_keys = {row["_id"]: row["f"][0] for row in page.documents if row["f"][0] is not None}
    in_time = {order.path: {"$lte": bulk.cutoff}}
    asked_for = [filters.search(criteria), in_time]
    still = {"$and": [*asked_for, filters.by_ids(ids)]}
    if ids and bulk.action == "remove":
        yield from settle_all(relays, ids)  # what these tasks owe comes first
    done, left = 0, len(ids)
    if flow_keys and bulk.action != "remove":
        own = {"$and": [filters.search({**criteria, "status": None}), in_time]}
        done = yield from _change_flows(bulk.action, [*flow_keys.values()], relays, {"$and": asked_for}, own)
        unchanged = {**still, "task_state.cancel_requested": False, **filters.by_ids([*flow_keys])}
        left -= len(flow_keys) - (yield tasks("count_documents", unchanged))
        still["$and"].append({"_id": {"$nin": [*flow_keys]}})
    changed = (yield from change_batch(bulk.action, still)) if ids else 0
    if ids and bulk.action == "cancel":
        with suppress(DatabaseError):  # any worker does the rest within seconds
            yield from settle_all(relays, ids)
    done, left = done + changed, left - changed
    change: dict[str, Any] = {
        "$set": {"cursor": None if page.next is None else cursor_of(order, page.next)},
        "$inc": {"done_cnt": done, "left_cnt": left},
    }
    if page.next is None:
        change["$currentDate"] = {"end_time": True}
    after: Document | None = yield bulks(
        "find_one_and_update", {"_id": bulk_id, "holder": holder}, change, return_document=ReturnDocument.AFTER
    )
    if after is None:  # the lease lapsed meanwhile, and another process goes on
        return Step((yield from get(bulk_id)), False)
    return Step(after, True)


def criteria_of(bulk: BulkDocument) -> Operation[Document]:
    """Return the criteria of a bulk change, decoded as far as this reader can."""
    criteria: Document = parse_extended(bulk.criteria, "criteria")
    if is_sealed(criteria.get("params")):
        codec: Codec = yield GET_CODEC
        closed = Sealed(criteria["params"], field=f"params of the bulk change {bulk.id}")
        criteria["params"] = yield from codec.open_criteria(bulk.id, closed)
    return criteria


def _change_flows(
    action: Action, keys: Sequence[Any], relays: Sequence[Relay], among: filters.Filter, own: filters.Filter
) -> Operation[int]:
    """Change all steps of these flows that are asked for, also beyond the batch; return their number.

    If a batch were settled before the next one, a step of a later batch would end by its dependency, or run as its
    clean-up. `own` matches the steps that are asked for, whatever their status.
    """
    done = 0
    for key in sorted({key for key in keys if isinstance(key, str)}):
        if action == "cancel":
            done += yield from operating.cancel_steps(key, relays, among, own)
        else:
            done += len((yield from operating.retry_steps(key, relays, among)))
    return done


def change_batch(action: Action, still: filters.Filter) -> Operation[int]:
    """Change a batch of tasks, those that still are as they were asked for; return their number."""
    if action == "remove":
        # A live run ends sooner if its worker is asked first.
        running = {**still, "task_state.status": TaskStatus.RUNNING.value, "flow": None}
        yield tasks("update_many", running, {"$set": {"task_state.cancel_requested": True}})
        result = yield tasks("delete_many", {**still, **NEEDED_BY_NONE})
        return int(result.deleted_count)
    pipeline = requests.cancel() if action == "cancel" else requests.run_again(everything=False)
    result = yield tasks("update_many", still, pipeline)
    return int(result.matched_count)
