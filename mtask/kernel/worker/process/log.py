"""Logging: each record has a constant message. The values that vary are in its fields.

The lines of a handler also tell its run. A line is text, or a JSON object.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Literal

from mtask.errors import InvalidInput, shown
from mtask.logs import FIELDS, RUN, SureLogger, fields, first_of, last_of, told, traceback_of, without_passwords

__all__ = ["FieldFormatter", "JsonFormatter", "LogFormat", "fields", "logger", "start_logging", "told"]

LogFormat = Literal["text", "json"]
logger = SureLogger("mtask.worker")

#: A log that is sent over the network takes lines of a limited length. A longer text is cut, in characters, before
#: anything looks at each of its letters: that would hold up the event loop.
_MAX_MESSAGE, _MAX_EXCEPTION = 64 * 1024, 64 * 1024
#: The letters that may stand in a text line although they are not printable.
_LAYOUT = "\n\t"
_FURTHER = "\n    "


class FieldFormatter(logging.Formatter):
    """Formats a record as time, level, message and key=value fields, and those of the run."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s.%(msecs)03d %(levelname)-7s %(message)s", "%Y-%m-%d %H:%M:%S")

    def format(self, record: logging.LogRecord) -> str:
        """Return the text of a record. The fields stand after the message and before a traceback."""
        values = fields_of(record)
        marks = {} if "task" in values else marks_of_run()  # a line of the worker that tells the task itself
        told = [*values.items(), *marks.items()]
        shown = " ".join(f"{name}={_shown(value)}" for name, value in told if value is not None)
        copy = logging.makeLogRecord(record.__dict__)
        copy.exc_text = exception_of(record)
        message = first_of(message_of(record), _MAX_MESSAGE)
        copy.msg, copy.args = f"{message} {shown}" if shown else message, ()
        text = without_passwords(super().format(copy))
        if text.isprintable():
            return text
        # The further lines of a message and a traceback are indented: no text can look like a record of its own.
        return "".join(map(_visible, text)).replace("\n", _FURTHER)


class JsonFormatter(logging.Formatter):
    """Formats a record as a JSON object on one line."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line of a record."""
        values = fields_of(record)
        line: dict[str, Any] = {
            "time": instant_of(record).isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname,
            "logger": record.name,
            "message": first_of(message_of(record), _MAX_MESSAGE),
            **marks_of_run(),
        }
        if values:
            line["fields"] = {name: _as_json(value) for name, value in values.items() if value is not None}
        exception = exception_of(record)
        if exception is not None:
            line["exception"] = exception
        # ASCII only: so no letter of a hostile text begins a new line, or controls a terminal.
        return json.dumps(_sound(line), ensure_ascii=True)


def start_logging(level: str, log_format: str) -> None:
    """Let this process log to stderr; raise InvalidInput."""
    number = logging.getLevelNamesMapping().get(level.upper())
    if number is None:
        raise InvalidInput(f"--log-level {level!r}: use DEBUG, INFO, WARNING or ERROR.", field="log_level")
    log_to_stderr(max(number, logging.INFO), number, log_format)


def log_to_stderr(level: int, own_level: int, log_format: str) -> None:
    """Let this process log to stderr, mtask's own loggers from `own_level` on; raise InvalidInput."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter(log_format))
    logging.basicConfig(level=level, handlers=[handler], force=True)
    logging.getLogger("mtask").setLevel(own_level)


def formatter(log_format: str) -> logging.Formatter:
    """Return the formatter of this format; raise InvalidInput."""
    if log_format == "json":
        return JsonFormatter()
    if log_format == "text":
        return FieldFormatter()
    raise InvalidInput(f"--log-format {shown(log_format)}: use text or json.", field="log_format")


def fields_of(record: logging.LogRecord) -> Mapping[str, Any]:
    """Return the fields of a record, without those of its run."""
    values: Mapping[str, Any] = getattr(record, FIELDS, None) or {}
    return values


def marks_of_run() -> dict[str, Any]:
    """Return what a line tells of the run in whose handler it was written.

    A formatter runs where the line was written, so the run of this asyncio task or thread is the line's.
    """
    run = RUN.get()
    if run is None:
        return {}
    marks = {"task": run.task, "key": run.key, "run_id": run.run_id, "attempt": run.attempt}
    return marks if run.trace_id is None else {**marks, "trace_id": run.trace_id}


def message_of(record: logging.LogRecord) -> str:
    """Return the message of a record, also of one whose arguments do not fit."""
    try:
        return record.getMessage()
    except Exception as error:
        return f"{record.msg!r} (its arguments cannot be shown: {type(error).__name__})"


def exception_of(record: logging.LogRecord) -> str | None:
    """Return the traceback of a record."""
    if not record.exc_info or record.exc_info[1] is None:
        return None
    text = traceback_of(record.exc_info[1])
    # The end of a traceback tells the most.
    return f"{'...' if len(text) > _MAX_EXCEPTION else ''}{last_of(text, _MAX_EXCEPTION)}"


def instant_of(record: logging.LogRecord) -> datetime:
    """Return the time of a record, in UTC."""
    return datetime.fromtimestamp(record.created, UTC)


def _shown(value: Any) -> str:
    text = f"{value:.3f}" if isinstance(value, float) else first_of(str(value), _MAX_MESSAGE)
    # Any client may choose a task's key. Unprintable characters in the key could control the terminal that shows it.
    is_simple = text.isprintable() and not any(letter in text for letter in " \"'=")
    return text if text and is_simple else repr(text)


def _visible(letter: str) -> str:
    return letter if letter.isprintable() or letter in _LAYOUT else letter.encode("unicode_escape").decode()


def _as_json(value: Any) -> Any:
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        return value if value - value == 0 else str(value)  # JSON has no NaN and no infinity
    return first_of(str(value), _MAX_MESSAGE)


def _sound(value: Any) -> Any:
    """Return the value with text that any reader of JSON takes: a lone surrogate becomes a question mark."""
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, dict):
        return {_sound(str(name)): _sound(each) for name, each in value.items()}
    return value
