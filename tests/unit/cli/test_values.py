"""Values as they are written on a command line."""

from __future__ import annotations

import string
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mtask.cli import values
from mtask.errors import InvalidInput, InvalidOption


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("90s", timedelta(seconds=90)),
        ("5m", timedelta(minutes=5)),
        ("1h30m", timedelta(minutes=90)),
        ("1h 30m", timedelta(minutes=90)),
        ("250ms", timedelta(milliseconds=250)),
        ("1.5h", timedelta(minutes=90)),
        ("2d", timedelta(days=2)),
        ("1w", timedelta(weeks=1)),
        ("3min", timedelta(minutes=3)),
        ("12", timedelta(seconds=12)),
        ("0.5", timedelta(seconds=0.5)),
        (" 5M ", timedelta(minutes=5)),
    ],
)
def test_durations_are_read_as_people_write_them(text: str, expected: timedelta) -> None:
    assert values.duration(text, "delay") == expected


@pytest.mark.parametrize("text", ["", " ", "x", "5x", "-5s", "m5", "5 5m", "1e3", "nan", "inf", "9" * 400 + "d", "٣s"])
def test_what_is_no_duration_is_told_with_an_example(text: str) -> None:
    with pytest.raises(InvalidInput, match="90s, 5m") as caught:
        values.duration(text, "delay")
    assert caught.value.field == "delay"


@given(st.text(alphabet=string.digits + string.ascii_lowercase + ". -+", max_size=20))
def test_no_text_breaks_the_reading_of_durations(text: str) -> None:
    with suppress(InvalidInput):
        assert values.duration(text, "delay") >= timedelta(0)


def test_instants_need_a_time_zone() -> None:
    assert values.instant("2030-01-31T08:00:00Z", "start_time") == datetime(2030, 1, 31, 8, tzinfo=UTC)
    assert values.instant("2030-01-31T08:00:00+02:00", "start_time") == datetime(2030, 1, 31, 6, tzinfo=UTC)
    with pytest.raises(InvalidInput, match="no time zone"):
        values.instant("2030-01-31T08:00:00", "start_time")
    with pytest.raises(InvalidInput, match="no ISO 8601"):
        values.instant("tomorrow", "start_time")


def test_options_are_read_as_json_or_text() -> None:
    pairs = ["priority=5", "retry_scope=worker", "specific_worker_ids=a, b", "run_timeout=90s", "retry_backoff=1.5"]
    assert values.options_from_pairs(pairs) == {
        "priority": 5,
        "retry_scope": "worker",
        "specific_worker_ids": ["a", "b"],
        "run_timeout": timedelta(seconds=90),
        "retry_backoff": 1.5,
    }
    assert values.options_from_pairs(['specific_worker_ids=["x"]']) == {"specific_worker_ids": ["x"]}
    assert values.options_from_pairs(["specific_worker_ids="]) == {"specific_worker_ids": []}


def test_a_bare_number_is_seconds() -> None:
    assert values.option_value("run_timeout", "1500") == 1500
    assert values.option_from_flag("run_timeout", "1500") == timedelta(seconds=1500)


def test_none_lifts_a_limit() -> None:
    assert values.option_value("run_timeout", "none") is None
    assert values.option_from_flag("retain_fail", "null") is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("black friday", "black friday"),
        ("2024", "2024"),
        ("true", "true"),
        ("[1]", "[1]"),
        ('"quoted"', "quoted"),
        ("none", None),
        ('"none"', "none"),
    ],
)
@pytest.mark.parametrize("name", ["limit_key"])
def test_an_option_of_text_stays_text(name: str, text: str, expected: str | None) -> None:
    assert values.option_from_flag(name, text) == expected
    assert values.options_from_pairs([f"{name}={text}"]) == {name: expected}


@pytest.mark.parametrize("pair", ["priority", "=5", "", " = "])
def test_an_option_without_name_or_value_is_refused(pair: str) -> None:
    with pytest.raises(InvalidInput, match="NAME=VALUE"):
        values.options_from_pairs([pair])


def test_a_duration_option_that_is_none_names_the_option() -> None:
    with pytest.raises(InvalidOption, match="run_timeout"):
        values.option_value("run_timeout", "soon")


def test_params_are_extended_json() -> None:
    read = values.params_from('{"at": {"$date": "2020-01-01T00:00:00Z"}, "n": {"$numberLong": "5"}}', None)
    assert read == {"at": datetime(2020, 1, 1, tzinfo=UTC), "n": 5}
    assert values.params_from(None, None) is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"a": 1', "line 1, column"),
        ("", "no JSON"),
        ('{"$oid": "short"}', "extended JSON"),
        ('{"$date": "yesterday"}', "extended JSON"),
        ("[" * 100_000, "nested too deeply"),
    ],
)
def test_params_that_cannot_be_read_say_why(text: str, expected: str) -> None:
    with pytest.raises(InvalidInput, match=expected) as caught:
        values.params_from(text, None)
    assert caught.value.field == "params"


def test_params_come_from_one_place_only(tmp_path: Path) -> None:
    file = tmp_path / "params.json"
    file.write_text('{"a": 1}')
    assert values.params_from(None, str(file)) == {"a": 1}
    with pytest.raises(InvalidInput, match="not both"):
        values.params_from("{}", str(file))


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"missing\.json cannot be read"):
        values.params_from(None, str(tmp_path / "missing.json"))
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe")
    with pytest.raises(InvalidInput, match="not UTF-8"):
        values.params_from(None, str(binary))
