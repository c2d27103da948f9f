"""Addresses: the server routes on the raw path, so that each key has an address.

Each segment of a path is percent-decoded once. So `/` and `:` inside a name or a key travel as `%2F` and `%3A`, and a
literal `:` begins an action. Browsers drop segments such as `..`, even as `%2e%2e`, so `/v1/task?name=..&key=..` serves
the same purpose as `/v1/tasks/NAME/KEY`.
"""

from __future__ import annotations

import re
from typing import Annotated, Any
from urllib.parse import parse_qsl, quote, unquote_to_bytes, urlencode, urlsplit

from fastapi import Path
from pydantic import BeforeValidator
from starlette.convertors import Convertor, register_url_convertor

from mtask.kernel.document.identity import TENANT_PATTERN
from mtask.web.problems import BadRequest, InvalidRequest
from mtask.web.schemas import KEY, NAME, TEXT

#: The path whose query names a task.
BY_QUERY = "/v1/task"
_BAD_ESCAPE = re.compile(r"%(?![0-9A-Fa-f]{2})")
_PARAMETER = re.compile(r"\{(\w+)\}")


class _Segment(Convertor[str]):
    """A segment of a path, still encoded. A literal colon begins an action, so it is no part of a segment."""

    regex = "[^/:]+"

    def convert(self, value: str) -> str:
        """Return the segment as it is: `_segment` decodes it."""
        return value

    def to_string(self, value: str) -> str:
        """Return the segment of a text."""
        return quote(value, safe="")


# Starlette knows convertors by a table of its own, by the names that paths use.
register_url_convertor("segment", _Segment())


def with_segments(path: str) -> str:
    """Return the path of a route so that each of its parameters is a segment without a literal colon."""
    return _PARAMETER.sub(r"{\1:segment}", path)


def routed_path(raw_path: bytes) -> str:
    """Return the path on which the server routes: the raw one. Raises BadRequest."""
    try:
        path = raw_path.decode("ascii")
        for segment in path.split("/"):
            _decoded(segment)
    except UnicodeDecodeError:
        raise BadRequest("The path is not percent-encoded UTF-8.") from None
    return path


def check_query(query: bytes) -> None:
    """Raise BadRequest unless the query is percent-encoded UTF-8."""
    try:
        _decoded(query.decode("ascii"))
    except UnicodeDecodeError:
        raise BadRequest("The query is not percent-encoded UTF-8.") from None


def by_query(path: str, query: bytes) -> tuple[str, bytes]:
    """Return the path and the query that mean the same as `/v1/task?name=..&key=..`; raise InvalidRequest."""
    tail = path.removeprefix(BY_QUERY)
    pairs = parse_qsl(query.decode("ascii"), keep_blank_values=True)
    given = {wanted: [value for name, value in pairs if name == wanted] for wanted in ("name", "key")}
    if any(len(values) != 1 or not values[0] for values in given.values()):
        raise InvalidRequest("Name the task: /v1/task?name=NAME&key=KEY, each once.")
    name, key = (quote(given[wanted][0], safe="") for wanted in ("name", "key"))
    others = urlencode([pair for pair in pairs if pair[0] not in given])
    return f"/v1/tasks/{name}/{key}{tail}", others.encode("ascii")


def is_same_origin(origin: str, scheme: str, host: str) -> bool:
    """Whether a header Origin names a page of this scheme and host. Anybody can send what is no address."""
    usual = {"http": ":80", "https": ":443"}.get(scheme, "")
    given, own = origin.lower(), f"{scheme}://{host.lower()}"
    return given.removesuffix(usual) == own.removesuffix(usual)


def path_in(address: str) -> str:
    """Return the path of an address, such as that in a header Referer; "" if it is no address."""
    try:
        return urlsplit(address).path
    except ValueError:
        return ""


def is_by_query(path: str) -> bool:
    """Whether the path is `/v1/task`, perhaps with an action or with more segments."""
    return path == BY_QUERY or path.startswith((f"{BY_QUERY}:", f"{BY_QUERY}/"))


def _decoded(segment: str) -> str:
    if _BAD_ESCAPE.search(segment):
        raise BadRequest("A '%' in the address begins no two hex digits: write '%25' for a percent sign.")
    return unquote_to_bytes(segment).decode("utf-8")


def _segment(segment: object) -> object:
    """Return the text of a segment."""
    return _decoded(segment) if isinstance(segment, str) else segment


DECODED = BeforeValidator(_segment)


def _key_of(what: str) -> Any:
    told = f"Key of the {what}, as one segment: write `/` as `%2F` and `:` as `%3A`. At most 512 bytes."
    return Path(description=told, json_schema_extra=KEY)


def text_segment(most: int, schema: dict[str, Any]) -> Any:
    """Return what the OpenAPI document says of a segment with a text."""
    told = f"Printable text without a comma, of at most {most} bytes, as one segment."
    return Path(description=told, json_schema_extra=schema)


# The bounds are part of the OpenAPI document alone: the client checks them, with messages of its own.
TaskName = Annotated[
    str, Path(description="Name of the task. It selects the handler.", json_schema_extra=NAME), DECODED
]
TaskKey = Annotated[str, _key_of("task"), DECODED]
NameSegment = Annotated[str, Path(description="Name of tasks.", json_schema_extra=NAME), DECODED]
Tenant = Annotated[str, Path(description="A tenant.", json_schema_extra={"pattern": TENANT_PATTERN}), DECODED]
FlowKey = Annotated[str, _key_of("flow"), DECODED]
Segment = Annotated[str, text_segment(256, TEXT), DECODED]
