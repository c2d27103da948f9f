"""Explains why a task waits. The explanation uses the task, the workers on record and the server's time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from mtask.client import views
from mtask.doctor import operations as diagnosis
from mtask.errors import MalformedTask
from mtask.features.controls import client as controls
from mtask.features.controls.rules import Control
from mtask.features.flows import read as reading
from mtask.features.flows.read import Waits
from mtask.features.limits import doctor as limits
from mtask.features.limits.doctor import Bound
from mtask.features.limits.operations import PermitPool
from mtask.features.rollout import doctor as rollout
from mtask.kernel.document import rules
from mtask.kernel.document.status import TaskStatus, WorkerStatus
from mtask.kernel.document.task import Task, WorkerDocument
from mtask.kernel.driver.operation import Operation
from mtask.search.findings import Reason, brief, listed

#: The longest time for which a due task normally waits for a worker. A longer wait is a problem.
SOON = timedelta(seconds=10)
#: The most tasks that the reason of a WAITING step names.
_NAMED = 5
_UNLIMITED: Mapping[PermitPool, Bound] = {}


@dataclass(frozen=True, slots=True)
class Inspected:
    """A task and the reasons why it waits. For a malformed document, `task` is None and `malformed` names the fault."""

    document: dict[str, Any]
    task: Task | None
    malformed: str | None
    reasons: list[Reason]
    now: datetime


def inspect(task_id: str, viewer: str | None = None) -> Operation[Inspected]:
    """Return the task and the reasons why it waits; raise TaskNotFound.

    `viewer`: the tenant that reads the reasons. They name no task of others. None: they may name all.
    """
    seen = yield from diagnosis.inspect(task_id)
    try:
        task = views.task_of(seen.document)
    except MalformedTask as error:
        return Inspected(seen.document, None, error.reason, [], seen.now)
    if task.status is TaskStatus.WAITING:
        return Inspected(seen.document, task, None, (yield from in_flow(task.id)), seen.now)
    if task.status.is_final:
        return Inspected(seen.document, task, None, [], seen.now)
    workers = views.workers_of(seen.workers)
    holds = yield from controls.known(seen.now)
    bounds = yield from limits.of_tasks([task], holds)
    reasons = waits_for(task, workers, seen.now, holds, bounds, viewer)
    return Inspected(seen.document, task, None, reasons, seen.now)


def in_flow(task_id: str) -> Operation[list[Reason]]:
    """Return the reason why a WAITING step waits: the tasks of its flow that have not ended."""
    found = yield from reading.waits(task_id, _NAMED)
    return [] if found is None else [waits_in_flow(found)]


def waits_in_flow(waits: Waits) -> Reason:
    """Return the reason why a WAITING step waits."""
    named = ", ".join(f"{brief(task_id)} ({status})" for task_id, status in waits.examples)
    if waits.open_cnt:
        more = waits.open_cnt - len(waits.examples)
        also = f" and {more} more" if more > 0 else ""
        of = f"{waits.open_cnt} of its {waits.dependency_cnt} dependencies" if waits.dependency_cnt > 1 else ""
        return Reason("waits", f"waits for {of}{': ' if of else ''}{named}{also}")
    if named:
        return Reason("waits", f"waits for a task that a dependency added to the flow: {named}")
    if waits.owed_since is not None or waits.is_held:
        return Reason("to_be_released", "its dependencies have ended: a worker is about to release it, or to end it")
    return Reason("lost", "its dependencies have ended, and nobody was told: `mtask doctor` tells what to do")


def waits_for(
    task: Task,
    workers: Sequence[WorkerDocument],
    now: datetime,
    holds: Sequence[Control] = (),
    bounds: Mapping[PermitPool, Bound] = _UNLIMITED,
    viewer: str | None = None,
) -> list[Reason]:
    """Return the reasons why the task has not ended, the most important first. A finished task has none.

    `bounds`: the limits of the task, as `limits.of_tasks` reads them. `viewer`: see `inspect`.
    """
    if task.status.is_final:
        return []
    live = [worker for worker in workers if worker.is_live(now)]
    status = rules.status(task, now)
    if status.is_final:
        message = f"at its end: any live worker settles it as {status}"
        return [Reason("to_be_settled", message if live else f"{message}, and none is live")]
    reasons = [*_runs(task, live, now), *_again(task), *_times(task, now)]
    reasons += rollout.handed_on(task) if rules.has_free_seat(task, now) else []
    if task.task_state.cancel_requested:
        return reasons
    if rules.has_free_seat(task, now):
        reasons += _controlled(task, holds)
        reasons += _workers(task, live, now)
    elif task.task_option.concurrent_worker_cnt > 1:
        count = task.task_option.concurrent_worker_cnt
        reasons.append(Reason("places_taken", f"all its {count} seats are taken"))
    is_busy = bool(reasons) and reasons[-1].code == "workers_busy"
    if reasons and not is_busy:
        return reasons
    turn = _turn(task, holds) if is_busy or now - rules.due_time(task) > SOON else []
    reasons = [*limits.waits_for_permits(task, bounds, holds, now, viewer), *reasons, *turn]
    if not reasons or reasons[0].code == "turn":
        reasons.append(_about_to_be_taken(task, bounds, now))
    return reasons


def _turn(task: Task, holds: Sequence[Control]) -> list[Reason]:
    """Return the reason why the task of a queue with fair turns waits although it has been due for long."""
    if any(control.fair and (control.kind, control.target) == ("queue", task.queue) for control in holds):
        whose = "tasks of no tenant" if task.tenant is None else f"the tenant {task.tenant!r}"
        message = f"the tenants of the queue {task.queue!r} take turns: {whose} may have more tasks before this one"
        return [Reason("turn", message)]
    return []


def _runs(task: Task, live: Sequence[WorkerDocument], now: datetime) -> Iterable[Reason]:
    there = {worker.worker_id for worker in live}
    for run in rules.live_runs(task, now):
        if task.task_state.cancel_requested:
            thread = "a handler in a thread goes on until it asks context.is_cancelled"
            message = f"cancel requested: {run.worker_id} ends its run; {thread}"
            yield Reason("cancel_requested", message, run.ping_expire_time)
        elif run.worker_id not in there:
            message = f"held under a live lease by {run.worker_id}, which shows no heartbeat"
            yield Reason("holder_silent", message, run.ping_expire_time)
        else:
            yield Reason("running", f"{run.worker_id} runs it under a lease", run.ping_expire_time)
    for run in rules.current_runs(task):
        if run.is_lapsed(now):
            message = f"the lease of {run.worker_id} has lapsed: the task waits to be preempted"
            yield Reason("lapsed", message)


def _again(task: Task) -> Iterable[Reason]:
    if task.again is not None:
        yield Reason("again", "it was published again meanwhile, and runs once more afterwards")


def _times(task: Task, now: datetime) -> Iterable[Reason]:
    due = rules.due_time(task)
    if due > now:
        gathers = task.gather is not None and task.gather.debounce_ms is not None
        yield Reason("gathering", "gathers calls", due) if gathers else Reason("not_due", "not due", due)
    if task.task_option.retry_scope == "worker":
        return
    retry = rules.retry_time(task, "")
    if retry is not None and retry > max(due, now):
        yield Reason("retry_delay", "in its retry delay", retry)


def _controlled(task: Task, holds: Sequence[Control]) -> Iterable[Reason]:
    for control in pauses_of(task.queue, task.name, holds, task.tenant):
        message = f"the {control.kind} {control.target!r} {control.said}: `mtask resume` with --{control.kind}"
        yield Reason("paused", message, control.known_end)
    for control in holds:
        if (control.kind, control.target) == ("queue", task.queue):
            for each in control.limited_keys or ():
                if each.limit_key == task.task_option.limit_key:
                    message = f"the limit_key {each.limit_key!r} waits, as a handler has raised RateLimited"
                    yield Reason("rate_limited", message, each.until)


def limits_of(queue: str, holds: Sequence[Control], tenant: str | None = None) -> list[str]:
    """Return the limits of a queue, and of a tenant if it is given, as text."""
    bounds: list[str] = []
    for control in holds:
        if control.kind == "queue" and control.target == queue:
            bounds += [str(control.limit)] if control.limit else []
            bounds += [f"{control.key_limit} for each limit_key"] if control.key_limit else []
            bounds += [f"{control.tenant_limit} for each tenant"] if control.tenant_limit else []
        elif control.kind == "tenant" and control.target == tenant and control.limit:
            bounds.append(f"{control.limit} for the tenant {tenant!r}")
    return bounds


def pauses_of(queue: str, name: str, holds: Sequence[Control], tenant: str | None = None) -> list[Control]:
    """Return the controls that hold back this queue, this task name, or this tenant."""
    targets: dict[str, str | None] = {"queue": queue, "name": name, "tenant": tenant}
    return [control for control in holds if control.is_held and control.target == targets[control.kind]]


def _workers(task: Task, live: Sequence[WorkerDocument], now: datetime) -> Iterable[Reason]:
    """Yield the reasons why no worker takes a free seat of the task."""
    named = task.task_option.specific_worker_ids
    if named:
        open_ids = [worker_id for worker_id in named if rules.is_candidate(task, worker_id, now)]
        there = {worker.worker_id for worker in live}
        absent = [worker_id for worker_id in open_ids if worker_id not in there]
        if absent:
            are = "is" if len(absent) == 1 else "are"
            yield Reason("named_absent", f"only named workers may run it, and {listed(absent)} {are} absent")
        live = [worker for worker in live if worker.worker_id in open_ids]
        if not live:
            return
    yield from _shortage(task, live, now)


def _shortage(task: Task, live: Sequence[WorkerDocument], now: datetime) -> Iterable[Reason]:
    if not live:
        yield Reason("no_worker", "no worker is live")
        return
    of_queue = [worker for worker in live if task.queue in worker.queues]
    if not of_queue:
        yield Reason("queue_unserved", f"no live worker serves the queue {task.queue!r}")
        return
    serving = [worker for worker in of_queue if task.name in worker.names]
    if not serving:
        yield Reason("name_unserved", f"no live worker of the queue {task.queue!r} has a handler for {task.name!r}")
        return
    keyed = [worker for worker in serving if worker.can_decrypt(task.sealed)]
    if not keyed:
        ids = listed([worker.worker_id for worker in serving])
        yield Reason("keys_needed", f"it is encrypted with the data key {task.sealed!r}, which {ids} cannot use")
        return
    serving = rollout.able(task.name, task.handler_version, keyed)
    if not serving:
        yield Reason("version_needed", rollout.missing(task.name, task.handler_version, keyed))
        return
    able = [worker for worker in serving if rules.is_candidate(task, worker.worker_id, now)]
    if not able:
        done = listed([worker.worker_id for worker in serving])
        seats = task.task_option.concurrent_worker_cnt
        yield Reason("other_worker_needed", f"{seats} different workers must succeed, and {done} cannot take it again")
        return
    steps: tuple[tuple[str, str, Callable[[WorkerDocument], bool]], ...] = (
        ("workers_stopping", "is stopping", lambda worker: worker.status is WorkerStatus.STOPPING),
        ("workers_paused", "is paused (concurrency 0)", is_paused),
        ("workers_busy", "is full", lambda worker: worker.running_cnt >= worker.concurrency),
    )
    for code, state, holds in steps:
        left = [worker for worker in able if not holds(worker)]
        if not left:
            who = listed([worker.worker_id for worker in able])
            yield Reason(code, f"every worker that could take it {state}: {who}")
            return
        able = left


def is_paused(worker: WorkerDocument) -> bool:
    """Whether the worker takes no tasks, because its concurrency is set to 0."""
    asked = worker.control.concurrency
    return (worker.concurrency if asked is None else asked) == 0


def _about_to_be_taken(task: Task, bounds: Mapping[PermitPool, Bound], now: datetime) -> Reason:
    since = max(rules.due_time(task), rules.retry_time(task, "") or rules.due_time(task))
    if now - since <= SOON:
        return Reason("due", "nothing: a worker is about to take it")
    shared = limits.shared(bounds.values(), SOON)
    return shared or Reason("not_taken", "it could be taken and is not: `mtask doctor` looks for the cause")
