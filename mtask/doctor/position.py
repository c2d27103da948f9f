"""Tells the position of a task among the due tasks of its queue, and when it will probably start."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime

from mtask.client import views
from mtask.doctor import ahead as positions
from mtask.doctor import estimate as order
from mtask.doctor.ahead import Standing
from mtask.doctor.explain import in_flow, waits_for
from mtask.errors import AccessDenied, TaskNotFound
from mtask.features.controls import client as controls
from mtask.features.controls.rules import Control
from mtask.features.limits import explain as limits
from mtask.features.limits.explain import Bound
from mtask.features.limits.operations import PermitPool
from mtask.kernel.document import rules
from mtask.kernel.document.status import TaskStatus
from mtask.kernel.document.task import Task, WorkerDocument
from mtask.kernel.driver.operation import Operation, for_everybody
from mtask.kernel.operations import find_due as finding
from mtask.kernel.operations import workers
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
    if status is TaskStatus.WAITING:
        held_up = yield from in_flow(task_id)
        return Position(task_id, status, None, False, None, None, None, tuple(held_up), now)
    if status.is_final or status is TaskStatus.RUNNING or due is None:
        return Position(task_id, status, None, False, None if status.is_final else due, None, None, (), now)
    around = yield from _around(task)
    standing = _standing(task, around, now, viewer)
    ahead = yield from for_everybody(positions.count_ahead(standing, now))
    turns = (yield from _turns(standing, around, now)) if standing.is_fair else None
    finished = yield from for_everybody(positions.finished_lately(task.queue, [task.name, *ahead.names]))
    is_told = viewer is None or standing.is_fair
    rate = order.rate(finished, now) if is_told else None
    reasons = _reasons(task, around, now, viewer)
    before = ahead.count if turns is None else turns.before(ahead.count)
    estimate = order.start_estimate(due, before, rate, now)
    if any(reason.code in _UNTIL_SOMEBODY_ACTS for reason in reasons) or (standing.is_fair and turns is None):
        estimate = None
    if not is_told:
        estimate = None
    if estimate is not None and before == 0:
        estimate = _with_permits(estimate, reasons)
    tenants_ahead = None if turns is None else turns.first_cnt
    return Position(task_id, status, ahead.count, ahead.is_more, due, estimate, rate, reasons, now, tenants_ahead)


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


def _around(task: Task) -> Operation[_Around]:
    with suppress(AccessDenied):
        on_record = views.workers_of((yield from workers.live()))
        holds = yield from controls.known()
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
    first = yield from for_everybody(positions.first_of_tenants(standing.queue, now))
    if first is None:
        return None
    paused = {control.target for control in around.holds if control.kind == "tenant" and control.paused}
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
