"""Tells the position of a task among the due tasks of its queue, and when it will probably start."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from mtask.client import views
from mtask.doctor.explain import in_flow, waits_for
from mtask.errors import AccessDenied, TaskNotFound
from mtask.features.controls import client as controls
from mtask.features.controls.rules import Control
from mtask.features.limits import doctor as limits
from mtask.features.limits.doctor import Bound
from mtask.features.limits.operations import PermitPool
from mtask.kernel.document import rules
from mtask.kernel.document.rules import Rank
from mtask.kernel.document.status import TaskStatus
from mtask.kernel.document.task import Task, WorkerDocument
from mtask.kernel.driver.indexes import DISCOVERY_INDEX, STATUS_INDEX, TURNS_INDEX
from mtask.kernel.driver.operation import Operation, for_everybody, tasks
from mtask.kernel.operations import find_due as finding
from mtask.kernel.operations import workers
from mtask.kernel.statements import expressions as x
from mtask.kernel.statements import rules as twins
from mtask.kernel.statements.filters import NEXT, Filter
from mtask.search.findings import Reason

#: Reasons why a task waits that no queue's progress ends, so that its start cannot be estimated.
_UNTIL_SOMEBODY_ACTS = frozenset(
    {
        "cancel_requested",
        "paused",
        "named_absent",
        "no_worker",
        "queue_unserved",
        "name_unserved",
        "version_needed",
        "handed_on",
        "other_worker_needed",
        "workers_stopping",
        "workers_paused",
        "to_be_settled",
    }
)


@dataclass(frozen=True, slots=True)
class Position:
    """The place of a task among the due tasks of its queue.

    Workers take interrupted tasks first, then higher priorities, then those that have been due for longer. Where the
    tenants of the queue take turns, this is the order within one tenant. A tenant is told of its own tasks alone.
    """

    task_id: str
    status: TaskStatus
    #: The number of due tasks that go before the task and that the same workers may take. Where tenants take turns,
    #: those of its tenant, and interrupted ones of others. None: a worker holds the task, the task waits for other
    #: tasks of its flow, or it has ended.
    ahead: int | None
    #: Whether the count stopped at `ahead`, and there may be more.
    is_more: bool
    #: The time at which the task is or was due. For a running task, it is the end of its lease. None: the task has
    #: ended, or waits for other tasks of its flow.
    due_time: datetime | None
    #: The time at which the task probably starts, by the rate of its queue. None: it has started, or cannot be
    #: estimated. With `is_more`, the earliest time.
    start_estimate: datetime | None
    #: The number of tasks per second that the queue finished lately. None: it finished too few, or nobody asked.
    rate: float | None
    #: The reasons why the task waits, the most important first. A user who may not read workers gets none.
    reasons: tuple[Reason, ...]
    now: datetime  #: the server's time
    #: Where tenants take turns: the number of other tenants with due tasks that have their turn first. None: they take
    #: none, the queue has no limit, so that each worker counts the turns by itself, or very many tenants wait.
    tenants_ahead: int | None = None
    #: What the publisher knew of the handler, as a hash, and the version of the handler for which the params were made.
    declared: str | None = None
    version: int = 1

    @property
    def is_due(self) -> bool:
        """Whether the task waits, and a worker could take it now."""
        return self.ahead is not None and self.due_time is not None and self.due_time <= self.now


def find(task_id: str, viewer: str | None = None) -> Operation[Position]:
    """Return the position of a task; raise TaskNotFound or MalformedTask.

    `viewer`: the tenant that reads it. It is told of its own tasks alone, and so of no time of the start where tasks of
    others may go first. None: it is told of all.
    """
    found = yield from finding.look([task_id])
    if not found:
        raise TaskNotFound(task_id)
    task, now = views.task_of(found[0]), found[0]["now"]
    status, due = rules.status(task, now), task.task_state.next_preempt_time
    made: Any = {"declared": task.declared, "version": task.handler_version}
    if status is TaskStatus.WAITING:
        held_up = yield from in_flow(task_id)
        return Position(task_id, status, None, False, None, None, None, tuple(held_up), now, **made)
    if status.is_final or status is TaskStatus.RUNNING or due is None:
        return Position(task_id, status, None, False, None if status.is_final else due, None, None, (), now, **made)
    around = yield from _around(task, now)
    standing = _standing(task, around, now, viewer)
    ahead = yield from for_everybody(count_ahead(standing, now))
    turns = (yield from _turns(standing, around, now)) if standing.is_fair else None
    finished = yield from for_everybody(finished_lately(task.queue, [task.name, *ahead.names]))
    is_told = viewer is None or standing.is_fair
    rate = rate_of(finished, now) if is_told else None
    reasons = _reasons(task, around, now, viewer)
    before = ahead.count if turns is None else turns.before(ahead.count)
    estimate = start_of(due, before, rate, now)
    if any(reason.code in _UNTIL_SOMEBODY_ACTS for reason in reasons) or (standing.is_fair and turns is None):
        estimate = None
    if not is_told:
        estimate = None
    if estimate is not None and before == 0:
        estimate = _with_permits(estimate, reasons)
    tenants_ahead = None if turns is None else turns.first_cnt
    return Position(
        task_id, status, ahead.count, ahead.is_more, due, estimate, rate, reasons, now, tenants_ahead, **made
    )


def _with_permits(estimate: datetime, reasons: Sequence[Reason]) -> datetime | None:
    """Return when a task starts before which no other goes. None: it waits for a permit, and nobody knows how long."""
    waits = [reason.until for reason in reasons if reason.code in ("limited", "reserved", "behind")]
    return None if None in waits else max([estimate, *filter(None, waits)])


@dataclass(frozen=True, slots=True)
class _Around:
    """What is known of the workers, the controls, and the limits of a task."""

    #: The workers on record. None: the user may not read them.
    on_record: Sequence[WorkerDocument] | None
    holds: Sequence[Control]
    bounds: Mapping[PermitPool, Bound]


def _around(task: Task, now: datetime) -> Operation[_Around]:
    with suppress(AccessDenied):
        on_record = views.workers_of((yield from workers.live()))
        holds = yield from controls.known(now)
        return _Around(on_record, holds, (yield from limits.of_tasks([task], holds)))
    return _Around(None, (), {})


def _reasons(task: Task, around: _Around, now: datetime, viewer: str | None) -> tuple[Reason, ...]:
    if around.on_record is None:
        return ()
    return tuple(waits_for(task, around.on_record, now, around.holds, around.bounds, viewer))


def _standing(task: Task, around: _Around, now: datetime, viewer: str | None) -> Standing:
    return Standing(
        task.id,
        task.queue,
        task.task_option.specific_worker_ids,
        rules.rank(task, now),
        _names_run_beside(task, around.on_record, now),
        task.tenant,
        any(control.fair and (control.kind, control.target) == ("queue", task.queue) for control in around.holds),
        viewer,
    )


@dataclass(frozen=True, slots=True)
class _Turns:
    """The other tenants with due tasks in a queue, and how many of them have their turn before the tenant's next."""

    other_cnt: int
    first_cnt: int | None  #: None: it is not known

    def before(self, ahead: int) -> int:
        """Return how many tasks start before a task, if `ahead` of its tenant do, and each tenant has enough tasks."""
        return ahead * (1 + self.other_cnt) + (self.other_cnt if self.first_cnt is None else self.first_cnt)


