"""The doctor's check of gathered calls: tasks that have ended although their next round was to begin."""

from __future__ import annotations

from mtask.doctor.operations import SCAN_MS
from mtask.kernel.document.status import FINAL
from mtask.kernel.driver.operation import Operation, tasks
from mtask.search.findings import Check, Findings, fail

_CHECK = "gathered calls"
#: The most tasks that the finding names.
_MOST = 10_000


def gathered() -> Findings:
    """Look for tasks that have ended although calls wait for them."""
    left = yield from ended_before_next_round(_MOST)
    if not left:
        return []
    more = " or more" * (len(left) == _MOST)
    message = f"{len(left)}{more} tasks have ended although calls wait for them, such as {left[0][:600]}"
    remedy = "A worker of an older mtask has ended them: stop it, then `mtask rerun` each of them."
    return [fail(_CHECK, message, remedy, task_ids=left)]


def ended_before_next_round(limit: int) -> Operation[list[str]]:
    """Return ids of tasks that have ended although their next round was to begin. No worker of this version does so."""
    final = {"task_state.status": {"$in": FINAL}}
    found = yield tasks("find", {**final, "again": {"$exists": True}}, {"_id": 1}, limit=limit, max_time_ms=SCAN_MS)
    return [str(document["_id"]) for document in found]


CHECKS = [Check(_CHECK, gathered)]
