"""The doctor's checks of flows: which flows cannot end by themselves, and why.

Clients and workers make no such flow. Somebody has changed or removed documents by hand, or no worker is live.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

from mtask.client import views
from mtask.doctor import operations as diagnosis
from mtask.features.flows import faults, finding
from mtask.kernel.driver.operation import Operation
from mtask.kernel.operations import workers
from mtask.search.findings import Finding, fail, listed, ok, warn

#: The longest time for which a change of a step may stay untold. Any live worker tells it within seconds.
OWED_GRACE = timedelta(minutes=1)
_CHECK = "flows"
_EXAMPLES = 20
Findings = Operation[list[Finding]]


def flows() -> Findings:
    """Look for flows that cannot end by themselves."""
    if not (yield from finding.is_any()):
        return [ok(_CHECK, "there are none")]
    now = yield from diagnosis.server_time()
    live = [worker for worker in views.workers_of((yield from workers.live())) if worker.is_live(now)]
    found = [
        *_old_workers((yield from workers.without_flows(_EXAMPLES))),
        *_untold((yield from faults.owed_for(OWED_GRACE, _EXAMPLES)), has_worker=bool(live)),
        *_unheld((yield from faults.without_holder(_EXAMPLES))),
        *(yield from _with_ended_holder(has_worker=bool(live))),
        *_released((yield from faults.held_though_released(_EXAMPLES))),
        *_headless((yield from faults.headless(_EXAMPLES))),
    ]
    return found or [ok(_CHECK, "each can end by itself")]


def _old_workers(old: Sequence[str]) -> list[Finding]:
    if not old:
        return []
    message = f"live workers of an older mtask mark WAITING steps FAIL: {listed(old, 5)}"
    return [fail(_CHECK, message, "Upgrade or stop them (`mtask stop-worker`).", worker_ids=list(old))]


def _untold(owed: Sequence[str], *, has_worker: bool) -> list[Finding]:
    if not owed:
        return []
    message = f"ended or changed over 1 min ago, and its dependents were not told: {_tasks(owed)}"
    if has_worker:
        remedy = "Any live worker does it: look into the workers' logs."
        return [fail(_CHECK, message, remedy, task_ids=list(owed))]
    return [fail(_CHECK, f"{message}; no worker is live", "Start a worker: it tells them.", task_ids=list(owed))]


def _unheld(lost: Sequence[str]) -> list[Finding]:
    if not lost:
        return []
    message = f"WAITING, but no task holds it, so no end releases it: {_tasks(lost)}"
    return [fail(_CHECK, message, _open_anew(lost[0]), task_ids=list(lost))]


def _with_ended_holder(*, has_worker: bool) -> Findings:
    rows = yield from faults.with_ended_holder(_EXAMPLES)
    found = []
    gone = [str(row["_id"]) for row in rows if row.get("holder") is None]
    if gone:
        message = f"WAITING for a task that was removed by hand: {_tasks(gone)}"
        remedy = "Any live worker decides on it within a minute." if has_worker else "Start a worker: it decides on it."
        found.append(warn(_CHECK, message, remedy, task_ids=gone))
    ended = [row for row in rows if row.get("holder") is not None]
    if ended:
        ids = [str(row["_id"]) for row in ended]
        holder = f"{ended[0]['held_by']} ({ended[0]['holder']})"
        message = f"WAITING for a task that has ended and tells nobody: {_tasks(ids)}, held by {holder}"
        found.append(fail(_CHECK, message, _open_anew(ids[0]), task_ids=ids))
    return found


def _released(held: Sequence[str]) -> list[Finding]:
    if not held:
        return []
    message = f"not WAITING, but another task holds it: {_tasks(held)}"
    return [warn(_CHECK, message, "It runs all the same; nobody should write flow.held_by.", task_ids=list(held))]


def _headless(keys: Sequence[str]) -> list[Finding]:
    if not keys:
        return []
    message = f"the first task is gone, so the retention of the other steps never begins: {listed(keys, 5)}"
    return [warn(_CHECK, message, "Remove the other steps when they have ended: `mtask remove`.", keys=list(keys))]


def _open_anew(task_id: str) -> str:
    return f"Decide on it anew: `mtask cancel {task_id}`, then `mtask retry {task_id}`."


def _tasks(ids: Sequence[str]) -> str:
    more = " or more" * (len(ids) == _EXAMPLES)
    return f"{len(ids)} task{'s' * (len(ids) != 1)}{more}, such as {ids[0]}"
