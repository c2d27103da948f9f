"""Lines of the log: as JSON, one line each whatever the text, with the run of the handler, and without passwords."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mtask.errors import InvalidInput
from mtask.features.logs.worker import line_of
from mtask.kernel.worker.process.log import FieldFormatter, JsonFormatter, formatter
from mtask.logs import RUN, RunMarks, fields, first_of, last_of, without_passwords


def record(message: Any, *arguments: Any, **more: Any) -> logging.LogRecord:
    made = logging.LogRecord("shop", logging.WARNING, __file__, 1, message, arguments, more.pop("exc_info", None))
    made.__dict__.update(more)
    return made


@pytest.fixture
def run() -> Iterator[RunMarks]:
    marks = RunMarks("mail", "k 1", "r1", 2)
    token = RUN.set(marks)
    yield marks
    RUN.reset(token)


def test_line_of_a_handler_tells_its_run_in_both_formats(run: RunMarks) -> None:
    assert FieldFormatter().format(record("sent")).endswith("WARNING sent task=mail key='k 1' run_id=r1 attempt=2")
    run.trace_id = "0af7651916cd43dd8448eb211c80319c"
    told = json.loads(JsonFormatter().format(record("sent %d", 3)))
    assert told.pop("time").endswith("Z")
    assert told == {
        "level": "WARNING", "logger": "shop", "message": "sent 3",
        "task": "mail", "key": "k 1", "run_id": "r1", "attempt": 2, "trace_id": run.trace_id,
    }  # fmt: skip
    own = record("lease lost", **fields(task="mail:k 1", run="r1", late=0.25, none=None))
    assert FieldFormatter().format(own).endswith("lease lost task='mail:k 1' run=r1 late=0.250")
    assert json.loads(JsonFormatter().format(own))["fields"] == {"task": "mail:k 1", "run": "r1", "late": 0.25}


def test_line_outside_of_a_run_tells_none() -> None:
    assert set(json.loads(JsonFormatter().format(record("x")))) == {"time", "level", "logger", "message"}


@given(st.text(), st.text(), st.one_of(st.floats(), st.text(), st.integers(), st.binary()))
def test_any_text_is_one_line_of_sound_json(message: str, key: str, value: Any) -> None:
    token = RUN.set(RunMarks("mail", key, "r1", 1))
    try:
        line = JsonFormatter().format(record("%s", message, **fields(value=value)))
    finally:
        RUN.reset(token)
    assert line.isascii()
    assert line.isprintable()
    told = json.loads(line, parse_constant=lambda name: pytest.fail(name))
    told["message"].encode()
    if "://" not in message and "Bearer" not in message:
        assert told["message"] == message.encode("utf-8", "replace").decode()


def test_hostile_text_steers_no_terminal_and_wrong_arguments_lose_no_line() -> None:
    text = FieldFormatter().format(record("a\x1b[2Jb\u202ec\nd\x9b"))
    assert text.endswith("a\\x1b[2Jb\\u202ec\n    d\\x9b")
    assert json.loads(JsonFormatter().format(record("%d", "no number")))["message"].startswith("'%d' (its arguments")


def test_exception_is_in_the_line_and_passwords_are_in_none() -> None:
    uri = "mongodb://user:se/cr@et@host:1/?x=1"
    try:
        raise ValueError(f"cannot reach {uri}")
    except ValueError:
        failed = record("at %s with Bearer abc.def", uri, exc_info=sys.exc_info(), **fields(uri=uri))
    for line in (JsonFormatter().format(failed), FieldFormatter().format(failed)):
        assert "ValueError: cannot reach mongodb://***@host:1/?x=1" in line
        assert "cr@et" not in line
        assert "abc.def" not in line
    assert "\n" not in JsonFormatter().format(failed)


@pytest.mark.parametrize("made", [FieldFormatter(), JsonFormatter()], ids=["text", "json"])
def test_long_text_is_cut_wherever_it_stands(made: logging.Formatter) -> None:
    long = "x\ny" * 1_000_000
    for one in (record(long), record("short", **fields(reason=long)), record("failed", exc_info=raised(long))):
        assert len(made.format(one)) < 400_000
        assert len(str(line_of(one))) < 40_000


def test_traceback_keeps_its_frames_and_the_beginning_of_each_text() -> None:
    error = RuntimeError("first\n" + "x\n" * 1_000_000)
    error.add_note("a note " + "y" * 1_000_000)
    error.__cause__ = ExceptionGroup("several", [ValueError("inner\n" + "z\n" * 1_000_000)])
    line = FieldFormatter().format(record("failed", exc_info=(type(error), error, None)))
    assert all(part in line for part in ("RuntimeError: first", "a note y", "several", "ValueError: inner"))
    assert len(line) < 100_000


def raised(text: str) -> Any:
    try:
        raise ValueError(text)
    except ValueError:
        return sys.exc_info()


@pytest.mark.parametrize("told", ["mongodb://u:5Q7W@h/", "redis://u:5Q7W@h", "Bearer 5Q7W"])
def test_cut_amid_a_password_shows_no_part_of_it(told: str) -> None:
    text = f"{'x' * 20} {told} {'y' * 20}"
    for most in range(len(text)):
        for shown in (first_of(text, most), last_of(text, most)):
            assert len(shown) <= max(most, len("***"))
            assert not {*"5Q7W"} & {*shown}, shown


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("redis://:pw@h/0", "redis://***@h/0"),
        ("https://h:80/a?mail=x@y.z", "https://h:80/a?mail=x@y.z"),
        ("https://u:p@h/a and a@b.c", "https://***@h/a and a@b.c"),
        ('plain a@b.c: {"to": "x@y.z"}', 'plain a@b.c: {"to": "x@y.z"}'),
    ],
)
def test_only_passwords_are_hidden(text: str, shown: str) -> None:
    assert without_passwords(text) == shown


def test_unknown_format_is_refused() -> None:
    with pytest.raises(InvalidInput, match="--log-format 'xml': use text or json"):
        formatter("xml")
