"""Encodes values as BSON, and checks their size and nesting."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, TypeVar

import bson
from bson import ObjectId
from bson.binary import Binary
from bson.code import Code
from bson.dbref import DBRef
from bson.errors import InvalidBSON
from bson.raw_bson import RawBSONDocument

from mtask.errors import DocumentTooLarge, NotStorable
from mtask.kernel.document.parts import SUBTYPE, Sealed
from mtask.kernel.driver.errors import first_line
from mtask.kernel.driver.stores import CODEC, READING

#: The largest size of a value, in bytes. It is MongoDB's limit for a document, minus room for the other fields of a
#: task.
MAX_VALUE_BYTES = 15 * 1024 * 1024
#: The deepest nesting of a value, in levels. MongoDB allows 180 levels, but an update wraps the value in expressions,
#: and their levels count, too.
MAX_NESTING = 100
#: A size in bytes. A value up to this size cannot have more than MAX_NESTING levels, so its depth is not checked.
_SHALLOW_BYTES = 5 * MAX_NESTING
_SMALL = (type(None), bool, float)
_CONTAINERS, _TEXTS = frozenset({dict, list}), frozenset({str, bytes, Binary})


def as_sent(document: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the document in encoded form. A document that is sent often is then encoded only once."""
    return RawBSONDocument(bson.encode(document))


def packed(document: Mapping[str, Any]) -> bytes:
    """Return a document as BSON, for another process of the same worker."""
    return bson.encode(document, codec_options=CODEC)


def unpacked(body: bytes) -> dict[str, Any]:
    """Return the document that `packed` has encoded. Its values are those that the driver would read."""
    try:
        return bson.decode(body, codec_options=CODEC)
    except InvalidBSON:
        return bson.decode(body, codec_options=READING)


def stored_size(value: Any) -> int:
    """Return a value's size in bytes as BSON; raise NotStorable or DocumentTooLarge."""
    if isinstance(value, _SMALL):
        return 8
    try:
        size = len(bson.encode({"": value}, codec_options=CODEC))
    except Exception as error:  # the encoder's message contains the value's `repr`, which may raise anything
        raise NotStorable(first_line(error)) from error
    if size > MAX_VALUE_BYTES:
        raise DocumentTooLarge(f"it has {size} bytes, and {MAX_VALUE_BYTES} fit")
    if size > _SHALLOW_BYTES and _is_deeper(value, MAX_NESTING):
        raise NotStorable(f"it is nested more than {MAX_NESTING} levels deep")
    return size


def rough_size(value: Any) -> int:
    """Return about a decoded value's size in bytes as BSON. Small values count as nothing."""
    kind = type(value)
    if kind is dict and not any(type(part) in _CONTAINERS for part in value.values()):
        return sum(len(part) for part in value.values() if type(part) in _TEXTS)
    if kind in _CONTAINERS:
        try:
            return len(bson.encode({"": value}, codec_options=CODEC))
        except Exception:  # not every value that can be read can be written
            return 0
    return len(value) if kind in _TEXTS else 0


def is_readable(value: Any) -> bool:
    """Whether a value that can be stored can also be read again by the usual codec."""
    if isinstance(value, _SMALL):
        return True
    try:
        bson.decode(bson.encode({"": value}, codec_options=CODEC), codec_options=CODEC)
    except InvalidBSON:
        return False
    return True


def stored_value(value: Any) -> Any:
    """Return an encrypted value as it is stored, and any other value unchanged."""
    return Binary(value.content, SUBTYPE) if isinstance(value, Sealed) else value


def is_code(value: Any) -> bool:
    """Whether the value is JavaScript code. Its class is a subclass of `str`, but BSON stores no string for it."""
    return isinstance(value, Code)


def is_scalar(value: Any) -> bool:
    """Whether the value is an ObjectId, or a subclass of text that BSON stores as a string."""
    return isinstance(value, ObjectId) or (isinstance(value, str) and not isinstance(value, Code))


def _is_deeper(value: Any, levels: int) -> bool:
    if isinstance(value, Mapping):
        inner: Any = value.values()
    elif isinstance(value, list | tuple):
        inner = value
    else:
        return False
    return levels == 0 or any(_is_deeper(item, levels - 1) for item in inner)


# --- dates -----------------------------------------------------------------------------------------------

# Values as `find_naive` reads them, and the way back: dates without a time zone, and references as DBRef.
#
# All of BSON's dates are in UTC. To give each date a time zone while a reply is decoded takes longer than to decode all
# the rest of a task.

T = TypeVar("T")


def with_zones(value: T) -> T:
    """Return the value as the usual codec would have read it, at any depth. This changes dicts and lists in place.

    Each date gets a time zone, and each reference becomes the dict that was written.
    """
    change = _CHANGES.get(type(value))
    return value if change is None else change(value)


def _in_dict(value: dict[Any, Any]) -> dict[Any, Any]:
    for name, part in value.items():
        kind = type(part)
        if kind in _CHANGES:
            value[name] = part.replace(tzinfo=UTC) if kind is datetime else _CHANGES[kind](part)
    return value


def _in_list(value: list[Any]) -> list[Any]:
    for index, part in enumerate(value):
        kind = type(part)
        if kind in _CHANGES:
            value[index] = _CHANGES[kind](part)
    return value


def _in_utc(value: datetime) -> datetime:
    return value.replace(tzinfo=UTC)


def _in_code(value: Code) -> Code:
    if value.scope:
        _in_dict(value.scope)  # type: ignore[arg-type]  # it is a dict, as it was decoded
    return value


def _in_reference(value: DBRef) -> dict[Any, Any]:
    return _in_dict(dict(value.as_doc()))


_CHANGES: dict[type, Any] = {datetime: _in_utc, dict: _in_dict, list: _in_list, Code: _in_code, DBRef: _in_reference}
