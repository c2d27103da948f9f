"""The gate: what each request must pass before any route sees it. It checks Host, Origin, path and token."""

from __future__ import annotations

import asyncio
import logging
import resource
import time
from collections import Counter
from contextlib import nullcontext, suppress
from typing import Any

import uvicorn
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from mtask.arguments.publish import traced_by
from mtask.errors import MtaskError
from mtask.features.audit_log.client import acting_as
from mtask.kernel.document.values import trace_of
from mtask.web import paths
from mtask.web.access import ANYBODY, Caller
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


# --- connections -----------------------------------------------------------------------------------------

# The connections of the server: how many there may be, and how long each may keep the server waiting.
#
# uvicorn closes a connection on which nothing comes after an answer, and no other: neither one that never sends
# anything, nor one that sends half a request, nor one that does not read its answer. Each takes a file descriptor.

#: Times in seconds. _HEAD: for the head of a request. _UNREAD: for which a client may read nothing of its answer; each
#: _SLOWEST bytes that it reads give it a second more. _LOOK: between two looks at all connections.
_HEAD, _UNREAD, _SLOWEST, _LOOK = 15.0, 20.0, 1024, 1.0
#: The part of all connections that give way at once when there are too many: so the search for them is rare.
_GIVING_WAY = 20
#: The most connections that are taken in one step of the event loop.
_AT_ONCE = 100
#: File descriptors for everything else: the connections to the database, and those that come within one step.
_RESERVED = 250
_KEY = "mtask.connection"


def connections_within(wanted: int) -> int:
    """Return how many connections the process may have, at most `wanted`. This raises its limit of open files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    enough = wanted + _RESERVED
    if soft != resource.RLIM_INFINITY and soft < enough:
        most = enough if hard == resource.RLIM_INFINITY else min(hard, enough)
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
            soft = most
    if soft == resource.RLIM_INFINITY:
        return wanted
    return min(wanted, max(soft - _RESERVED, soft // 2, 1))


def tell(scope: Scope, *, is_known: bool) -> None:
    """Tell the connection of a request whether its sender has shown a token or a session."""
    found = scope.get("state", {}).get(_KEY)
    if isinstance(found, Connection):
        found.is_known = is_known


class Connections:
    """All connections of one server."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._open: dict[Connection, None] = {}  # the oldest one first
        self._looking: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._open)

    @property
    def at_once(self) -> int:
        """How many connections may be taken in one step. Those that give way for them are closed some steps later."""
        return max(1, min(_AT_ONCE, self._most // 16))

    def protocol(self, *, app_state: dict[str, Any], **given: Any) -> Connection:
        """Return the protocol of a new connection: uvicorn asks for it."""
        state = dict(app_state)
        inner: Any = AutoHTTPProtocol
        made = Connection(self, inner(app_state=state, **given))
        state[_KEY] = made  # each request gets the state of its connection
        return made

    def add(self, made: Connection) -> None:
        """Take a new connection. If there are too many, some that no known caller needs give way, or else this one."""
        self._open[made] = None
        if self._looking is None:
            self._looking = asyncio.get_running_loop().call_later(_LOOK, self._look)
        if len(self._open) > self._most:
            for each in self._giving_way(made):
                self.discard(each)  # at once, so that the next new connection finds others
                each.abort()

    def discard(self, closed: Connection) -> None:
        """Forget a connection."""
        self._open.pop(closed, None)

    def _giving_way(self, newest: Connection) -> list[Connection]:
        """Return the oldest connections that nobody needs, first those of the address that has most of them."""
        idle = [each for each in self._open if each.may_give_way and each is not newest]
        of_address = Counter(each.address for each in idle)
        idle.sort(key=lambda each: -of_address[each.address])
        return idle[: max(1, self._most // _GIVING_WAY)] or [newest]

    def _look(self) -> None:
        loop = asyncio.get_running_loop()
        for each in tuple(self._open):
            each.look(loop.time())
        self._looking = loop.call_later(_LOOK, self._look) if self._open else None


class Connection(asyncio.Protocol):
    """One connection: it passes everything on to uvicorn's protocol, and looks at what becomes of it."""

    def __init__(self, connections: Connections, inner: Any) -> None:
        self._connections, self._inner = connections, inner
        self._transport: asyncio.Transport | None = None
        self._cycle: Any = None
        self._waits_since: float | None = None
        self._unread: tuple[float, int] | None = None
        self._is_paused = False
        self.address = ""
        self.is_known = False  #: whether the sender of the present request has shown a token or a session

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self.address = str((transport.get_extra_info("peername") or ("",))[0])
        self._waits_since = asyncio.get_running_loop().time()
        self._inner.connection_made(transport)
        self._connections.add(self)

    def connection_lost(self, error: Exception | None) -> None:
        """End."""
        self._connections.discard(self)
        self._inner.connection_lost(error)

    def data_received(self, data: bytes) -> None:
        """Pass on what has come."""
        self._inner.data_received(data)

    def eof_received(self) -> Any:
        """Pass on that nothing more comes."""
        return self._inner.eof_received()

    def pause_writing(self) -> None:
        """Pass on that the client reads too slowly."""
        self._is_paused = True
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        """Pass on that the client has read enough."""
        self._is_paused, self._unread = False, None
        self._inner.resume_writing()

    @property
    def _is_answering(self) -> bool:
        return self._inner.cycle is not None and not self._inner.cycle.response_complete

    @property
    def may_give_way(self) -> bool:
        """Whether nobody who is known waits for an answer to a whole request."""
        return not (self.is_known and self._is_answering and not self._inner.cycle.more_body)

    def abort(self) -> None:
        """End the connection at once."""
        if self._transport is not None:
            self._transport.abort()

    def look(self, now: float) -> None:
        """End the connection if its client keeps the server waiting."""
        assert self._transport is not None
        size = self._transport.get_write_buffer_size()
        is_closing = self._transport.is_closing()
        # Otherwise more may be written at any time, so the size would tell nothing about what was read.
        if not size or not (self._is_paused or is_closing or not self._is_answering):
            self._unread = None
        else:
            since, first = self._unread = self._unread or (now, size)
            if now - since > _UNREAD + max(0, first - size) / _SLOWEST:
                self.abort()
                return
        cycle, self._cycle = self._cycle, self._inner.cycle
        if self._is_answering or size or is_closing:
            self._waits_since = None
        elif self._waits_since is None or cycle is not self._cycle:
            self._waits_since = now
        elif now - self._waits_since > _HEAD:
            self._transport.close()


def config_of(app: Any, connections: Connections, **given: Any) -> uvicorn.Config:
    """Return the configuration of a server with these connections."""
    return uvicorn.Config(
        app,
        http=connections.protocol,  # type: ignore[arg-type]  # uvicorn calls it as it calls a class
        access_log=False,
        log_config=None,
        log_level="warning",
        server_header=False,
        proxy_headers=False,
        ws="none",
        **given,
    )
