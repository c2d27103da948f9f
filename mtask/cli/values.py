"""Reads the values of a command line: durations, instants, options, params."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from mtask.errors import InvalidInput, InvalidOption, shown
from mtask.kernel.document.options import DURATIONS, OLD_NAMES
from mtask.kernel.driver.extended_json import parse_extended

_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86_400.0, "w": 604_800.0}
_NUMBER = r"\d+(?:\.\d+)?"
_PART = re.compile(rf"({_NUMBER})\s*(ms|min|[smhdw])\s*")
_WHOLE = re.compile(rf"(?:{_NUMBER}\s*(?:ms|min|[smhdw])\s*)+", re.ASCII)
_NONE = frozenset({"none", "null"})
#: The options whose value is always text, even if it looks like a number or a list in JSON.
_TEXTS = frozenset({"limit_key"})
STDIN = "-"


def flag_of(name: str) -> str:
    """Return the flag of an argument or option, such as --run-timeout for run_timeout."""
    return "--" + name.replace("_", "-")


def flag_of_argument(argument: str) -> str:
    """Return how the command line says what an argument of `client.publish` says, such as if_exists="reject"."""
    name, _, value = argument.partition("=")
    if name == "if_running":
        return "--again"
    text = value.strip('"')
    return f"{flag_of(name)} {text}" if text else flag_of(name)


def duration(text: str, field: str, *, is_flag: bool = True) -> timedelta:
    """Read a duration, such as 90s, 5m, 1h30m, 250ms, or a number of seconds; raise InvalidInput.

    `is_flag`: the field was given as a flag. So the message names the flag.
    """
    stripped = text.strip().lower()
    fault = "is no duration"
    try:
        if re.fullmatch(_NUMBER, stripped, re.ASCII):
            return timedelta(seconds=float(stripped))
        if _WHOLE.fullmatch(stripped):
            return timedelta(seconds=sum(float(number) * _UNITS[unit] for number, unit in _PART.findall(stripped)))
    except OverflowError:
        fault = "is too long"
    if stripped.startswith("-"):
        fault = "is negative"
    name = flag_of(field) if is_flag else field
    message = f"{name} {shown(text)} {fault}: write 90s, 5m, 1h30m, 250ms or a number of seconds."
    raise InvalidInput(message, field=field)


def instant(text: str, field: str, *, is_flag: bool = True) -> datetime:
    """Read an instant in ISO 8601 with a time zone; raise InvalidInput."""
    name = flag_of(field) if is_flag else field
    try:
        read = datetime.fromisoformat(text.strip())
    except ValueError:
        raise InvalidInput(
            f"{name} {shown(text)} is no ISO 8601 instant: write 2030-12-31T23:59:00Z.", field=field
        ) from None
    if read.tzinfo is None:
        raise InvalidInput(
            f"{name} {shown(text)} has no time zone: add Z for UTC, or an offset such as +02:00.", field=field
        )
    return read


def expiry(text: str, field: str, *, is_flag: bool = True) -> datetime | timedelta:
    """Read a duration from now, or an instant; raise InvalidInput."""
    is_instant = "-" in text.strip()[1:]
    return instant(text, field, is_flag=is_flag) if is_instant else duration(text, field, is_flag=is_flag)


def options_from_pairs(pairs: Sequence[str]) -> dict[str, Any]:
    """Read options in the form NAME=VALUE, where VALUE is JSON or bare text; raise InvalidInput."""
    options = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        name = name.strip()
        if not equals or not name:
            raise InvalidInput(f"--option {pair!r}: write NAME=VALUE, such as priority=5.", field="option")
        options[name] = option_value(name, text)
    return options


def option_value(name: str, text: str) -> Any:
    """Read one option's value. A duration without a unit is in seconds; by its old name, it is in milliseconds."""
    if text.strip().lower() in _NONE:
        return None
    try:
        value = json.loads(text)
    except ValueError:
        value = text.strip()
    except RecursionError:
        raise InvalidOption(name, "its value is nested too deeply") from None
    if not isinstance(value, str):
        return text.strip() if name in _TEXTS else value
    if _is_duration(name):
        return _duration_option(name, value)
    if name == "specific_worker_ids":
        return [part.strip() for part in value.split(",") if part.strip()]
    return value


def option_from_flag(name: str, text: str) -> Any:
    """Read the value of an option's own flag. A duration without a unit is in seconds, as in every flag."""
    if _is_duration(name) and text.strip().lower() not in _NONE:
        return _duration_option(name, text)
    return option_value(name, text)


def _is_duration(name: str) -> bool:
    return name in DURATIONS or (name in OLD_NAMES and name.endswith("_ms"))


def _duration_option(name: str, text: str) -> timedelta:
    try:
        return duration(text, name)
    except InvalidInput:
        raise InvalidOption(name, f"{text!r} is no duration: write 90s, 5m, 1h30m or 250ms", text) from None


def lookup_from_pairs(pairs: Sequence[str]) -> dict[str, list[Any]] | None:
    """Read lookups in the form NAME=VALUE, where VALUE is JSON or bare text; raise InvalidInput. None: there are none.

    A name may come several times, or its value may be a JSON list: then it has several values.
    """
    lookup: dict[str, list[Any]] = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not equals or not name.strip():
            raise InvalidInput(f"--lookup {pair!r}: write NAME=VALUE, such as user_id=7.", field="lookup")
        value = _json_or_text(text)
        lookup.setdefault(name.strip(), []).extend(value if isinstance(value, list) else [value])
    return lookup or None


def separated(texts: list[str]) -> list[str]:
    """Return the values of a flag that was given several times, or with commas between the values."""
    return [part.strip() for text in texts for part in text.split(",") if part.strip()]


def _json_or_text(text: str) -> Any:
    try:
        json.loads(text)
    except RecursionError:
        raise InvalidInput("lookup: a value is nested too deeply.", field="lookup") from None
    except ValueError:
        return text.strip()
    return parse_extended(text, "lookup")


def read_text(path: str, field: str) -> str:
    """Return the text of a file. For '-', return the text of standard input. Raises InvalidInput."""
    try:
        if path == STDIN:
            return sys.stdin.buffer.read().decode("utf-8")
        return Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InvalidInput(
            f"{field}: {path} is not UTF-8 text: {error.reason} at byte {error.start}.", field=field
        ) from None
    except (OSError, ValueError) as error:  # a ValueError means that no file can have this name
        reason = getattr(error, "strerror", None) or str(error)
        raise InvalidInput(f"{field}: {path} cannot be read: {reason}.", field=field) from None


def params_from(text: str | None, path: str | None) -> Any:
    """Parse the params: extended JSON on the command line or in a file. Return None if there are none."""
    if text is not None and path is not None:
        raise InvalidInput("give the params as an argument or by --params-file, not both.", field="params")
    if path is not None:
        return parse_extended(read_text(path, "params-file"), "params")
    return None if text is None else parse_extended(text, "params")
