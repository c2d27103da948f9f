"""The bodies of requests: strict JSON with MongoDB's extended types, and nothing else.

A body of another type is refused: a page of another site can send `text/plain` without asking the server first. One
route takes JSON under any type, but not from a browser.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack
from email.message import Message
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute
from starlette.types import Scope

from mtask.client import AsyncClient
from mtask.errors import InvalidInput
from mtask.kernel.driver.extended_json import parse_strict
from mtask.web.access import Caller, Role
from mtask.web.paths import with_segments
from mtask.web.problems import BodyTooLarge, Forbidden, InvalidRequest, RequestTimeout, UnsupportedMediaType
from mtask.web.rooms import Rooms
from mtask.web.settings import NO_BODY, WebSettings

#: What a route says about itself in the OpenAPI document: the role that it takes, whether its body may be large,
#: whether it belongs to the whole database, and the beginnings of the names of its query parameters that have any name.
ROLE, IS_BATCH, OF_DATABASE, FREE_QUERY = "x-mtask-role", "x-mtask-batch", "x-mtask-database", "x-mtask-free-query"
#: The same: whether its body is JSON under any type.
IS_OF_ANY_TYPE = "x-mtask-any-type"
#: What browsers send with a request of a page, and programs do not.
_OF_BROWSERS = ("origin", "referer", "cookie", "sec-fetch-site", "sec-fetch-mode")
_READS = frozenset({"GET", "HEAD"})
_TYPE = b"content-type"


def about(
    role: Role = Role.READ,
    *,
    batch: bool = False,
    of_database: bool = False,
    free_query: Sequence[str] = (),
    is_open: bool = False,
    any_type: bool = False,
) -> dict[str, Any]:
    """Return what a route says about itself.

    `of_database`: it is not for tenants; `is_open`: it takes no token; `any_type`: its body is JSON under any type.
    """
    said: dict[str, Any] = {ROLE: role.value}
    said |= {IS_OF_ANY_TYPE: True} if any_type else {}
    said |= {"security": []} if is_open else {}
    said |= {IS_BATCH: True} if batch else {}
    said |= {OF_DATABASE: True} if of_database else {}
    return said | ({FREE_QUERY: list(free_query)} if free_query else {})


class StrictRequest(Request):
    """A request whose body was read and parsed before FastAPI looks at it."""

    parsed: Any = None

    async def json(self) -> Any:
        """Return the parsed body."""
        return self.parsed

    def parse(self, text: bytes) -> None:
        """Take the body, and parse it."""
        self._body = text
        if text:
            _check_type(self)
            try:
                self.parsed = parse_strict(text.decode("utf-8"), "body")
            except UnicodeDecodeError:
                raise InvalidInput("body: this is not UTF-8.", field="body") from None


def _check_type(request: Request) -> None:
    given = request.headers.getlist("content-type")
    message = Message()
    message["content-type"] = given[0] if len(given) == 1 else ""
    charset = message.get_content_charset("utf-8")
    if not given or message.get_content_type() != "application/json" or charset != "utf-8":
        raise UnsupportedMediaType("Send the body as JSON, with the header Content-Type: application/json.")
    if request.headers.get("content-encoding", "identity") != "identity":
        raise UnsupportedMediaType("Send the body uncompressed.")


def _as_json(request: Request) -> Scope:
    """Return the scope of a request whose body is taken for JSON, unless a browser has sent it."""
    if any(name in request.headers for name in _OF_BROWSERS):
        return request.scope
    others = [(name, value) for name, value in request.scope["headers"] if name != _TYPE]
    return {**request.scope, "headers": [*others, (_TYPE, b"application/json")]}


class Route(APIRoute):
    """A route of the API: it checks the caller's role and the query, and reads the body, before anything else."""

    def __init__(self, path: str, endpoint: Callable[..., Any], **given: Any) -> None:
        super().__init__(with_segments(path), endpoint, **given)

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return the function that answers a request."""
        answer = super().get_route_handler()
        said = self.openapi_extra or {}
        asking = (self.dependant, *self.dependant.dependencies)
        known = frozenset(field.alias for each in asking for field in each.query_params)
        role = Role(said[ROLE])

        async def handle(request: Request) -> Response:
            settings: WebSettings = request.app.state.settings
            caller: Caller = request.scope["mtask.caller"]
            _check_rights(caller, role, settings, said, is_change=request.method not in _READS)
            _check_query(request, known, tuple(said.get(FREE_QUERY, ())))
            strict = StrictRequest(_as_json(request) if said.get(IS_OF_ANY_TYPE) else request.scope, request.receive)
            largest = settings.largest(is_batch=bool(said.get(IS_BATCH))) if self.body_field else NO_BODY
            rooms: Rooms = request.app.state.rooms
            async with AsyncExitStack() as held:

                async def hold(length: int) -> None:
                    await held.enter_async_context(rooms.bodies.awaited(caller, length, PATIENCE))

                text = await body_of(strict, largest.size, hold)
                if len(text) <= SMALL:
                    strict.parse(text)
                    return await self._answered(strict, answer)
                _check_type(strict)
                values = await rooms.apart.compute(check_values, text, largest.values)
                await held.enter_async_context(rooms.values.awaited(caller, values, PATIENCE))
                await rooms.apart.compute(strict.parse, text)

                async def answered(client: AsyncClient) -> Response:
                    strict.scope["mtask.client"] = client
                    return await self._answered(strict, answer)

                return await rooms.apart.run(answered)

        return handle

    async def _answered(
        self, request: StrictRequest, answer: Callable[[Request], Coroutine[Any, Any, Response]]
    ) -> Response:
        if request.parsed is not None and self.body_field is None and request.parsed != {}:
            raise InvalidRequest("This request takes no body.")
        if request.parsed is None and self.body_field is not None and self.body_field.field_info.is_required():
            raise InvalidRequest("This request takes a JSON object as its body.")
        return await answer(request)


def _check_rights(caller: Caller, role: Role, settings: WebSettings, said: dict[str, Any], *, is_change: bool) -> None:
    if settings.is_read_only and is_change:
        raise Forbidden("This server is read-only.")
    if not caller.may(role):
        raise Forbidden(f"This takes a token with the role {role.value}; yours has the role {caller.role.value}.")
    if said.get(OF_DATABASE) and caller.tenant is not None:
        raise Forbidden("This concerns the tasks of all tenants. It takes a token without a tenant.")


def _check_query(request: Request, known: frozenset[str], free: tuple[str, ...]) -> None:
    for name, _ in request.query_params.multi_items():
        if not name.startswith(free) and name not in known:
            raise InvalidRequest(f"There is no query parameter {name[:80]!r}.")


# --- reading ---------------------------------------------------------------------------------------------

# Reads the body of a request: within its bounds, its time, and what its sender may have in the server at once.

#: A body up to this size, in bytes, is small: to parse it takes a few milliseconds at most.
SMALL = 8 * 1024
#: The time that a body may take, in seconds, and the bytes that must come in each further second. Tests tune both.
TIME, SLOWEST = 20.0, 16 * 1024
#: The longest time that a large body waits for those of other requests, in seconds.
PATIENCE = 20.0

#: Waits until the sender may have a body of so many bytes in the server; raises Busy.
Hold = Callable[[int], Awaitable[object]]


async def body_of(request: Request, largest: int, hold: Hold | None = None) -> bytes:
    """Return the body; raise BodyTooLarge, RequestTimeout or Busy. `hold` is called before a large body is read."""
    told = request.headers.get("content-length", "")
    length = int(told[:20]) if told.isascii() and told.isdecimal() else largest
    if told and length > largest:
        raise _too_large(largest)
    loop = asyncio.get_running_loop()
    began, size, is_held = loop.time(), 0, hold is None
    parts: list[bytes] = []
    try:
        async with asyncio.timeout_at(began + TIME) as limit:
            async for part in request.stream():
                size += len(part)
                if size > largest:
                    raise _too_large(largest)
                parts.append(part)
                if size > SMALL and not is_held and hold is not None:
                    limit.reschedule(None)  # the sender does not answer for this wait
                    waited = loop.time()
                    await hold(length)
                    began, is_held = began + loop.time() - waited, True
                limit.reschedule(began + TIME + size / SLOWEST)
    except TimeoutError:
        raise RequestTimeout("The body of the request did not come in time. Send it again, at once.") from None
    return b"".join(parts)


def _too_large(largest: int) -> BodyTooLarge:
    return BodyTooLarge(f"The body may have at most {largest} bytes.")


# --- sizes -----------------------------------------------------------------------------------------------

# How much a body of JSON will become when it is parsed. A byte of `[[],[],[]]` takes seventy bytes as lists.
#
# The values are counted in the text, before anything parses it. The parser takes a text in one step, in which no other
# thread runs: 15 MB take 50 ms, and 150 ms if all of it is escaped. So long texts are refused, and escapes count, too.

#: What follows in a text of JSON, up to the quote that ends it.
_IN_TEXT = re.compile(rb'[^"\\]*+(?:\\.[^"\\]*+)*+', re.DOTALL)
_QUOTE, _BACKSLASH = b'"', ord("\\")
#: The part of a body that one step looks at, in bytes: no other thread runs meanwhile. Tests tune it.
STEP = 256 * 1024
#: The longest text, in bytes, and the number of escapes in texts that counts as one value. Tests tune both.
LONGEST, ESCAPES = 4 * 1024 * 1024, 8


def values_in(body: bytes, most: int) -> int:
    """Return at least the number of values in a body, and the number itself if it may exceed `most`.

    This calls for no parser. Each value but the first follows a comma, or the beginning of a list or of an object.
    """
    escapes = sum(body.count(b"\\", start, start + STEP) for start in range(0, len(body), STEP)) // ESCAPES
    rough = 1 + escapes + sum(_separators(body, start, start + STEP) for start in range(0, len(body), STEP))
    if rough <= most:
        return rough
    # Commas and brackets of texts are not those of lists. This takes longer, so it ends as soon as there are too many.
    found, at, is_in_text = 1 + escapes, 0, False
    while at < len(body) and found <= most:
        if is_in_text:
            match = _IN_TEXT.match(body, at, at + STEP)
            at = len(body) if match is None else match.end()
            if at < len(body) and body[at] == _BACKSLASH:  # the step has cut it off from what it belongs to
                at += 2
            elif body.startswith(_QUOTE, at):
                at, is_in_text = at + 1, False
        else:
            quote = body.find(_QUOTE, at, at + STEP)
            end = min(at + STEP, len(body)) if quote < 0 else quote
            found += _separators(body, at, end)
            at, is_in_text = (end, False) if quote < 0 else (quote + 1, True)
    return found


def check_values(body: bytes, most: int) -> int:
    """Return at least the number of values in a body; raise BodyTooLarge if there are more, or too long a text."""
    found = values_in(body, most)
    if found > most:
        raise BodyTooLarge(
            f"The body may have at most {most} values, with those in lists and objects; {ESCAPES} escapes in texts "
            "count as one. Send fewer tasks at once, or store large values elsewhere and pass a reference."
        )
    if _has_long_text(body):
        raise BodyTooLarge(
            f"A text in the body may have at most {LONGEST} bytes. Store it elsewhere, and pass a reference."
        )
    return found


def _has_long_text(body: bytes) -> bool:
    """Whether there is no quote that ends or begins a text for longer than a text may be."""
    at = 0
    while at + LONGEST < len(body):
        end = at + LONGEST
        while (quote := body.rfind(_QUOTE, at, end)) > at and body[quote - 1] == _BACKSLASH:
            end = quote
        if quote < 0:
            return True
        at = quote + 1
    return False


def _separators(body: bytes, start: int, end: int) -> int:
    return body.count(b",", start, end) + body.count(b"[", start, end) + body.count(b"{", start, end)