def _turns(standing: Standing, around: _Around, now: datetime) -> Operation[_Turns | None]:
    """Return whose turns come first. None: very many tenants wait."""
    if standing.is_interrupted:
        return _Turns(0, 0)
    first = yield from for_everybody(first_of_tenants(standing.queue, now))
    if first is None:
        return None
    paused = {control.target for control in around.holds if control.kind == "tenant" and control.is_held}
    own = first.get(standing.tenant or "", standing.rank[1:])
    others = {tenant: each for tenant, each in first.items() if tenant not in {standing.tenant, *paused}}
    bound = around.bounds.get(PermitPool(standing.queue))
    turns = None if bound is None or bound.content is None else bound.content.turns
    if turns is None:
        return _Turns(len(others), None)
    mine = (turns.get(standing.tenant or "", 0), *own)
    return _Turns(len(others), sum((turns.get(tenant, 0), *each) < mine for tenant, each in others.items()))


def _names_run_beside(task: Task, on_record: Sequence[WorkerDocument] | None, now: datetime) -> list[str] | None:
    """Return the names of the tasks that the workers of this task run. None: no such worker is known."""
    serving = [
        worker
        for worker in on_record or ()
        if worker.is_live(now)
        and task.queue in worker.queues
        and task.name in worker.names
        and rules.is_admitted(task, worker.worker_id)
    ]
    return sorted({name for worker in serving for name in worker.names}) or None


# --- ahead -----------------------------------------------------------------------------------------------

# Counts the due tasks that go before a task, and finds when tasks of its queue finished lately.
#
# The counts examine at most KEYS keys of the indexes, however long the backlog is.
#
# `rules.rank` tells the order: interrupted tasks go before any priority. Those with a lapsed run are found by their
# status. No index leads to those that were handed back, or whose lapsed run was closed: they are INIT like all others.
# A worker has begun them, so they are among the first of their priority. So of the priorities below that of the task,
# only the beginning of the order is looked through. What is handed back behind it is not counted.

