"""Logging: each record has a constant message. The values that vary are in its fields."""

from __future__ import annotations

import logging
from typing import Any

from mtask.logs import FIELDS, fields

__all__ = ["FieldFormatter", "fields", "logger"]

logger = logging.getLogger("mtask.worker")


class FieldFormatter(logging.Formatter):
    """Formats a record as time, level, message and key=value fields."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s.%(msecs)03d %(levelname)-7s %(message)s", "%Y-%m-%d %H:%M:%S")

    def format(self, record: logging.LogRecord) -> str:
        """Return the text of a record. The fields stand after the message and before a traceback."""
        values = getattr(record, FIELDS, None)
        if not values:
            return super().format(record)
        shown = " ".join(f"{name}={_shown(value)}" for name, value in values.items() if value is not None)
        copy = logging.makeLogRecord(record.__dict__)
        copy.msg, copy.args = f"{record.getMessage()} {shown}", ()
        return super().format(copy)


def _shown(value: Any) -> str:
    text = f"{value:.3f}" if isinstance(value, float) else str(value)
    # Any client may choose a task's key. Unprintable characters in the key could control the terminal that shows it.
    is_simple = text.isprintable() and not any(letter in text for letter in " \"'=")
    return text if text and is_simple else repr(text)
