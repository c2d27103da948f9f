"""Strict extended JSON: what strangers send, and integers that leave exactly."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import pytest
from bson.decimal128 import Decimal128
from bson.int64 import Int64
from bson.min_key import MinKey
from bson.objectid import ObjectId
from bson.regex import Regex
from bson.son import SON
from hypothesis import given
from hypothesis import strategies as st

from mtask.errors import InvalidInput
from mtask.kernel.driver.extended_json import _without_large, extended, extended_exactly, parse_strict


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "no JSON"),
        ("{", "line 1, column 2"),
        ("{'a': 1}", "no JSON"),
        ('{"a": 1, "a": 2}', "two members"),
        ('{"b": [{"a": 1, "\\u0061": 2}]}', "two members"),
        ("NaN", "NaN is no JSON"),
        ("[Infinity]", "Infinity"),
        ("-Infinity", "-Infinity"),
        ("9223372036854775808", "64 bits"),
        ("-9223372036854775809", "64 bits"),
        ("1" * 10_000, "64 bits"),
        ('{"$numberLong": "9223372036854775808"}', "64 bits"),
        ("1e400", "too large"),
        ('{"a": [-1e999]}', "too large"),
        ('{"$numberDouble": "1e400"}', "too large"),
        ("[" * 101 + "]" * 101, "100 levels"),
        ('{"a":' * 101 + "1" + "}" * 101, "100 levels"),
        ("[" * 100_000 + "]" * 100_000, "100 levels"),
        ('{"$binary": {"base64": "AAAA", "subType": "06"}}', "encrypted"),
        ('{"$date": "yesterday"}', "extended JSON"),
        ('{"$oid": 7}', "24 hex digits"),
        ('{"a": {"$oid": null}}', "24 hex digits"),
        ('{"$oid": "7"}', "extended JSON"),
        ('{"$date": false}', "no instant"),
        ('{"$date": 2.5e-42}', "no instant"),
        ('{"$date": 1700000000000.5}', "no instant"),
        ('{"$date": null}', "extended JSON"),
    ],
)
def test_what_parsers_understand_in_different_ways_is_refused(text: str, why: str) -> None:
    with pytest.raises(InvalidInput, match=why) as caught:
        parse_strict(text, "body")
    assert caught.value.field == "body"
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("9223372036854775807", 2**63 - 1),
        ("-9223372036854775808", -(2**63)),
        ('{"$numberLong": "-9223372036854775808"}', -(2**63)),
        ('{"a": {"$date": "2030-01-01T00:00:00Z"}}', {"a": datetime(2030, 1, 1, tzinfo=UTC)}),
        ('{"a": "[[[[{{{{"}', {"a": "[[[[{{{{"}),
        ('"' + "[" * 1000 + '"', "[" * 1000),
        ('{"$other": 1}', {"$other": 1}),
        ("1.5", 1.5),
        ("null", None),
    ],
)
def test_what_fits_is_read(text: str, value: Any) -> None:
    assert parse_strict(text, "body") == value


def test_a_hundred_levels_fit() -> None:
    assert parse_strict("[" * 100 + "]" * 100, "body")


def test_integers_that_a_double_cannot_hold_leave_as_text() -> None:
    assert extended_exactly([2**53, 2**53 + 1, {"a": -(2**53) - 1}, True, 7]) == [
        2**53,
        {"$numberLong": str(2**53 + 1)},
        {"a": {"$numberLong": str(-(2**53) - 1)}},
        True,
        7,
    ]


_LEAVES: list[Any] = [
    *(None, True, 1, -(2**53), 2**53 + 1, Int64(5), Int64(2**60), 1.5, -0.0, float("nan"), float("inf"), "", "a", b"b"),
    *(ObjectId("0" * 24), Decimal128("1.2"), UUID(int=5), datetime(2020, 1, 1, tzinfo=UTC), MinKey(), Regex("a")),
]
_BSON = st.recursive(
    st.sampled_from(_LEAVES),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.sampled_from(["a", "", "b.c", "$oid", "$date", "é"]), inner, max_size=3),
        st.lists(inner, max_size=1).map(tuple),
        inner.map(lambda value: SON([("z", value)])),
        inner.map(lambda value: {5: value}),
    ),
    max_leaves=12,
)


@given(_BSON)
def test_values_that_need_no_conversion_come_out_as_those_that_are_converted(value: Any) -> None:
    converted = json.dumps(_without_large(extended(value)))
    assert json.dumps(extended_exactly(value)) == converted
