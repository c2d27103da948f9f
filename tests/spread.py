"""Tasks of all kinds: spread over many queues, names, users and statuses, with many of one instant."""

from __future__ import annotations

import random
from datetime import UTC, datetime, timedelta
from typing import Any

from mtask.kernel.document.options import TaskOption
from mtask.kernel.document.status import TaskStatus

#: Tasks, queues, names and tenants; a tie is a set of tasks of one instant.
TASKS, QUEUES, NAMES, TENANTS, TIE = 6_000, 70, 7, 3, 300
NOW = datetime(2030, 1, 1, tzinfo=UTC)
STATUSES = [
    TaskStatus.SUCCESS,
    TaskStatus.INIT,
    TaskStatus.FAIL,
    TaskStatus.SUCCESS,
    TaskStatus.RUNNING,
    TaskStatus.CANCELED,
    TaskStatus.SUCCESS,
]
Document = dict[str, Any]


def document(number: int) -> Document:
    """Return a task. Ids, names, queues and statuses are spread over all instants."""
    chosen = random.Random(number)
    name, queue = f"n{chosen.randrange(NAMES)}", f"q{chosen.randrange(QUEUES):02}"
    # One tenant has few tasks.
    tenant = "rare" if number % 300 == 7 else f"t{chosen.randrange(TENANTS)}"
    key = f"{tenant}:{chosen.randrange(10**9):09}"
    status = chosen.choice(STATUSES)
    instant = NOW - timedelta(milliseconds=number // TIE)
    other = NOW - timedelta(milliseconds=chosen.randrange(TASKS // TIE))
    times: Document = {"finish_time": other} if status.is_final else {"next_preempt_time": other}
    return {
        "_id": f"{name}:{key}",
        "name": name,
        "key": key,
        "queue": queue,
        "params": {"user": {"id": chosen.randrange(50)}},
        "task_option": TaskOption(priority=chosen.randrange(3)).stored(),
        "lookup": [{"k": "order", "v": chosen.randrange(30)}],
        "task_state": {
            "status": status.value,
            "create_time": instant,
            **times,
            "failed_cnt": 0,
            "cancel_requested": False,
            "worker_states": [],
        },
        "schema_version": 1,
    }


def tasks_of_all_kinds(count: int = TASKS) -> list[Document]:
    """Return the tasks. Where two would have one id, the later one counts."""
    return list({each["_id"]: each for each in map(document, range(count))}.values())
