"""The doctor's findings, one for each check, and the reasons why tasks wait."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Any, NamedTuple

from mtask.kernel.driver.operation import Operation


class Level(StrEnum):
    """The severity of a finding."""

    OK = "OK"
    WARN = "WARN"  #: worth knowing; everything works
    FAIL = "FAIL"  #: something does not work


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check: a message, and the remedy if there is a problem."""

    check: str
    level: Level
    message: str
    remedy: str | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)


Findings = Operation[list[Finding]]


class Check(NamedTuple):
    """A check of the doctor, which needs a collection."""

    name: str
    examine: Callable[[], Findings]
    collection: str = "tasks"


def ok(check: str, message: str, **fields: Any) -> Finding:
    """Return a finding that all is well."""
    return Finding(check, Level.OK, message, None, fields)


def warn(check: str, message: str, remedy: str, **fields: Any) -> Finding:
    """Return a finding that is worth knowing, although everything works."""
    return Finding(check, Level.WARN, message, remedy, fields)


def fail(check: str, message: str, remedy: str, **fields: Any) -> Finding:
    """Return a finding about something that does not work."""
    return Finding(check, Level.FAIL, message, remedy, fields)


def rough(seconds: float) -> str:
    """Return a length of time for people: 850 ms, 12 s, 3 min, 5.2 h, 3 days."""
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    for limit, unit, name in ((120, 1, "s"), (7200, 60, "min"), (172_800, 3600, "h")):
        if seconds < limit:
            amount = seconds / unit
            return f"{amount:.0f} {name}" if amount >= 9.95 else f"{amount:.1f} {name}"
    return f"{seconds / 86_400:.0f} days"


# --- reasons ---------------------------------------------------------------------------------------------

# One reason why a task waits, and the words that all reasons share.

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


def count_of(count: int, *, is_more: bool = False) -> str:
    """Return a number of tasks as text. `is_more`: the count has stopped there."""
    return f"{count} task{'s' * (count != 1)}{' or more' * is_more}"


def examples(ids: Sequence[str], most: int) -> str:
    """Return the number of these tasks, of which at most `most` were looked for, with the first one."""
    return f"{count_of(len(ids), is_more=len(ids) == most)}, such as {ids[0]}"


def listed(names: Sequence[str], limit: int = 3) -> str:
    """Return the first `limit` names as text, and the number of the other names."""
    shown = ", ".join(names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"
