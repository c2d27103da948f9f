"""Converts BSON values to MongoDB's relaxed extended JSON, and back."""

from __future__ import annotations

import json
from datetime import UTC
from typing import Any

from bson.binary import UuidRepresentation
from bson.codec_options import DatetimeConversion
from bson.json_util import JSONMode, JSONOptions, dumps, loads

from mtask.errors import InvalidInput
from mtask.store.driver.translate import first_line

_OPTIONS: JSONOptions = JSONOptions(
    json_mode=JSONMode.RELAXED,
    tz_aware=True,
    tzinfo=UTC,
    uuid_representation=UuidRepresentation.STANDARD,
    datetime_conversion=DatetimeConversion.DATETIME_AUTO,
)


def parse_extended(text: str, field: str) -> Any:
    """Return the value that the text describes; raise InvalidInput with the position of the mistake."""
    try:
        json.loads(text)  # Python's parser comes first: its errors name line and column
        return loads(text, json_options=_OPTIONS)
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise InvalidInput(f"{field}: this is no JSON: {error.msg} at {where}.", field=field) from None
    except RecursionError:
        raise InvalidInput(f"{field}: it is nested too deeply.", field=field) from None
    except Exception as error:
        raise InvalidInput(f"{field}: no MongoDB extended JSON: {first_line(error)}.", field=field) from None


def extended(value: Any) -> Any:
    """Return the value in JSON types. Types that only BSON has become extended JSON."""
    return json.loads(dumps(value, json_options=_OPTIONS))
