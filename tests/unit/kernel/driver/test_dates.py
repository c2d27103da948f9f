"""What is read without time zones becomes what the usual codec reads."""

from __future__ import annotations

import uuid
from datetime import UTC, datetime
from typing import Any

import bson
import pytest
from bson import Binary, Code, DatetimeMS, DBRef, Decimal128, Int64, MaxKey, ObjectId, Regex, Timestamp

from mtask.kernel.driver.bson import with_zones
from mtask.kernel.driver.stores import CODEC, NAIVE

NOON = datetime(2030, 1, 1, 12, 30, 15, 123_000, tzinfo=UTC)
VALUES: dict[str, Any] = {
    "a date": NOON,
    "the first date": datetime(1, 1, 1, tzinfo=UTC),
    "the last date": datetime(9999, 12, 31, 23, 59, 59, 999_000, tzinfo=UTC),
    "a date that Python cannot hold": DatetimeMS(2**60),
    "dates at any depth": {"list": [NOON, {"in": {"it": [[NOON]]}}, None], "text": "2030-01-01"},
    "a reference": DBRef("tasks", NOON, "other", at=NOON, more=[{"at": NOON}]),
    "a reference in a list in a reference": DBRef("tasks", {"x": [DBRef("a", 1, at=NOON)]}),
    "code with a scope": [Code("x", {"at": NOON, "in": [{"at": NOON}]})],
    "code": Code("x"),
    "other types": [1, 1.5, True, None, "text", Int64(1), Decimal128("1"), ObjectId(), uuid.uuid4(), Binary(b"x", 6)],
    "rare types": [Regex("x"), Timestamp(1, 1), MaxKey()],
    "nothing": {"list": [], "dict": {}},
}


@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES)
def test_value_read_without_time_zones_becomes_what_the_usual_codec_reads(value: Any) -> None:
    stored = bson.encode({"value": value, "at": NOON}, codec_options=CODEC)
    assert _shown(with_zones(bson.decode(stored, NAIVE))) == _shown(bson.decode(stored, CODEC))


def test_a_second_time_changes_nothing() -> None:
    stored = bson.encode({"value": [NOON, {"at": NOON}]}, codec_options=CODEC)
    once = with_zones(bson.decode(stored, NAIVE))
    assert _shown(with_zones(once)) == _shown(bson.decode(stored, CODEC))


def _shown(value: Any) -> Any:
    """Return the value with the types and time zones of all its parts."""
    if isinstance(value, dict):
        return "dict", type(value), [(name, _shown(part)) for name, part in value.items()]
    if isinstance(value, list):
        return "list", [_shown(part) for part in value]
    if isinstance(value, Code):
        return "code", str(value), _shown(value.scope)
    return type(value), repr(value)
