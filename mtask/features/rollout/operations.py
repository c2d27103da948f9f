"""Reads the order in which the versions of a handler were started, and the tasks that were handed on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mtask.kernel.document.status import TaskStatus
from mtask.kernel.driver.indexes import STATUS_INDEX
from mtask.kernel.driver.operation import Operation, handlers, tasks
from mtask.kernel.statements.filters import NEXT, RUNS

_SCAN_MS = 10_000


def started(name: str) -> Operation[list[str]]:
    """Return the versions of a handler, by their hashes, the last started one last. The document may be malformed."""
    document = yield handlers("find_one", {"_id": name}, {"versions.hash": 1})
    versions = None if document is None else document.get("versions")
    found = versions if isinstance(versions, list) else []
    return [str(each["hash"]) for each in found if isinstance(each, Mapping) and "hash" in each]


def handed_on(limit: int) -> Operation[list[dict[str, Any]]]:
    """Return open tasks that were handed on in this round, at most so many. Each comes with its `name`."""
    was_handed_on = {"$elemMatch": {"misfit_since": {"$exists": True}, "past": {"$ne": True}}}
    matched = {"task_state.status": TaskStatus.INIT.value, NEXT: {"$exists": True}, RUNS: was_handed_on}
    found: list[dict[str, Any]] = yield tasks(
        "find", matched, {"name": 1}, limit=limit, hint=STATUS_INDEX, max_time_ms=_SCAN_MS
    )
    return found
