"""The bodies of requests: strict JSON with MongoDB's extended types, and nothing else.

A body of another type is refused: a page of another site can send `text/plain` without asking the server first. One
route takes JSON under any type, but not from a browser.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
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
from mtask.web.problems import Forbidden, InvalidRequest, UnsupportedMediaType
from mtask.web.reading import PATIENCE, SMALL, body_of
from mtask.web.rooms import Rooms
from mtask.web.settings import NO_BODY, WebSettings
from mtask.web.sizes import check_values

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
