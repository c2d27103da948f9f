"""Converts params and returns into values that BSON can hold."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

#: The types whose values are stored unchanged. A value of a subclass may need conversion.
_STORED_AS_IT_IS = frozenset({type(None), bool, int, float, str, bytes})


def storable(value: Any) -> Any:
    """Return the value in a form for BSON: pydantic models, dataclasses, enums, tuples and sets are converted."""
    kind = type(value)
    if kind in _STORED_AS_IT_IS:
        return value
    if kind is dict:  # the commonest, without a look at what else it could be
        return {key: item if type(item) in _STORED_AS_IT_IS else storable(item) for key, item in value.items()}
    if isinstance(value, str | bytes | int | float) and not isinstance(value, enum.Enum):
        return value
    if isinstance(value, BaseModel):
        return storable(value.model_dump())
    if isinstance(value, enum.Enum):
        return value.value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: storable(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {key: storable(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [storable(item) for item in value]
    return value
