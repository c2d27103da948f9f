"""The gate: what each request must pass before any route sees it. It checks Host, Origin, path and token."""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import nullcontext

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mtask.arguments.publish import traced_by
from mtask.errors import MtaskError
from mtask.features.audit_log.client import acting_as
from mtask.kernel.document.values import trace_of
from mtask.web import paths
from mtask.web.access import ANYBODY, Caller
from mtask.web.connections import tell
from mtask.web.page.page import WebPage
from mtask.web.page.sessions import scheme_of
from mtask.web.problems import (
    BadRequest,
    Forbidden,
    InternalError,
    Refusal,
    TooManyRequests,
    Unauthenticated,
    WrongHost,
    response_of,
)
from mtask.web.rooms import Rooms
from mtask.web.settings import WebSettings
from mtask.web.tokens import Logins, Rates

logger = logging.getLogger("mtask.web")
#: The addresses that programs without a token may ask: whether the server lives, and what its errors mean.
_WITHOUT_TOKEN = ("/healthz", "/readyz")
#: The longest time that the end of a connection takes to be known, in seconds.
_LEAVING = 0.2
_READS = frozenset({"GET", "HEAD", "OPTIONS"})


class Gate:
    """An ASGI middleware around the API and the page. It answers what it refuses itself.

    The API takes a token with each request, and no cookie. The page takes its session's cookie, and no token.
    """

    def __init__(self, app: ASGIApp, page: WebPage, settings: WebSettings, logins: Logins, rooms: Rooms) -> None:
        self._app = app
        self._page = page
        self._settings = settings
        self._logins = logins
        self.rooms = rooms
        self._rates = Rates(settings.max_rate)
        self._rates_of_strangers = Rates(settings.max_stranger_rate)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self._app(scope, receive, send)
            return
        is_begun = is_whole = is_cut = False

        async def sending(message: Message) -> None:
            nonlocal is_begun, is_whole, is_cut
            is_begun = is_cut = True
            is_whole = message["type"] == "http.response.body" and not message.get("more_body", False)
            await send(message)
            is_cut = False

        try:
            try:
                await self._answer(scope, receive, sending)
            except (MtaskError, Refusal) as error:
                if is_begun:
                    raise
                await response_of(error, scope.get("mtask.caller", ANYBODY))(scope, receive, sending)
        except ClientDisconnect:
            logger.debug("a client went away before its request was read")
        except Exception:
            if is_cut and await _has_left(receive):
                logger.debug("a client went away before its answer was sent")
                return
            logger.exception("a request failed")
            if is_begun and not is_whole:
                raise  # so that the connection ends, and the client sees that the answer is not whole
            if not is_begun:
                await response_of(InternalError("This is a mistake of the server. Its log says more."))(
                    scope, receive, send
                )

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let the page or the API answer; raise a Refusal."""
        self._admit(scope)
        if scope["path"] in _WITHOUT_TOKEN:
            await self._app(scope, receive, send)
            return
        with self.rooms.requests.taken(scope["mtask.caller"]) if scope["mtask.is_known"] else nullcontext():
            await self._pass_on(scope, receive, send)

    async def _pass_on(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["mtask.is_page"]:
            await self._page(scope, receive, send)
            return
        # What the request changes goes into the action log under the name of its token.
        # What it publishes belongs to the caller's span.
        headers = Headers(scope=scope)
        trace = trace_of(headers.get("traceparent"), headers.get("tracestate"))
        with acting_as(scope["mtask.caller"].name, "web"), traced_by(trace):
            await self._app(scope, receive, send)

    def _admit(self, scope: Scope) -> None:
        """Set the path and the caller of a request, or raise a Refusal."""
        headers = Headers(scope=scope)
        path = paths.routed_path(scope.get("raw_path") or scope["path"].encode())
        is_page = scope["mtask.is_page"] = self._page.owns(path, headers.get("accept", ""))
        address = scope["mtask.address"] = self._logins.address_of(scope)
        # Who asks whether the server lives is never turned away: an orchestrator would end the server.
        is_free = path in _WITHOUT_TOKEN
        caller = None if is_free else self._known(headers, scope, address, is_page=is_page)
        scope["mtask.caller"], scope["mtask.is_known"] = caller or ANYBODY, caller is not None
        tell(scope, is_known=caller is not None)
        if not is_free:
            self._slow_down(caller, address, is_page=is_page)
        host = self._checked_host(headers, scope)
        _check_origin(headers, scope, host)
        paths.check_query(scope.get("query_string", b""))
        if caller is None and not (is_free or is_page):
            if _token_in(headers) is None:
                raise Unauthenticated("Send a token: Authorization: Bearer TOKEN.")
            raise Unauthenticated("The server does not know this token.")
        if paths.is_by_query(path):
            path, scope["query_string"] = paths.by_query(path, scope.get("query_string", b""))
        scope["path"] = path
        scope["root_path"] = ""

    def _known(self, headers: Headers, scope: Scope, address: str, *, is_page: bool) -> Caller | None:
        """Return the caller of a request; None: it has shown neither a token nor a session. Raises TooManyRequests."""
        if self._settings.is_open:
            return ANYBODY
        if is_page:
            return self._page.caller_of(scope)
        token = _token_in(headers)
        return None if token is None else self._logins.caller_of(token, address)

    def _slow_down(self, caller: Caller | None, address: str, *, is_page: bool) -> None:
        now = time.monotonic()
        if caller is None:
            rate, delay = self._settings.max_stranger_rate, self._rates_of_strangers.delay(address, now)
        else:
            # A page and a program with one token do not hold each other back.
            who = f"{'page' if is_page else 'token'} {caller.name}"
            rate, delay = self._settings.max_rate, self._rates.delay(who, now)
        if delay:
            raise TooManyRequests(f"You may send {rate:g} requests in a second.", delay)

    def _checked_host(self, headers: Headers, scope: Scope) -> str:
        given = headers.getlist("host")
        if len(given) != 1:
            raise BadRequest("Send one header Host.")
        port = (scope.get("server") or ("", self._settings.port))[1]
        if not self._settings.accepts_host(given[0], port or self._settings.port):
            raise WrongHost("The header Host does not name this server. `mtask web --allow-host NAME` adds a name.")
        return given[0]


def _token_in(headers: Headers) -> str | None:
    """Return the token of a request, or None."""
    given = headers.getlist("authorization")
    scheme, _, token = given[0].partition(" ") if len(given) == 1 else ("", "", "")
    return token.strip() or None if scheme.lower() == "bearer" else None


async def _has_left(receive: Receive) -> bool:
    """Whether the connection is over. The HTTP server ends it itself when the rest of a request breaks HTTP."""
    try:
        async with asyncio.timeout(_LEAVING):
            return bool((await receive())["type"] == "http.disconnect")
    except TimeoutError:
        return False


def _check_origin(headers: Headers, scope: Scope, host: str) -> None:
    """Refuse a change that a page of another site sends. Browsers name the site of such a page."""
    origin = headers.get("origin")
    if scope["method"] in _READS or origin is None:
        return
    if not paths.is_same_origin(origin, scheme_of(scope), host):
        raise Forbidden(
            "A page of another site sent this request. A proxy that ends TLS must send X-Forwarded-Proto: https."
        )
