"""The worker's log lines: fields that can be told apart, on one line, and nothing that steers a terminal."""

from __future__ import annotations

import logging
import sys
from typing import Any

import pytest

from mtask.kernel.worker.process.log import FieldFormatter, fields


def line(**values: Any) -> str:
    """Format a record with these fields, without its time."""
    record = logging.LogRecord("mtask.worker", logging.INFO, __file__, 1, "run ended", None, None)
    record.__dict__.update(fields(**values))
    return FieldFormatter().format(record).partition("INFO")[2].strip()


@pytest.mark.parametrize(
    ("value", "printed"),
    [
        ("mail:1", "mail:1"),
        ("a b", "'a b'"),
        ("", "''"),
        ("two\nlines", r"'two\nlines'"),
        ("\x1b[2Jgone", r"'\x1b[2Jgone'"),
        ("\u202egnp.exe", r"'\u202egnp.exe'"),
        (0.12345, "0.123"),
        (7, "7"),
    ],
)
def test_field_is_told_on_one_line_and_steers_no_terminal(value: Any, printed: str) -> None:
    assert line(task=value, reason=None) == f"run ended task={printed}"


def test_no_text_can_begin_a_line_of_the_log() -> None:
    forged = "2030-01-01 00:00:00.000 INFO    worker stopped"
    try:
        raise ValueError(f"no\n{forged}\r\u2028{forged}")
    except ValueError:
        record = logging.LogRecord("shop", logging.ERROR, __file__, 1, "failed\n%s", (forged,), sys.exc_info())
    first, *others = FieldFormatter().format(record).split("\n")
    assert first.endswith("failed")
    assert others[0] == f"    {forged}"
    assert all(other.startswith("    ") and other.isprintable() for other in others)
    assert any(forged in other for other in others[1:])