#: The most keys of the indexes that the counts of one position examine.
KEYS = 10_000
#: The most keys that seeks may take, and the keys left for the reads beside the counts.
_SEEKS, _RESERVE = 1_000, 500
#: The part of the keys that a look for interrupted tasks may take.
_LOOK = 10
#: The number of finished tasks by which the rate of a queue is estimated, and the most names whose tasks are read.
_SAMPLE, _NAMES = 200, 16
#: The most queries that look for the tenants that wait, and the most keys that each of them examines. Tests tune both.
TENANT_QUERIES, TENANT_KEYS = 128, 25
_PRIORITY, _WORKERS = "task_option.priority", "task_option.specific_worker_ids"
_ORDER = {_PRIORITY: -1, NEXT: 1}
_TIME = NEXT.rpartition(".")[2]
#: A condition by field also matches values inside arrays, which only malformed documents hold.
_NO_ARRAY: Filter = {"$not": {"$type": "array"}}


@dataclass(frozen=True, slots=True)
class Standing:
    """The fields of a task by which workers order it among the due tasks of its queue."""

    task_id: str
    queue: str
    worker_ids: Sequence[str]
    rank: Rank
    #: The names of tasks that the same workers run. None: any name.
    names: Sequence[str] | None
    tenant: str | None = None
    is_fair: bool = False  #: whether the tenants of the queue take turns
    #: The tenant that is told the counts: only its tasks are counted. None: all are.
    viewer: str | None = None

    @property
    def is_interrupted(self) -> bool:
        """Whether the task was interrupted."""
        return self.rank[0] == 0

    @property
    def priority(self) -> int:
        """The priority of the task."""
        return -self.rank[1]


@dataclass(frozen=True, slots=True)
class Ahead:
    """The due tasks that go before a task. If `is_more`, the count stopped, and there may be more of them."""

    count: int
    is_more: bool
    names: frozenset[str]


def count_ahead(standing: Standing, now: datetime) -> Operation[Ahead]:
    """Count the due tasks that go before this one. `now`: the server's time.

    Where tenants take turns, these are the better ones of its tenant, and the interrupted ones of all tenants.
    """
    counting = _Counting(standing, now)
    yield from counting.lapsed()
    yield from counting.of_higher_priority()
    yield from counting.of_same_priority()
    if not standing.is_interrupted:
        yield from counting.handed_back()
    return Ahead(counting.count, counting.is_more, frozenset(counting.names))


