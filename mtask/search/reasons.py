"""One reason why a task waits, and the words that all reasons share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

#: The most characters of an id in a reason.
_ID_WIDTH = 100


@dataclass(frozen=True, slots=True)
class Reason:
    """One reason why a task waits. `until`: the time when this reason ends by itself, if known."""

    code: str
    message: str
    until: datetime | None = None


def brief(task_id: str) -> str:
    """Return an id for a reason. A key may be long."""
    return task_id if len(task_id) <= _ID_WIDTH else task_id[: _ID_WIDTH - 1] + "…"


def listed(names: Sequence[str], limit: int = 3) -> str:
    """Return the first `limit` names as text, and the number of the other names."""
    shown = ", ".join(names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"
