"""Lookups: values under names, stored with a task, by which the task is found again through an index.

A task's document holds its lookups as a list of pairs of a name `k` and a value `v`. A list of values becomes one pair
for each value. So one index serves all names.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Annotated, Any, TypeAlias
from uuid import UUID

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, Strict

from mtask.errors import InvalidLookup
from mtask.kernel.document.identity import is_text
from mtask.kernel.document.parts import SealedAny
from mtask.kernel.document.values import storable

LOOKUP_NAME_PATTERN = r"^[A-Za-z0-9_.-]{1,64}$"
#: The most pairs of name and value that a task may have. Each pair is an entry of the index.
MAX_LOOKUPS = 32
#: The longest text that may be a value, in characters.
MAX_LOOKUP_TEXT = 512
_WHOLE_NUMBERS = range(-(2**63), 2**63)
_NAME = re.compile(LOOKUP_NAME_PATTERN.removesuffix("$") + r"\Z")

#: What `publish` and `find` take: values by name. Each value is a scalar, or a list of scalars.
Lookup: TypeAlias = Mapping[str, Any]
#: Whether the database can hold a value of a type of its own, such as an ObjectId, as a lookup.
IsScalar: TypeAlias = Callable[[Any], bool]


def _scalar(value: Any) -> Any:
    if value is None or isinstance(value, Mapping | list | tuple):
        raise ValueError("use a scalar: text, a number, true or false, an instant or an id")
    if isinstance(value, str) and len(value) > MAX_LOOKUP_TEXT:
        raise ValueError(f"use at most {MAX_LOOKUP_TEXT} characters")
    return value


class LookupEntry(BaseModel):
    """One pair of a lookup's name and value, as a task's document holds it."""

    model_config = ConfigDict(defer_build=True, extra="ignore")

    k: Annotated[str, Field(pattern=LOOKUP_NAME_PATTERN), Strict()]
    v: Annotated[SealedAny, AfterValidator(_scalar)]


def check_lookup_name(name: object) -> str:
    """Return the name of a lookup; raise InvalidLookup."""
    if not isinstance(name, str) or not _NAME.match(name):
        raise InvalidLookup(name, "is no name: use 1 to 64 letters, digits, '_', '.' or '-'")
    return str(name)


def values_by_name(lookup: object, is_scalar: IsScalar) -> dict[str, list[Any]]:
    """Check lookups and return the values of each name, without duplicates; raise InvalidLookup."""
    if not isinstance(lookup, Mapping):
        raise InvalidLookup(None, f"give a mapping of names to values, not {type(lookup).__name__}")
    found: dict[str, list[Any]] = {}
    for name, value in lookup.items():
        checked = check_lookup_name(name)
        try:
            made = storable(value)
        except RecursionError:
            raise InvalidLookup(checked, "holds itself") from None
        several = made if isinstance(made, list | tuple) else [made]
        found[checked] = _without_duplicates([_checked(checked, one, is_scalar) for one in several])
    count = sum(map(len, found.values()))
    if count > MAX_LOOKUPS:
        raise InvalidLookup(
            None, f"these are {count} values, and a task has at most {MAX_LOOKUPS}: leave out what nobody looks for"
        )
    return found


def entries_of(values: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]] | None:
    """Return the lookups in their stored form; None if there are none."""
    return [{"k": name, "v": value} for name, several in values.items() for value in several] or None


def taken_from(params: Any, names: Iterable[str], sole_parameter: str | None) -> dict[str, Any]:
    """Return the lookups that a handler takes from these params. A param that is missing or None is left out."""
    given = params if isinstance(params, Mapping) else {sole_parameter: params}
    return {name: given[name] for name in names if given.get(name) is not None}


def _checked(name: str, value: Any, is_scalar: IsScalar) -> Any:
    if value is None:
        raise InvalidLookup(name, "has no value: leave the name out")
    if isinstance(value, bool | UUID):
        return value
    if isinstance(value, int):
        if value not in _WHOLE_NUMBERS:
            raise InvalidLookup(name, "is a whole number beyond 64 bits: give it as text")
        return value
    if isinstance(value, float):
        if not math.isfinite(value):
            raise InvalidLookup(name, f"is {value}, which equals nothing: leave the name out")
        return value
    if isinstance(value, datetime):
        if value.utcoffset() is None:
            raise InvalidLookup(name, "has no time zone: give an aware datetime, such as datetime.now(UTC)")
        return value
    if type(value) is str or (isinstance(value, str) and is_scalar(value)):
        if not is_text(value):
            raise InvalidLookup(name, "holds a lone surrogate, which is not text")
        if len(value) > MAX_LOOKUP_TEXT:
            raise InvalidLookup(name, f"has {len(value)} characters, and {MAX_LOOKUP_TEXT} fit: hash longer text")
        return value
    if is_scalar(value):
        return value
    raise InvalidLookup(
        name,
        f"is {type(value).__name__}, and a value is a scalar or a list of scalars: "
        "text, a number, True or False, an aware datetime, a UUID or an ObjectId",
    )


def _without_duplicates(values: Sequence[Any]) -> list[Any]:
    # For Python and for MongoDB, 1 equals 1.0. But only for Python, 1 also equals True.
    return list({(isinstance(value, bool), value): value for value in values}.values())
