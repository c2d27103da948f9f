"""MongoDB's wire protocol, as far as a proxy must read it: where a message ends, and what is in its body."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any

import bson
from bson.codec_options import CodecOptions, DatetimeConversion

Document = dict[str, Any]

OP_REPLY = 1
OP_QUERY = 2004
OP_MSG = 2013
#: A flag of OP_MSG: more replies to the same request follow, each in answer to the one before.
MORE_TO_COME = 2

_HEADER = struct.Struct("<iiii")
_INT = struct.Struct("<i")
_CHECKSUM_PRESENT = 1
_CHECKSUM_BYTES = 4
_BODY = 0  #: the kind of section that holds the command or the reply
_BEFORE_REPLY = 36
#: A date beyond Python's years must not break the proxy.
_READ: CodecOptions[Document] = CodecOptions(datetime_conversion=DatetimeConversion.DATETIME_AUTO)
#: What is decoded and encoded again must come out as it went in.
_EXACT: CodecOptions[Document] = CodecOptions(datetime_conversion=DatetimeConversion.DATETIME_MS)


class Frames:
    """Puts messages together from what a connection brings."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, received: bytes) -> Sequence[bytes]:
        """Return the messages that are now whole."""
        rest = self._rest
        if not rest and len(received) >= 4 and _INT.unpack_from(received)[0] == len(received):
            return (received,)  # by far the most frequent case
        rest += received
        found = []
        start = 0
        while len(rest) - start >= 4:
            (size,) = _INT.unpack_from(rest, start)
            if size < _HEADER.size:
                raise ValueError(f"a message of {size} bytes")
            if len(rest) - start < size:
                break
            found.append(bytes(memoryview(rest)[start : start + size]))
            start += size
        del rest[:start]
        return found


def request_id(message: bytes) -> int:
    """Return the message's own number."""
    number: int = _INT.unpack_from(message, 4)[0]
    return number


def response_to(message: bytes) -> int:
    """Return the number of the message that this one answers."""
    number: int = _INT.unpack_from(message, 8)[0]
    return number


def operation(message: bytes) -> int:
    """Return the kind of message."""
    code: int = _INT.unpack_from(message, 12)[0]
    return code


def has_more_to_come(message: bytes) -> bool:
    """Tell whether further replies follow without being asked for."""
    return operation(message) == OP_MSG and bool(_INT.unpack_from(message, 16)[0] & MORE_TO_COME)


def _body_start(message: bytes) -> int:
    code = operation(message)
    if code == OP_MSG:
        start = _HEADER.size + 4
        while message[start] != _BODY:
            start += 1 + _INT.unpack_from(message, start + 1)[0]
        return start + 1
    if code == OP_QUERY:  # flags, the collection's name, two numbers
        return message.index(0, _HEADER.size + 4) + 1 + 8
    if code == OP_REPLY:
        return _BEFORE_REPLY
    raise ValueError(f"a message of kind {code}: the driver must not compress")


def command_name(message: bytes) -> bytes:
    """Return the name of the command in a request: its body's first field. Decodes nothing."""
    start = _body_start(message) + _INT.size + 1
    return message[start : message.index(0, start)]


def body(message: bytes) -> Document:
    """Return the command or the reply."""
    start = _body_start(message)
    (size,) = _INT.unpack_from(message, start)
    return bson.decode(message[start : start + size], _READ)


def command(number: int, document: Document) -> bytes:
    """Return the message that sends this command."""
    encoded = bson.encode(document)
    size = _HEADER.size + 5 + len(encoded)
    return _HEADER.pack(size, number, 0, OP_MSG) + bytes((0, 0, 0, 0, _BODY)) + encoded


def with_body(message: bytes, change: Callable[[Document], Document]) -> bytes:
    """Return the message with its body changed and all else as it was, without the checksum it may have had."""
    start = _body_start(message)
    (size,) = _INT.unpack_from(message, start)
    tail = message[start + size :]
    head = bytearray(message[:start])
    if operation(message) == OP_MSG:
        (flags,) = _INT.unpack_from(message, _HEADER.size)
        if flags & _CHECKSUM_PRESENT:
            _INT.pack_into(head, _HEADER.size, flags & ~_CHECKSUM_PRESENT)
            tail = tail[:-_CHECKSUM_BYTES]
    changed = bson.encode(change(bson.decode(message[start : start + size], _EXACT)), codec_options=_EXACT)
    _INT.pack_into(head, 0, len(head) + len(changed) + len(tail))
    return bytes(head) + changed + tail
