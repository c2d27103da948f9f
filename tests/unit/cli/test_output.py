"""What commands print."""

from __future__ import annotations

import io
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path

import pytest
from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from mtask.cli.output import (
    Column,
    as_json_types,
    clean,
    compact,
    console,
    fit,
    hanging,
    iso,
    lasting,
    listing,
    relative,
    without_middle,
)

NOW = datetime(2030, 1, 1, tzinfo=UTC)


@pytest.mark.parametrize(
    ("length", "expected"),
    [
        (timedelta(milliseconds=12), "12ms"),
        (timedelta(milliseconds=999, microseconds=900), "1.0s"),
        (timedelta(seconds=3.44), "3.4s"),
        (timedelta(seconds=59.97), "1m 00s"),
        (timedelta(seconds=125), "2m 05s"),
        (timedelta(hours=3, minutes=20), "3h 20m"),
        (timedelta(days=4, hours=3), "4d 3h"),
        (timedelta(seconds=-5), "5.0s"),
    ],
)
def test_lengths_of_time_are_short(length: timedelta, expected: str) -> None:
    assert lasting(length) == expected


def test_instants_are_seen_from_now() -> None:
    assert relative(NOW + timedelta(minutes=5), NOW) == "in 5m 00s"
    assert relative(NOW - timedelta(seconds=2), NOW) == "2.0s ago"


def test_instants_are_utc_to_the_millisecond_in_json() -> None:
    east = NOW.astimezone(timezone(timedelta(hours=9)))
    assert iso(east) == "2030-01-01T00:00:00.000Z"
    assert as_json_types({"a": [east, timedelta(seconds=2), None, True]}) == {
        "a": ["2030-01-01T00:00:00.000Z", 2.0, None, True]
    }


def test_text_from_a_document_cannot_steer_the_terminal() -> None:
    assert clean("a\x1b[31mred\nb\x07") == r"a\x1b[31mred\nb\x07"
    assert clean("abcdef", 4) == "abc…"
    assert clean("日本語です", 6) == "日本 …"
    assert clean("日本語", 6) == "日本語"
    assert "\x1b" not in compact({"k": "\x1b[2J"})


def test_a_listing_fits_its_width_where_it_can() -> None:
    columns = (Column("STATUS"), Column("TASK", gives_way=True), Column("N", right=True))
    rows: list[list[str | Text]] = [["INIT", "x" * 100, "1"], ["SUCCESS", "日本語" * 20, "23"]]
    lines = listing(columns, rows, 40)
    assert all(line.cell_len <= 40 for line in lines)
    assert lines[1].plain.endswith(" 1")
    assert lines[2].plain.startswith("SUCCESS  日本語")
    assert listing(columns, rows, 4000)[1].plain.count("x") == 100


def test_texts_that_begin_alike_are_told_apart_by_their_ends() -> None:
    rows = [[f"{'x' * 50}{number}"] for number in (1, 2)] + [["日本" * 20 + "語"]]
    lines = [line.plain for line in listing([Column("A", gives_way=True, keeps_end=True)], rows, 20)]
    assert lines[1:3] == [f"{'x' * 13}…{'x' * 5}{number}" for number in (1, 2)]
    assert lines[3].endswith("…日本語")
    assert without_middle(Text("short"), 5).plain == "short"
    assert [without_middle(Text("x" * 9), width).cell_len for width in (1, 2, 3, 8)] == [1, 2, 3, 8]


_COLUMNS = (
    Column("STATUS"),
    Column("TASK", is_id=True),
    Column("QUEUE", leaves=2),
    Column("NEXT", leaves=1),
    Column("REASON", wraps=True),
)
_REASON = "ValueError: the receiver did not answer in time, and the order is still open END"
_ROWS = [["INIT", "send:1", "default", "due 5s", ""], ["FAIL", "send:日本-2", "default", "", _REASON]]


def test_a_reason_goes_below_its_row_where_it_does_not_fit() -> None:
    lines = [line.plain for line in listing(_COLUMNS, _ROWS, 60)]
    assert lines[:3] == [
        "STATUS  TASK         QUEUE    NEXT",
        "INIT    send:1       default  due 5s",
        "FAIL    send:日本-2  default",
    ]
    assert " ".join(line.strip() for line in lines[3:]) == _REASON
    assert all(cell_len(line) <= 60 for line in lines)
    assert listing(_COLUMNS, _ROWS, 200)[2].plain.endswith(f"default          {_REASON}")


def test_columns_that_matter_less_are_left_out_before_an_id_is_touched() -> None:
    lines = [line.plain for line in listing(_COLUMNS, _ROWS[:1], 24)]
    assert lines == ["STATUS  TASK    NEXT", "INIT    send:1  due 5s"]
    assert [line.plain for line in listing(_COLUMNS, _ROWS[:1], 16)] == ["STATUS  TASK", "INIT    send:1"]


def test_an_id_that_is_wider_than_its_terminal_stands_whole_on_a_line_of_its_own() -> None:
    task_id = f"send:{'x' * 70}/END"
    rows = [["FAIL", task_id, "default", "", _REASON]]
    lines = [line.plain for line in listing(_COLUMNS, rows, 40)]
    assert lines[:3] == ["STATUS  QUEUE    NEXT", "FAIL    default", f"  task  {task_id}"]
    assert lines[3].startswith("  reason  ValueError")


def test_what_a_command_prints_cannot_steer_the_terminal(tmp_path: Path) -> None:
    with (tmp_path / "out").open("w+") as stream:
        screen = console(stream, no_color=True)
        for line in ("a\x1b[2J\nb", Text.assemble("c", ("d\x1b[31m", "red"), "\u202e日本")):
            screen.print(line, soft_wrap=True)
        stream.seek(0)
        assert stream.read() == "a\\x1b[2J\\nb\ncd\\x1b[31m\\u202e日本\n"


def test_a_listing_too_wide_in_any_case_is_cut() -> None:
    columns = (Column("A"), Column("B"))
    assert all(line.cell_len <= 10 for line in listing(columns, [["1234567", "12345678"]], 10))


def test_wide_letters_are_padded_by_their_cells() -> None:
    assert fit(Text("日本"), 6).cell_len == 6
    assert fit(Text("日本"), 3).cell_len == 3


def test_a_long_text_wraps_beside_its_label() -> None:
    screen = Console(file=io.StringIO(), width=30)
    lines = hanging(screen.width, Text("label  "), "one two three four five six seven eight")
    assert lines[0].plain.startswith("label  one")
    assert all(line.plain.startswith("       ") for line in lines[1:])
    assert all(cell_len(line.plain) <= 30 for line in lines)
