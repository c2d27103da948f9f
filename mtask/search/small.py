"""Small sets of tasks, which an index finds: such a set is sorted as a whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from mtask.kernel.driver.indexes import DISCOVERY_INDEX, STATUS_INDEX, TENANT_INDEX
from mtask.kernel.driver.operation import Operation
from mtask.kernel.statements import filters
from mtask.kernel.statements.filters import FIRST_TIME, NEXT, Filter
from mtask.search import due
from mtask.search import names as task_names
from mtask.search.asked import Asked
from mtask.search.names import names_of_tasks
from mtask.search.order import Order, Place
from mtask.search.walks import Document, Walk, count_up_to

_ID_INDEX = "_id_"
#: The largest set of tasks that is sorted as a whole.
SORTED = 10_000
#: The largest set of due tasks of some queues that is: as many as a walk may pass.
_OF_QUEUES = 2_000
#: The most ids that are read for a page.
_IDS = 1_000


@dataclass(frozen=True, slots=True)
class Small:
    """A small set of tasks, which an index finds."""

    matched: Filter
    index: str
    used: tuple[str, ...] = field(default=())


def small_set(asked: Asked) -> Operation[Small | None]:
    """Return the set that holds the tasks, if it is certainly small."""
    if asked.criteria.get("lookup") is not None or asked.is_walk_of_tenant:
        return None
    names, keys, prefix = asked.several("name"), asked.several("key"), asked.prefix
    if asked.is_of_tenant and (small := (yield from _all_of_tenant(asked))) is not None:
        return small
    if keys:
        known = names or (yield from names_of_tasks())
        if known is not None and len(known) * len(keys) <= _IDS:
            ids = [f"{name}:{key}" for name in known for key in keys if prefix is None or key.startswith(prefix)]
            return Small({"_id": {"$in": ids}}, _ID_INDEX, ("name", "key", "key_prefix"))
    elif prefix is not None:
        known = names or (yield from names_of_tasks())
        if known is not None and len(known) <= task_names.MOST:
            ranges = filters.with_key_prefix(known, prefix)
            if (yield from count_up_to(ranges, SORTED + 1, _ID_INDEX)) <= SORTED:
                return Small(ranges, _ID_INDEX, ("name", "key_prefix"))
    if not asked.is_of_tenant and (small := (yield from _all_of_tenant(asked))) is not None:
        return small
    matched = asked.of_statuses
    if matched is not None and (yield from count_up_to(matched, SORTED + 1, STATUS_INDEX)) <= SORTED:
        return set_of(matched)
    queues = asked.several("queue")
    if queues and asked.order is Order.DUE:
        # A walk in the order of time reads the tasks of all queues. The index of the workers knows those of one queue.
        matched = {"queue": filters.any_of(queues), NEXT: {"$gte": FIRST_TIME}}
        if (yield from count_up_to(matched, _OF_QUEUES + 1, DISCOVERY_INDEX)) <= _OF_QUEUES:
            return Small(matched, DISCOVERY_INDEX, ("queue",))
    return None


def _all_of_tenant(asked: Asked) -> Operation[Small | None]:
    """Return the set of all tasks of the tenant, if it is small. A walk would pass those of others."""
    matched = {"tenant": asked.criteria.get("tenant")}
    if matched["tenant"] is None or (yield from count_up_to(matched, SORTED + 1, TENANT_INDEX)) > SORTED:
        return None
    return Small(matched, TENANT_INDEX, ("tenant",))


def set_of(matched: Filter) -> Small:
    """Return the set of the tasks with some statuses, and perhaps some names."""
    return Small(matched, STATUS_INDEX, ("status", "name") if "name" in matched else ("status",))


def sorted_page(
    asked: Asked, small: Small, limit: int, after: Place | None, fields: Sequence[str] | None
) -> Operation[list[Document]]:
    """Return the next tasks of a small set."""
    order = asked.order
    first, last = asked.since or FIRST_TIME, asked.until
    walk = Walk(small.index, small.matched, order, asked.rest(*small.used), first, last, fields)
    within: Filter = {order.path: {"$gte": first, **({} if last is None else {"$lt": last})}}
    if order is Order.DUE:
        behind = {} if after is None else due.not_passed(after)
        return (yield from walk.find([{"$and": [within, due.SOUND, behind]}], limit, due.SORT))
    if after is not None:
        passed = {} if not after.task_id else {"_id": {"$gte": after.task_id}}
        # What the server excludes, it does not look for in an index.
        within["$nor"] = [{order.path: {"$gt": after.time}}, {order.path: after.time, **passed}]
    return (yield from walk.find([within], limit, [(order.path, -1), ("_id", -1)]))
