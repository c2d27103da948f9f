"""Converts BSON values to MongoDB's relaxed extended JSON, and back."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC
from math import isinf
from typing import Any

from bson.binary import UuidRepresentation
from bson.codec_options import DatetimeConversion
from bson.json_util import JSONMode, JSONOptions, dumps, loads, object_hook

from mtask.errors import InvalidInput, shown
from mtask.kernel.driver.errors import first_line

_OPTIONS: JSONOptions = JSONOptions(
    json_mode=JSONMode.RELAXED,
    tz_aware=True,
    tzinfo=UTC,
    uuid_representation=UuidRepresentation.STANDARD,
    datetime_conversion=DatetimeConversion.DATETIME_AUTO,
)


@contextmanager
def _refusing(field: str, too_deep: str) -> Iterator[None]:
    """Raise InvalidInput for each error of the block, with the position of the mistake. `too_deep`: of the nesting."""
    try:
        yield
    except InvalidInput as error:
        raise InvalidInput(f"{field}: {error}", field=field) from None
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise InvalidInput(f"{field}: this is no JSON: {error.msg} at {where}.", field=field) from None
    except RecursionError:
        raise InvalidInput(f"{field}: {too_deep}.", field=field) from None
    except Exception as error:
        raise InvalidInput(f"{field}: no MongoDB extended JSON: {first_line(error)}.", field=field) from None


def parse_extended(text: str, field: str) -> Any:
    """Return the value that the text describes; raise InvalidInput with the position of the mistake."""
    with _refusing(field, "it is nested too deeply"):
        json.loads(text, parse_float=_float)  # Python's parser comes first: its errors name line and column
        return loads(text, json_options=_OPTIONS)


def extended(value: Any) -> Any:
    """Return the value in JSON types. Types that only BSON has become extended JSON."""
    return json.loads(dumps(value, json_options=_OPTIONS))


#: The integers that BSON holds, the integers that a double holds exactly, and the deepest nesting of strict JSON.
_LEAST, _MOST, _EXACT, _MAX_LEVELS = -(2**63), 2**63 - 1, 2**53, 100
#: The subtype of encrypted binary values.
_ENCRYPTED = 6


def parse_strict(text: str, field: str) -> Any:
    """Return the value that the text describes; raise InvalidInput. This reads what strangers send.

    It refuses what parsers understand in different ways: members that occur twice, NaN and Infinity, integers of more
    than 64 bits, and more than 100 levels. It also refuses encrypted binary values.
    """
    with _refusing(field, f"it has more than {_MAX_LEVELS} levels"):
        parsed = json.loads(
            text,
            object_pairs_hook=_members,
            parse_constant=_no_constant,
            parse_int=_integer,
            parse_float=_float,
        )
        if text.count("[") + text.count("{") > _MAX_LEVELS:
            _check_levels(parsed, _MAX_LEVELS)
        return parsed


def _members(pairs: list[tuple[str, Any]]) -> Any:
    made = dict(pairs)
    if len(made) < len(pairs):
        raise InvalidInput("an object has two members with the same name.")
    if not any(name.startswith("$") for name in made):
        return made
    if "$oid" in made and not isinstance(made["$oid"], str):
        raise InvalidInput("an $oid is no text of 24 hex digits.")  # bson makes a fresh id of null
    date = made.get("$date")
    if isinstance(date, bool) or (isinstance(date, float) and not date.is_integer()):
        raise InvalidInput("a $date is no instant.")  # bson takes false for the year 1970, and cuts fractions off
    value = object_hook(made, _OPTIONS)
    if isinstance(value, int) and not _LEAST <= value <= _MOST:
        raise InvalidInput("an integer has more than 64 bits.")
    if type(value) is float and isinf(value) and made.get("$numberDouble") not in ("Infinity", "-Infinity"):
        raise InvalidInput(f"the number {shown(made.get('$numberDouble'), 40)} is too large for a double.")
    if getattr(value, "subtype", None) == _ENCRYPTED:
        raise InvalidInput("a binary value has the subtype of encrypted values, 6.")
    return value


def _no_constant(name: str) -> Any:
    raise InvalidInput(f"{name} is no JSON. Write {{'$numberDouble': '{name}'}}.")


def _integer(digits: str) -> int:
    value = int(digits) if len(digits) <= 20 else _MOST + 1
    if not _LEAST <= value <= _MOST:
        raise InvalidInput("an integer has more than 64 bits.")
    return value


def _float(digits: str) -> float:
    value = float(digits)
    if isinf(value):
        raise InvalidInput(f"the number {shown(digits, 40)} is too large: a double has no value for it.")
    return value


def _check_levels(value: Any, left: int) -> None:
    if isinstance(value, dict | list):
        if not left:
            raise InvalidInput(f"it has more than {_MAX_LEVELS} levels.")
        for item in value.values() if isinstance(value, dict) else value:
            _check_levels(item, left - 1)


def extended_exactly(value: Any) -> Any:
    """Return the value in JSON types, like `extended`. Integers that a double cannot hold become `$numberLong`."""
    # Most values need no conversion, which costs 15 µs each.
    kind = type(value)
    if value is None or kind is str or kind is bool or (kind is int and abs(value) <= _EXACT):
        return value
    if kind is dict and all(type(name) is str for name in value):
        return {name: extended_exactly(item) for name, item in value.items()}
    if kind is list:
        return [extended_exactly(item) for item in value]
    return _without_large(extended(value))


def _without_large(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_large(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_without_large(item) for item in value]
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) > _EXACT:
        return {"$numberLong": str(value)}
    return value
