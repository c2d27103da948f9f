"""Lists of tasks, page by page. The server examines a bounded number of documents for each page.

A list walks along an index that has its order. Conditions that the index cannot meet are tested on the tasks that the
walk passes, at most 2,000 for a page. Then the page ends, though it may not be full, and the list goes on from
there. A few sets of tasks are found by other indexes: if such a set is small, it is sorted as a whole.

A list of a tenant walks along the tenant's own tasks where it can. Where it passes those of others, it stops only at
the end of an instant: so its cursor names none of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from mtask.kernel.driver.indexes import FINISHED_INDEX, LOOKUP_INDEX, RECENT_INDEX, STATUS_INDEX, TENANT_INDEX
from mtask.kernel.driver.operation import Operation, tasks
from mtask.kernel.operations.change import by_index
from mtask.kernel.statements import filters
from mtask.kernel.statements.filters import FIRST_TIME, Filter
from mtask.search.due import Small, ascend, set_of, small_set, sorted_page
from mtask.search.order import LAST, Order, Place, hidden, leads_on
from mtask.search.walks import STATUS, Asked, Document, Walk, count_up_to, descend, merged, place_of_row

#: The steps of a walk that tests documents, in documents. The first one is short: most pages are full after it. A walk
#: along one range takes both as one step, as it is cheap for the server to pass the keys of one range.
STEPS = (1_000, 1_000)
#: The most ranges of an index that one query merges. Tests tune it.
PAIRS = 200


@dataclass(frozen=True, slots=True)
class Found:
    """A page of a list."""

    documents: list[Document]
    #: The place behind the page. None: there are no more tasks.
    next: Place | None
    #: The instant up to which the walk has come, if it ended before the page was full.
    looked_to: datetime | None = None


def page(asked: Asked, limit: int, after: Place | None, fields: Sequence[str] | None) -> Operation[Found]:
    """Return the next page of a list: at most `limit` tasks."""
    rows: list[Document] = []
    stopped: Place | None = None
    small: Small | None = None
    steps = list(STEPS)
    counted = None if asked.is_led else asked.of_statuses
    if counted is not None:
        if (yield from count_up_to(counted, steps[0] + 1, STATUS_INDEX)) <= steps[0]:
            small = set_of(counted)
        else:
            # There are many such tasks: the page is probably full after the first step, and no more are counted.
            rows, stopped = yield from _walked(asked, limit + 1, after, fields, [steps.pop(0)])
            if stopped is None or len(rows) > limit or not steps:
                return _found(rows, limit, stopped, asked, after)
    small = small or (yield from small_set(asked))
    if small is not None:
        return _found((yield from sorted_page(asked, small, limit + 1, after, fields)), limit, None, asked, after)
    more, stopped = yield from _walked(asked, limit + 1 - len(rows), stopped or after, fields, steps)
    return _found(rows + more, limit, stopped, asked, after)


def _found(rows: list[Document], limit: int, stopped: Place | None, asked: Asked, after: Place | None) -> Found:
    place: Place | None = None
    looked_to = None
    if len(rows) > limit:
        rows = rows[:limit]
        # A malformed document may have no place. The list then goes on behind the task before it.
        places = (place_of_row(row, asked.order) for row in reversed(rows))
        place = next((one for one in places if one is not None), None)
    elif stopped is not None:
        place = hidden(stopped, asked.prefix)
        looked_to = stopped.time if len(rows) < limit else None
    if place is not None and after is not None and not leads_on(after, place, asked.order):
        # A malformed document, whose id does not begin with its name.
        place = Place(after.time, LAST if asked.order is Order.DUE else "")
    return Found(rows, place, looked_to)


def _walked(
    asked: Asked, limit: int, after: Place | None, fields: Sequence[str] | None, steps: Sequence[int]
) -> Operation[tuple[list[Document], Place | None]]:
    """Return the next tasks, and the place at which the walk stopped before their end."""
    order, criteria = asked.order, asked.criteria
    first, last = asked.since or FIRST_TIME, asked.until
    if order is Order.DUE:
        of_statuses = {STATUS: filters.any_of(asked.several("status"))}
        walk = Walk(STATUS_INDEX, of_statuses, order, asked.rest("status"), first, last, fields)
        return (yield from ascend(walk, limit, after, steps))
    if order is Order.FINISHED:
        pairs: list[Walk] = []
        queues = asked.several("queue") or (yield from queues_of_finished())
        statuses = asked.several("status")
        most = max(1, PAIRS // len(statuses))
        for start in range(0, len(queues), most):
            some = queues[start : start + most]
            ranges = {"queue": filters.any_of(some), STATUS: filters.any_of(statuses)}
            tested, is_one = asked.tested("status", "queue"), len(some) == len(statuses) == 1
            pairs.append(Walk(FINISHED_INDEX, ranges, order, tested, first, last, fields, is_one, asked.is_discreet))
        return (yield from merged(pairs, limit, after, steps))
    index, ranges, used, is_one = RECENT_INDEX, Filter(), "lookup", True
    if criteria.get("lookup") is not None:
        index, ranges = LOOKUP_INDEX, filters.looked_up(criteria["lookup"])
        is_one = all(len(values) == 1 for values in criteria["lookup"].values())
    elif criteria.get("tenant") is not None:
        index, ranges, used = TENANT_INDEX, {"tenant": criteria["tenant"]}, "tenant"
    # A malformed document may lack its create_time: it is the last one of a list without a bound.
    walk = Walk(index, ranges, order, asked.tested(used), asked.since, last, fields, is_one, asked.is_discreet)
    return (yield from descend(walk, limit, after, [sum(steps)]))


def queues_of_finished() -> Operation[list[str]]:
    """Return the queues of finished tasks, by one seek for each."""
    # With more keys in the order, or more fields in the group, each seek costs the server three times as much.
    stages = [{"$sort": {"queue": 1}}, {"$group": {"_id": "$queue"}}]
    rows = yield from by_index(tasks("rows", stages, hint=FINISHED_INDEX).for_everybody())
    return sorted(row["_id"] for row in rows if isinstance(row["_id"], str))
