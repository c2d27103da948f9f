"""Tells which tasks had lapsed runs that a statement has closed. For metrics; nothing depends on it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from mtask.kernel.document.status import RunStatus
from mtask.kernel.document.task import runs_in
from mtask.kernel.driver.operation import Operation, tasks
from mtask.kernel.statements import filters

_VIEW = {
    "name": 1,
    "queue": 1,
    **{f"{filters.RUNS}.{field}": 1 for field in ("status", "fail_time")},
}


@dataclass(frozen=True, slots=True)
class Lapse:
    """Lapsed runs of one task that were closed together."""

    queue: str
    name: str
    run_cnt: int
    time: datetime


def closed(task_ids: Collection[Any], task_cnt: int, since: datetime) -> Operation[list[Lapse]]:
    """Return what a statement has closed that changed this number of these tasks: the tasks whose runs lapsed last.

    The server tells how many tasks a statement has changed, and not which. If another worker closes lapsed runs of the
    same tasks at the same time, a task may be told in place of another one, but the number is right. A statement can
    change a task without a lapsed run, too: what lapsed before `since`, by the server's clock, was closed before.
    """
    documents = yield tasks("find", filters.by_ids(list(task_ids)), _VIEW, hint="_id_")
    lapses = [lapse for document in documents if (lapse := lapse_in(document)) is not None]
    found = [lapse for lapse in lapses if lapse.time >= since]
    return sorted(found, key=lambda lapse: lapse.time, reverse=True)[:task_cnt]


def lapse_in(document: dict[str, Any], at: datetime | None = None) -> Lapse | None:
    """Return the lapsed runs of a task that were closed at this time, by default those that were closed last."""
    times = [
        run["fail_time"]
        for run in runs_in(document)
        if run.get("status") == RunStatus.TIMEOUT and isinstance(run.get("fail_time"), datetime)
    ]
    time = max(times, default=None) if at is None else at
    if time is None or time not in times:
        return None
    return Lapse(str(document.get("queue")), str(document.get("name")), times.count(time), time)
