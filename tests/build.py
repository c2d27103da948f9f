"""Builds the documents of tasks, of their runs, and of workers. A test gives what it is about, and no more."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from types import MappingProxyType
from typing import Any

from mtask.kernel.document.options import TaskOption

Document = dict[str, Any]
PAST = datetime(2024, 1, 1, tzinfo=UTC)
#: `changed` leaves out a field with this value.
MISSING = object()
_NOTHING: Mapping[str, Any] = MappingProxyType({})


def run(
    status: str = "RUNNING", claimed: datetime = PAST, lease_end: datetime | None = None, number: int = 1, **fields: Any
) -> Document:
    """Return a run. Without `lease_end`, its lease takes a minute."""
    return {
        "run_id": f"run-{number}",
        "worker_id": "w1",
        "attempt": number,
        "status": status,
        "claim_time": claimed,
        "ping_expire_time": lease_end or claimed + timedelta(minutes=1),
        **fields,
    }


def task(
    task_id: str = "task:k", *runs: Document, time: datetime = PAST, option: Mapping[str, Any] = _NOTHING,
    state: Mapping[str, Any] = _NOTHING, **fields: Any,
) -> Document:  # fmt: skip
    """Return a task that is due since it was created at `time`, as any driver could write it.

    `option` and `state` are parts of task_option and of task_state.
    """
    name, _, key = task_id.partition(":")
    return {
        "_id": task_id,
        "name": name,
        "key": key,
        "queue": "default",
        "params": None,
        "task_option": {**TaskOption().stored(), **option},
        "task_state": {
            "status": "INIT",
            "create_time": time,
            "next_preempt_time": time,
            "failed_cnt": 0,
            "cancel_requested": False,
            "worker_states": [*runs],
            **state,
        },
        "schema_version": 1,
        **fields,
    }


def worker(worker_id: str = "w1", now: datetime = PAST, **fields: Any) -> Document:
    """Return a live worker's document. Its heartbeat was at `now`, and expires in an hour."""
    return {
        "_id": worker_id,
        "incarnation": "i",
        "host": "h",
        "pid": 1,
        "status": "running",
        "started_time": now,
        "heartbeat_time": now,
        "heartbeat_expire_time": now + timedelta(hours=1),
        "queues": ["default"],
        "names": ["a"],
        "concurrency": 10,
        "running_cnt": 0,
        "version": "0",
        "control": {"stop": False, "concurrency": None},
        **fields,
    }


def changed(document: Document, changes: Mapping[str, Any]) -> Document:
    """Return a copy with fields changed, `a__b` or `a.b` standing for the field b of a."""
    made = copy.deepcopy(document)
    for path, value in changes.items():
        *parents, last = path.replace("__", ".").split(".")
        node: Any = made
        for part in parents:
            node = node[int(part) if part.isdigit() else part]
        if value is MISSING:
            del node[last]
        else:
            node[last] = value
    return made
