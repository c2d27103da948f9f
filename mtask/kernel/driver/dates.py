"""Values as `find_naive` reads them, and the way back: dates without a time zone, and references as DBRef.

All of BSON's dates are in UTC. To give each date a time zone while a reply is decoded takes longer than to decode all
the rest of a task.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, TypeVar

from bson.code import Code
from bson.dbref import DBRef

T = TypeVar("T")


def with_zones(value: T) -> T:
    """Return the value as the usual codec would have read it, at any depth. This changes dicts and lists in place.

    Each date gets a time zone, and each reference becomes the dict that was written.
    """
    change = _CHANGES.get(type(value))
    return value if change is None else change(value)


def _in_dict(value: dict[Any, Any]) -> dict[Any, Any]:
    for name, part in value.items():
        kind = type(part)
        if kind in _CHANGES:
            value[name] = part.replace(tzinfo=UTC) if kind is datetime else _CHANGES[kind](part)
    return value


def _in_list(value: list[Any]) -> list[Any]:
    for index, part in enumerate(value):
        kind = type(part)
        if kind in _CHANGES:
            value[index] = _CHANGES[kind](part)
    return value


def _in_utc(value: datetime) -> datetime:
    return value.replace(tzinfo=UTC)


def _in_code(value: Code) -> Code:
    if value.scope:
        _in_dict(value.scope)  # type: ignore[arg-type]  # it is a dict, as it was decoded
    return value


def _in_reference(value: DBRef) -> dict[Any, Any]:
    return _in_dict(dict(value.as_doc()))


_CHANGES: dict[type, Any] = {datetime: _in_utc, dict: _in_dict, list: _in_list, Code: _in_code, DBRef: _in_reference}
