"""The doctor's check of callbacks: which ends of tasks are told to nobody, and why."""

from __future__ import annotations

from datetime import timedelta

from mtask.features.callbacks import operations as store
from mtask.features.callbacks.rules import DELIVERY
from mtask.kernel.document.status import TaskStatus
from mtask.kernel.operations import workers
from mtask.search.findings import Check, Findings, examples, fail, listed, ok, warn

#: The longest time for which nobody may have published the delivery of an end. Any live worker does it within seconds.
OWED_GRACE = timedelta(minutes=2)
_CHECK = "callbacks"
_EXAMPLES = 20


def callbacks() -> Findings:
    """Look for ends of tasks that are told to nobody."""
    live = yield from workers.live()
    found = []
    untold = yield from store.owed_for(OWED_GRACE, _EXAMPLES)
    if untold:
        message = f"ended over 2 min ago, and no delivery of the callback was published: {examples(untold, _EXAMPLES)}"
        remedy = "Any live worker does it: look into the workers' logs." if live else "Start a worker: it publishes it."
        found.append(fail(_CHECK, message, remedy, task_ids=untold))
    waiting = yield from store.deliveries(TaskStatus.INIT, _EXAMPLES, is_due=True)
    if waiting and not any(DELIVERY in worker.get("names", ()) for worker in live):
        message = f"no live worker delivers callbacks: {examples(waiting, _EXAMPLES)}"
        found.append(fail(_CHECK, message, "Start one with `mtask-worker --callbacks HOST,...`.", task_ids=waiting))
    failed = yield from store.deliveries(TaskStatus.FAIL, _EXAMPLES)
    if failed:
        message = f"given up: {examples(failed, _EXAMPLES)}"
        found.append(warn(_CHECK, message, f"`mtask show {failed[0]}` says why; then `mtask retry`.", task_ids=failed))
    old = (yield from workers.without_field("callback", _EXAMPLES)) if found else []
    if old:
        message = f"live workers of an older mtask tell nobody of the ends of their tasks: {listed(old, 5)}"
        found.append(fail(_CHECK, message, "Upgrade or stop them (`mtask stop-worker`).", worker_ids=old))
    return found or [ok(_CHECK, "none is overdue")]


CHECKS = [Check(_CHECK, callbacks)]
