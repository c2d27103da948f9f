"""Tells the position of a task among the due tasks of its queue, and when it will probably start."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime

from mtask.client.diagnosis.explain import Reason, in_flow, waits_for
from mtask.client.operating import controls
from mtask.client.reading import views
from mtask.errors import AccessDenied, TaskNotFound
from mtask.model import position as order
from mtask.model import rules
from mtask.model.controls import Control
from mtask.model.documents import Task, WorkerDocument
from mtask.model.status import TaskStatus
from mtask.store import workers
from mtask.store.driver.operation import Operation
from mtask.store.tasks import finding, positions
from mtask.store.tasks.positions import Standing

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
    """The place of a task among the due tasks of its queue. Workers take higher priorities first, then longer due."""

    task_id: str
    status: TaskStatus
    #: The number of due tasks that go before the task and that the same workers may take. None: a worker holds the
    #: task, the task waits for other tasks of its flow, or it has ended.
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

    @property
    def is_due(self) -> bool:
        """Whether the task waits, and a worker could take it now."""
        return self.ahead is not None and self.due_time is not None and self.due_time <= self.now


def find(task_id: str) -> Operation[Position]:
    """Return the position of a task; raise TaskNotFound or MalformedTask."""
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
    on_record, holds = yield from _workers_and_controls()
    names = _names_run_beside(task, on_record, now)
    ahead = yield from positions.count_ahead(
        Standing(task_id, task.queue, task.task_option.specific_worker_ids, task.task_option.priority, due, names), now
    )
    finished = yield from positions.finished_lately(task.queue, [task.name, *ahead.names])
    rate = order.rate(finished, now)
    reasons = () if on_record is None else tuple(waits_for(task, on_record, now, holds))
    estimate = order.start_estimate(due, ahead.count, rate, now)
    if any(reason.code in _UNTIL_SOMEBODY_ACTS for reason in reasons):
        estimate = None
    return Position(task_id, status, ahead.count, ahead.is_more, due, estimate, rate, reasons, now)


def _workers_and_controls() -> Operation[tuple[list[WorkerDocument] | None, list[Control]]]:
    """Return the workers on record and the controls. The workers are None if the user may not read them."""
    with suppress(AccessDenied):
        on_record = views.workers_of((yield from workers.live()))
        return on_record, (yield from controls.known())
    return None, []


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
