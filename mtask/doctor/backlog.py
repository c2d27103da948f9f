"""The doctor's checks of tasks and workers: which tasks are stuck, and which workers are missing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any

from mtask.client import views
from mtask.doctor import operations as diagnosis
from mtask.doctor.explain import is_paused, pauses_of, waits_for
from mtask.errors import DatabaseError
from mtask.features.controls import client as controls
from mtask.features.controls.rules import Control
from mtask.features.limits import doctor as permits
from mtask.features.rollout import doctor as rollout
from mtask.kernel.document.status import TaskStatus, WorkerStatus
from mtask.kernel.document.task import Task, WorkerDocument
from mtask.kernel.driver.operation import Operation, server_time
from mtask.kernel.operations import change as queries
from mtask.kernel.operations import find_due as finding
from mtask.kernel.operations import workers
from mtask.search import counts as counting
from mtask.search.findings import Finding, Findings, Level, count_of, examples, fail, listed, ok, rough, warn

#: The longest time that a lapsed run may stay unsettled. Any live worker settles it much earlier.
LAPSED_GRACE = timedelta(minutes=2)
_GROUPS = 200
KEYS_REMEDY = "Start a worker with --encryption-key-file and the right master key; its log says what it lacks."
_EXAMPLES = 20


def tasks_and_workers(patience: timedelta) -> Findings:
    """Look for stuck tasks, and for dead workers that hold tasks."""
    now = yield from server_time()
    on_record = views.workers_of((yield from workers.every()))
    live = [worker for worker in on_record if worker.is_live(now)]
    found = [*_live_workers(live), *_unserved(live)]
    found += yield from _gone(on_record, now)
    groups, holds = (yield from _due_groups()), (yield from controls.known(now))
    waiting = due_tasks(groups, live, now, patience, holds)
    waiting += yield from _not_taken(
        [g for g in groups if now - g.oldest > patience and not _cause(g, live, holds)], live, now, holds
    )
    total = sum(group.count for group in groups)
    all_well = ok("due tasks", f"{count_of(total)} due, with workers for all" if total else "none waits", count=total)
    found += waiting or [all_well]
    found += yield from _of_no_tenant(holds)
    found += yield from _lapsed()
    return found


def stats(most: int | None = None, tenant: str | None = None) -> Operation[list[views.StatRow]]:
    """Count tasks by queue, name and status. Add the reasons why no worker can take due tasks.

    With `most`, count at most this number of tasks with each status. With a `tenant`, count all its tasks.
    """
    counted = queries.statistics(tenant) if most is None or tenant is not None else counting.statistics(most)
    rows = views.stats_of((yield from counted))
    waiting = TaskStatus.INIT.value
    if not any(row.status == waiting for row in rows):
        return rows
    try:
        reasons = yield from stuck()
    except DatabaseError:
        return rows  # the search for reasons was too slow or not permitted: return only the counts
    return [replace(row, stuck=reasons.get((row.queue, row.name))) if row.status == waiting else row for row in rows]


def _due_groups() -> Operation[list[DueGroup]]:
    rows = yield from diagnosis.due_groups(_GROUPS)
    # A preemption time that is no instant, or a queue or a name that is no text, makes a task malformed. Another check
    # reports such tasks.
    return [DueGroup.of(row) for row in rows if isinstance(row["oldest"], datetime) and _has_texts(row["_id"])]


def _has_texts(key: Mapping[str, Any]) -> bool:
    return isinstance(key.get("queue"), str) and isinstance(key.get("name"), str)


def stuck() -> Operation[dict[tuple[str, str], str]]:
    """Return the reasons why no worker can take due tasks. The keys are pairs of queue and name."""
    now = yield from server_time()
    live = [worker for worker in views.workers_of((yield from workers.live())) if worker.is_live(now)]
    groups, holds = (yield from _due_groups()), (yield from controls.known(now))
    reasons: dict[tuple[str, str], list[str]] = {}
    for group in groups:
        cause = _cause(group, live, holds)
        if cause is not None:
            found = reasons.setdefault((group.queue, group.name), [])
            if cause[0] not in found:
                found.append(cause[0])
    return {of: "; ".join(found) for of, found in reasons.items()}


@dataclass(frozen=True, slots=True)
class DueGroup:
    """A group of due tasks that no worker holds: of one queue, name, specific_worker_ids, data key and version."""

    queue: str
    name: str
    worker_ids: Sequence[str]
    count: int
    oldest: datetime
    task_id: str
    sealed: str | None = None  #: the name of their data key
    version: int = 1  #: of the handler for which the params were made

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> DueGroup:
        """Return the group that a row of the query `due_groups` describes."""
        key = row["_id"]
        named = key.get("worker_ids")
        return cls(
            queue=key["queue"],
            name=key["name"],
            worker_ids=[str(worker_id) for worker_id in named] if isinstance(named, list) else [],
            count=row["count"],
            oldest=row["oldest"],
            task_id=str(row["task_id"]),
            sealed=None if key.get("sealed") is None else str(key["sealed"]),
            version=key["version"] if isinstance(key.get("version"), int) else 1,
        )


def due_tasks(
    groups: Sequence[DueGroup],
    live: Sequence[WorkerDocument],
    now: datetime,
    patience: timedelta,
    holds: Sequence[Control] = (),
) -> list[Finding]:
    """Return a finding for each group that no worker can take. It is a FAIL after `patience`, and a WARN before."""
    found = []
    for group in groups:
        waited = now - group.oldest
        cause = _cause(group, live, holds)
        if cause is None:
            continue
        count = f"{count_of(group.count)} {group.name!r} due in queue {group.queue!r}"
        message = f"{count}, waiting up to {rough(waited.total_seconds())}: {cause[0]}"
        level = Level.FAIL if waited > patience else Level.WARN
        fields = {"queue": group.queue, "name": group.name, "count": group.count, "example": group.task_id}
        found.append(Finding("due tasks", level, message, cause[1], fields))
    return found


def _not_taken(
    groups: Sequence[DueGroup], live: Sequence[WorkerDocument], now: datetime, holds: Sequence[Control]
) -> Findings:
    """Return findings about groups that wait although a worker serves them. Each reason is that of an example task."""
    found = []
    tasks: dict[str, Task] = {}
    for group in groups[:_EXAMPLES]:
        example = yield from finding.read(group.task_id)
        tasks |= {task.id: task for task in views.tasks_of([] if example is None else [example])}
    bounds = yield from permits.of_tasks([*tasks.values()], holds)
    found += yield from permits.kept(bounds.values())
    for group in groups[:_EXAMPLES]:
        task = tasks.get(group.task_id)
        reasons = waits_for(task, live, now, holds, bounds) if task else []
        if not reasons or reasons[0].until is not None or reasons[0].code in _HAS_TO_WAIT:
            continue  # a worker has taken the task meanwhile, or the task has to wait
        waiting = f"{count_of(group.count)} {group.name!r} due in queue {group.queue!r}, waiting up to "
        is_idle = reasons[0].code in ("due", "not_taken")
        why = "live workers serve it, have free slots and don't take it" if is_idle else reasons[0].message
        if is_idle and task is not None:
            its = [bounds[pool] for pool in permits.limited_pools(task, holds)]
            why += permits.unasked(its, [worker.worker_id for worker in live])
        message = f"{waiting}{rough((now - group.oldest).total_seconds())}: {why}"
        look = f"`mtask show {group.task_id}` shows more; look into the workers' logs."
        remedy = _REMEDIES.get(reasons[0].code, look)
        fields = {"queue": group.queue, "name": group.name, "count": group.count, "example": group.task_id}
        found.append(fail("due tasks", message, remedy, **fields))
    return found


#: The reasons for which a task waits although nothing is wrong.
_HAS_TO_WAIT = frozenset({"limited", "behind", "reserved", "paused", "turn", "handed_on"})
_REMEDIES = {
    "workers_busy": "Start more workers, or raise --concurrency.",
    "named_absent": "Start that worker, or admit others: `mtask update TASK --option specific_worker_ids=[]`.",
    "other_worker_needed": "Start another worker: each success must come from a different one.",
}


def _cause(group: DueGroup, live: Sequence[WorkerDocument], holds: Sequence[Control]) -> tuple[str, str] | None:
    """Return the reason why no worker can take a group's tasks, and the remedy. Return None if a worker can."""
    for control in pauses_of(group.queue, group.name, holds):
        return (
            f"the {control.kind} {control.target!r} {control.said}",
            f"`mtask resume --{control.kind} {control.target}`.",
        )
    admitted = [worker for worker in live if not group.worker_ids or worker.worker_id in group.worker_ids]
    start = f"Start a worker: `mtask-worker package.module:app --queues {group.queue}`."
    if not live:
        return "no worker is live", start
    if not admitted:
        remedy = "Start that worker, or admit others: `mtask update TASK --option specific_worker_ids=[]`."
        return f"only {listed(list(group.worker_ids))} may run it, and no such worker is live", remedy
    of_queue = [worker for worker in admitted if group.queue in worker.queues]
    if not of_queue:
        return "no live worker that may run it serves the queue", start
    serving = [worker for worker in of_queue if group.name in worker.names]
    if not serving:
        ids = listed([worker.worker_id for worker in of_queue])
        return f"no handler for it in {ids}", "Deploy an app that has the handler, and restart the workers."
    able = [worker for worker in serving if worker.can_decrypt(group.sealed)]
    if not able:
        ids = listed([worker.worker_id for worker in serving])
        return f"encrypted with the data key {group.sealed!r}, which {ids} cannot use", KEYS_REMEDY
    serving = rollout.able(group.name, group.version, able)
    if not serving:
        return rollout.missing(group.name, group.version, able), rollout.REMEDY
    awake = [worker for worker in serving if not is_paused(worker) and worker.status is not WorkerStatus.STOPPING]
    if not awake:
        ids = listed([worker.worker_id for worker in serving])
        remedy = f"Resume: `mtask set-worker {serving[0].worker_id} --concurrency reset`."
        return f"{ids} paused or stopping", remedy
    return None