class _Counting:
    """A count that goes on until nothing is left to examine, or the keys are used up."""

    def __init__(self, standing: Standing, now: datetime) -> None:
        self._standing = standing
        self._now = now
        self.count, self.is_more = 0, False
        self.names: set[str] = set()
        named = len(standing.worker_ids)
        #: The ranges of the index that hold the tasks: one for each worker, and two for any worker.
        self._ranges = named + 2
        # A document that names several workers has a key for each of them.
        self._keys_each = max(1, named)
        self._left = KEYS - _RESERVE - 6 * self._ranges
        self._of_queue: Filter = {"queue": standing.queue, _WORKERS: {"$in": [[], *standing.worker_ids]}}
        # Most tasks have no runs, and nothing more is evaluated for them.
        has_runs = {"$and": [{"$isArray": [x.RUNS]}, {"$ne": [x.RUNS, []]}]}
        self._interrupted = {"$cond": [has_runs, twins.is_interrupted(now), False]}
        self._is_better = _is_better(standing, now)

    def lapsed(self) -> Operation[None]:
        """Count the interrupted tasks that are RUNNING still."""
        matched: Filter = {"task_state.status": TaskStatus.RUNNING.value, NEXT: {"$lte": self._now}}
        goes_first = self._is_better if self._standing.is_interrupted else {"$not": [self._is_better]}
        yield from self._count(matched, [self._interrupted, goes_first], STATUS_INDEX, KEYS // _LOOK)

    def of_higher_priority(self) -> Operation[None]:
        """Count the tasks of higher priorities."""
        matched, hint = self._of_tenant()
        matched = {**matched, _PRIORITY: {"$gt": self._standing.priority}, NEXT: {"$exists": True}}
        highest = yield tasks("find", matched, {_PRIORITY: 1}, sort=[(_PRIORITY, -1)], limit=1, hint=hint)
        if not highest:
            return
        spread = _spread(_within(highest[0], "task_option", "priority"), self._standing.priority)
        seeks = 2 * self._ranges * (spread + 1)
        if seeks <= _SEEKS:
            # Within each priority, the due tasks are one range of the index. The server seeks from range to range.
            matched[NEXT] = {"$exists": True, "$lte": self._now}
            self._left -= seeks
        yield from self._count_better(matched, hint)

    def of_same_priority(self) -> Operation[None]:
        """Count the tasks of the same priority that were due earlier."""
        matched, hint = self._of_tenant()
        until = min(self._now, self._standing.rank[2])
        matched |= {_PRIORITY: self._standing.priority, NEXT: {"$exists": True, "$lte": until}}
        yield from self._count_better(matched, hint)

    def handed_back(self) -> Operation[None]:
        """Count the interrupted tasks that are INIT and would not go first otherwise, as far as it is looked for them.

        The look is no part of the count that `is_more` tells of.
        """
        conditions = [*self._is_open_again(), {"$not": [self._is_better]}]
        level: Filter = {"$exists": True, "$gte": self._standing.rank[2], "$lte": self._now}
        behind: list[Filter] = [
            {_PRIORITY: self._standing.priority, NEXT: level},
            {_PRIORITY: {"$lt": self._standing.priority}, NEXT: {"$exists": True}},
        ]
        for part in [{NEXT: {"$exists": True}}] if self._standing.is_fair else behind:
            if not self.is_more and self._left > 0:
                yield from self._count({**self._of_queue, **part}, conditions, None, KEYS // _LOOK)
                self.is_more = False

    def _of_tenant(self) -> tuple[Filter, str]:
        """Return the filter for the tasks that the rank orders, and the index for it."""
        if self._standing.is_fair and self._standing.tenant is not None:
            return {"queue": self._standing.queue, "tenant": self._standing.tenant}, TURNS_INDEX
        return dict(self._of_queue), DISCOVERY_INDEX

    def _count_better(self, matched: Filter, hint: str) -> Operation[None]:
        also = self._is_open_again() if self._standing.is_interrupted else []
        yield from self._count(matched, [*also, self._is_better], hint)

    def _is_open_again(self) -> list[x.Expression]:
        return [self._interrupted, {"$ne": [x.STATUS, TaskStatus.RUNNING.value]}, {"$lte": [f"${NEXT}", self._now]}]

    def _count(
        self, matched: Filter, conditions: Sequence[x.Expression], hint: str | None, most: int | None = None
    ) -> Operation[None]:
        """Examine matching tasks. Count those for which the conditions hold.

        Without a hint, the tasks are examined in their order. Otherwise, the server reads range after range.
        """
        each = 1 if hint == STATUS_INDEX else self._keys_each
        left = self._left // each
        most = left if most is None else min(most // each, left)
        if most <= 0:
            self.is_more = True
            return
        is_ahead = {"$and": [*conditions, *_is_ours(self._standing, hint), *_is_seen(self._standing)]}
        group = {
            "_id": None,
            "examined": {"$sum": 1},
            "count": {"$sum": {"$cond": [is_ahead, 1, 0]}},
            "names": {"$addToSet": {"$cond": [is_ahead, "$name", None]}},
        }
        # The limit comes before the condition, because it bounds what the server examines.
        sort = [] if hint else [{"$sort": _ORDER}]
        stages = [{"$match": matched}, *sort, {"$limit": most}, {"$group": group}]
        rows = yield tasks("rows", stages, hint=hint or DISCOVERY_INDEX)
        for row in rows:
            self.count += row["count"]
            self.is_more |= row["examined"] >= most
            self.names |= {name for name in row["names"] if isinstance(name, str)}
            self._left -= row["examined"] * each


def _is_ours(standing: Standing, hint: str | None) -> list[x.Expression]:
    """Return the conditions that a task is of the queue, and that the same workers may take it.

    The ranges of the index for discovery hold no others.
    """
    names = [] if standing.names is None else [{"$in": ["$name", x.literal([*standing.names])]}]
    if hint in (None, DISCOVERY_INDEX):
        return names
    allowed = f"${_WORKERS}"
    shares = {"$gt": [{"$size": {"$setIntersection": [allowed, x.literal([*standing.worker_ids])]}}, 0]}
    admits = {"$cond": [{"$isArray": [allowed]}, {"$or": [{"$eq": [allowed, []]}, shares]}, False]}
    return [{"$eq": ["$queue", x.literal(standing.queue)]}, *names, admits]


def _is_seen(standing: Standing) -> list[x.Expression]:
    """Return the condition that the viewer may know of a task."""
    return [] if standing.viewer is None else [{"$eq": [{"$ifNull": ["$tenant", None]}, x.literal(standing.viewer)]}]


def _is_better(standing: Standing, now: datetime) -> x.Expression:
    """Whether a task is due, and goes first by its priority, its time and its `_id`.

    In a fair queue, only a task of the same tenant does.
    """
    priority, time = f"${_PRIORITY}", f"${NEXT}"
    own_time = standing.rank[2]
    is_first = {"$and": [{"$eq": [time, own_time]}, {"$lt": ["$_id", x.literal(standing.task_id)]}]}
    is_earlier = {"$or": [{"$lt": [time, own_time]}, is_first]}
    by_order = [
        {"$gt": [priority, standing.priority]},
        {"$and": [{"$eq": [priority, standing.priority]}, is_earlier]},
    ]
    same = [{"$eq": [{"$ifNull": ["$tenant", None]}, x.literal(standing.tenant)]}] if standing.is_fair else []
    return {"$and": [{"$lte": [time, now]}, {"$or": by_order}, *same]}


def _spread(highest: Any, own: int) -> int:
    """Return how many priorities lie above this one. A malformed task may have a priority of any type of number."""
    is_plain = isinstance(highest, int | float) and highest - own <= _SEEKS
    return int(highest - own) if is_plain else _SEEKS


def first_of_tenants(queue: str, now: datetime) -> Operation[dict[str, tuple[float, datetime]] | None]:
    """Return the tenants with due tasks in a queue, each with the rank of its first one. None: they are too many.

    The rank is the priority, negated, and the time. The look examines a bounded number of keys. Of a tenant, it may
    examine the first tasks only: if none of them is due, it leaves the tenant out.
    """
    first: dict[str, tuple[float, datetime]] = {}
    last = ""
    for _ in range(TENANT_QUERIES):
        found = yield tasks(
            "find",
            {"queue": queue, "tenant": {"$exists": True, "$gt": last, **_NO_ARRAY}, NEXT: {"$exists": True}},
            {"_id": 0, "tenant": 1, _PRIORITY: 1, NEXT: 1},
            sort=[("tenant", 1), (_PRIORITY, -1), (NEXT, 1)],
            limit=TENANT_KEYS,
            hint=TURNS_INDEX,
        )
        for document in found:
            priority, time = _within(document, "task_option", "priority"), _within(document, "task_state", _TIME)
            if isinstance(priority, int | float) and isinstance(time, datetime) and time <= now:
                first.setdefault(document["tenant"], (-priority, time))
        if len(found) < TENANT_KEYS:
            return first
        last = str(found[-1]["tenant"])
    return None


def finished_lately(queue: str, names: Sequence[str]) -> Operation[list[datetime]]:
    """Return the times at which tasks of this queue finished. Only the newest tasks of the first names are read."""
    ended = [TaskStatus.SUCCESS.value, TaskStatus.FAIL.value]
    newest = {"task_state.status": {"$in": ended}, NEXT: None, "name": {"$in": list(dict.fromkeys(names))[:_NAMES]}}
    found = yield tasks(
        "find",
        newest,
        {"queue": 1, "task_state.finish_time": 1},
        sort=[("task_state.create_time", -1)],
        limit=_SAMPLE,
        hint=STATUS_INDEX,
    )
    times = [_within(document, "task_state", "finish_time") for document in found if document.get("queue") == queue]
    return [time for time in times if isinstance(time, datetime)]


#: Only tasks that finished within this time count for the rate of a queue.
_LATELY = timedelta(minutes=10)


def rate_of(finished: Sequence[datetime], now: datetime) -> float | None:
    """Return the number of tasks that a queue finished per second lately. None: not enough of them did."""
    recent = [time for time in finished if now - time <= _LATELY]
    if len(recent) < 2:
        return None
    return len(recent) / max((now - min(recent)).total_seconds(), 0.001)


def start_of(due: datetime, ahead: int, per_second: float | None, now: datetime) -> datetime | None:
    """Return the time at which a task probably starts; None: there is no rate to estimate it by."""
    begin = max(due, now)
    if ahead == 0:
        return begin
    if per_second is None:
        return None
    # If the task is due only later, the tasks ahead of it are done meanwhile.
    return max(begin, now + timedelta(seconds=min(ahead / per_second, _LATELY.total_seconds() * 10_000)))


def _within(document: Mapping[str, Any], outer: str, name: str) -> Any:
    """Return a field inside a field. A malformed document may hold anything in the outer one: then return None."""
    part = document.get(outer)
    return part.get(name) if isinstance(part, Mapping) else None
