"""The fields of forms."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from mtask.errors import InvalidInput
from mtask.web.page.forms import Form


def form(**fields: str) -> Form:
    return Form(fields.items())


def test_text_is_stripped_unless_it_is_asked_for_exactly() -> None:
    given = form(key=" a ", empty="  ")
    assert (given.text("key"), given.exact("key"), given.text("missing"), given.exact("missing")) == (
        "a",
        " a ",
        "",
        None,
    )
    assert given.given() == {"key": ["a"]}
    assert Form([("status", "INIT"), ("status", " "), ("status", "FAIL")]).texts("status") == ["INIT", "FAIL"]
    with pytest.raises(InvalidInput, match="empty"):
        given.needed("empty")


@pytest.mark.parametrize(
    ("text", "seconds"), [("", None), ("90", 90), ("1.5s", 1.5), ("5m", 300), ("2 H", 7200), ("1d", 86_400)]
)
def test_lengths_of_time(text: str, seconds: float | None) -> None:
    assert form(last=text).seconds("last") == seconds


@pytest.mark.parametrize("text", ["x", "5w", "-5", "1e9", "nan", "inf", "٣", "1.2.3s", "m", "9" * 20])
def test_what_is_no_length_of_time_is_refused(text: str) -> None:
    with pytest.raises(InvalidInput, match="90s"):
        form(last=text).seconds("last")


@pytest.mark.parametrize(("text", "number"), [("", None), (" 7 ", 7), ("0", 0)])
def test_whole_numbers(text: str, number: int | None) -> None:
    assert form(n=text).whole("n") == number


@pytest.mark.parametrize("text", ["-1", "1.5", "x", "²", "1" * 17, "1_000"])
def test_what_is_no_whole_number_is_refused(text: str) -> None:
    with pytest.raises(InvalidInput, match="whole number"):
        form(n=text).whole("n")


@pytest.mark.parametrize(
    ("text", "value"), [("", None), ("{}", {}), ('{"a": [1, {"$numberLong": "5"}]}', {"a": [1, 5]}), ('"x"', "x")]
)
def test_values(text: str, value: Any) -> None:
    assert form(params=text).value("params") == value


@pytest.mark.parametrize("text", ["{", "{'a': 1}", '{"a": 1, "a": 2}', "NaN", "[" * 200 + "]" * 200])
def test_what_is_no_value_is_refused(text: str) -> None:
    with pytest.raises(InvalidInput):
        form(params=text).value("params")


def test_instants_are_in_utc_unless_they_say_otherwise() -> None:
    assert form(at="2030-12-31 23:59").instant("at") == datetime(2030, 12, 31, 23, 59, tzinfo=UTC)
    assert form(at="2030-12-31T23:59:00+02:00").instant("at") == datetime(2030, 12, 31, 21, 59, tzinfo=UTC)
    for wrong in ("tomorrow", "0001-01-01T00:00:00+23:00", "2030-13-01"):
        with pytest.raises(InvalidInput, match="UTC"):
            form(at=wrong).instant("at")