def _live_workers(live: Sequence[WorkerDocument]) -> list[Finding]:
    if not live:
        return [warn("workers", "none is live", "Start one: `mtask-worker package.module:app`.", live=0)]
    running = sum(worker.running_cnt for worker in live)
    message = f"{len(live)} live, {running} runs under way"
    paused = [worker.worker_id for worker in live if is_paused(worker)]
    if paused:
        remedy = f"Resume: `mtask set-worker {paused[0]} --concurrency reset`."
        return [warn("workers", f"{message}; paused: {listed(paused)}", remedy, live=len(live), paused=paused)]
    return [ok("workers", message, live=len(live))]


def _unserved(live: Sequence[WorkerDocument]) -> list[Finding]:
    """Return a finding if live workers have met tasks for which none of them has a handler."""
    served = {(queue, name) for worker in live for queue in worker.queues for name in worker.names}
    met = {
        name
        for worker in live
        for name in worker.unserved_names
        if not any((queue, name) in served for queue in worker.queues)
    }
    if not met:
        return []
    message = f"workers met tasks that none of them has a handler for: {listed(sorted(met), 10)}"
    remedy = "Deploy their handlers, or move the tasks to a queue of their own."
    return [warn("unserved names", message, remedy, names=sorted(met))]


def _gone(on_record: Sequence[WorkerDocument], now: datetime) -> Findings:
    silent = [w for w in on_record if not w.is_live(now) and w.status is not WorkerStatus.STOPPED]
    if not silent:
        return []
    held = yield from diagnosis.held_by([worker.worker_id for worker in silent])
    found = []
    for worker in silent:
        if held.get(worker.worker_id):
            age = rough((now - worker.heartbeat_time).total_seconds())
            message = f"{worker.worker_id} ({worker.host}, pid {worker.pid}) has been silent for {age} and holds "
            message += count_of(held[worker.worker_id])
            remedy = "They are preempted when their leases lapse; look into its log, or the machine's."
            found.append(warn("silent workers", message, remedy, worker_id=worker.worker_id))
    return found


def _of_no_tenant(holds: Sequence[Control]) -> Findings:
    """Return findings about queues with fair turns in which tasks of no tenant wait."""
    found = []
    for control in holds:
        task_id = (yield from diagnosis.open_of_no_tenant(control.target)) if control.fair else None
        if task_id is not None:
            message = f"tasks of no tenant wait in queue {control.target!r}, such as {task_id}. Its tenants take turns"
            remedy = (
                "Publish with a tenant: no index leads to tasks of none, so behind a long backlog they may be late."
            )
            found.append(warn("fair turns", message, remedy, queue=control.target, example=task_id))
    return found


def _lapsed() -> Findings:
    lapsed = yield from diagnosis.lapsed_tasks(LAPSED_GRACE // timedelta(milliseconds=1), _EXAMPLES)
    if not lapsed:
        return [ok("leases", "no lease lapsed unnoticed")]
    ids = [str(task["_id"]) for task in lapsed]
    message = f"lapsed over 2 min ago, and no worker preempts or settles: {examples(ids, _EXAMPLES)}"
    remedy = "Start a worker that serves their queue and name."
    return [fail("leases", message, remedy, task_ids=ids)]
