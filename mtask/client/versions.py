"""Versions of tasks: the tag of what a caller read, by which a later change can tell that nothing came between."""

from __future__ import annotations

import hashlib
import hmac
import json

from mtask.kernel.document.task import Task
from mtask.kernel.driver.extended_json import extended_exactly


def etag(task: Task) -> str:
    """Return the tag of a task's version: of its params, options, queue, status, failures and last run, not its pings.

    `filters.unchanged` compares the same fields on the server. A task that has ended and still owes its value has a tag
    of its own: who knows that version has not seen the value.
    """
    runs = task.runs
    owed = {"is_value_owed": True} if task.status.is_final and not task.is_complete else {}
    covered = extended_exactly(
        {
            "params": task.params,
            "options": task.task_option.stored(),
            "queue": task.queue,
            "status": task.status.value,
            "failed_cnt": task.task_state.failed_cnt,
            "created": task.task_state.create_time,
            "run_id": runs[-1].run_id if runs else None,
            **owed,
        }
    )
    return hashlib.sha256(json.dumps(covered, sort_keys=True).encode("utf-8", "surrogatepass")).hexdigest()[:32]


def is_etag_of(task: Task, tag: str) -> bool:
    """Whether the tag is that of the task's version."""
    return hmac.compare_digest(etag(task).encode(), tag.encode("utf-8", "surrogatepass"))
