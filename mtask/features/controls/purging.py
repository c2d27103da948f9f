"""Purging: chooses the tasks to remove, and pauses between the batches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from mtask.arguments.criteria import TaskCriteria, checked
from mtask.client import views
from mtask.errors import InvalidInput, shown
from mtask.features.audit_log.client import said
from mtask.kernel.document.status import FINAL, TaskStatus
from mtask.kernel.driver.operation import Operation
from mtask.kernel.operations import change

_ALLOWED = [*FINAL, TaskStatus.INIT.value]
#: The pause after a batch, as a multiple of the batch's time: 1 leaves half of the time to others.
_PAUSE = 1.0


@dataclass(slots=True)
class Purging:
    """A purge. It removes batch after batch, until no more tasks match or the limit is reached."""

    criteria: Mapping[str, Any]
    older_than_ms: int | None
    limit: int
    removed: int = 0
    has_more: bool = True

    @property
    def said(self) -> str:
        """The tasks that it removes, for the action log."""
        age = None if self.older_than_ms is None else f"{self.older_than_ms}ms"
        return said({**self.criteria, "older_than": age, "limit": self.limit or None})

    def count(self) -> Operation[int]:
        """Return the number of tasks that a purge would remove now."""
        found = yield from change.count_matched(change.purgeable(self.criteria, self.older_than_ms))
        return min(found, self.limit) if self.limit else found

    def batch(self) -> Operation[None]:
        """Remove the next batch."""
        left = self.limit - self.removed if self.limit else change.BATCH
        matched = change.purgeable(self.criteria, self.older_than_ms)
        removed, self.has_more = yield from change.remove_batch(matched, left)
        self.removed += removed
        if self.limit and self.removed >= self.limit:
            self.has_more = False

    def pause(self, took: float) -> float:
        """Return the pause after a batch, in seconds. `took`: the time that the batch took, in seconds."""
        return took * _PAUSE if self.has_more else 0.0


def prepare(
    given: Mapping[str, Any],
    older_than: timedelta | float | None,
    limit: int,
    tenant: str | None = None,
) -> Purging:
    """Check the arguments and return the purge; raise InvalidInput."""
    criteria = checked(TaskCriteria, given, tenant)
    wanted = criteria["status"]
    statuses = [wanted] if isinstance(wanted, str) else wanted
    if statuses is None:
        criteria["status"] = list(FINAL)
    elif not set(statuses) <= set(_ALLOWED):
        raise InvalidInput(f"a purge takes {', '.join(_ALLOWED)}; cancel running tasks first.", field="status")
    return Purging(criteria, _older_than_ms(older_than), views.check_limit(limit))


def _older_than_ms(older_than: timedelta | float | None) -> int | None:
    if older_than is None:
        return None
    try:
        age = older_than if isinstance(older_than, timedelta) else timedelta(seconds=older_than)
        milliseconds = age // timedelta(milliseconds=1)
    except (TypeError, ValueError, OverflowError):
        milliseconds = -1
    if isinstance(older_than, bool) or milliseconds < 0:
        raise InvalidInput(f"older_than {shown(older_than)} is no length of time.", field="older_than")
    return milliseconds
