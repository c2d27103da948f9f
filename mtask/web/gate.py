"""The gate: what each request must pass before any route sees it. It checks Host, Origin, path and token."""

from __future__ import annotations

import logging
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mtask.client.operating.actions import acting_as
from mtask.errors import MtaskError
from mtask.web import paths
from mtask.web.access import ANYBODY, Caller
from mtask.web.page.page import WebPage
from mtask.web.problems import BadRequest, Forbidden, InternalError, Refusal, Unauthenticated, WrongHost, response_of
from mtask.web.settings import WebSettings
from mtask.web.tokens import Tokens

logger = logging.getLogger("mtask.web")
#: The addresses that programs without a token may ask: whether the server lives, and what its errors mean.
_WITHOUT_TOKEN = ("/healthz", "/readyz")
_READS = frozenset({"GET", "HEAD", "OPTIONS"})


class Gate:
    """An ASGI middleware around the API and the page. It answers what it refuses itself.

    The API takes a token with each request, and no cookie. The page takes its session's cookie, and no token.
    """

    def __init__(self, app: ASGIApp, page: WebPage, settings: WebSettings, tokens: Tokens) -> None:
        self._app = app
        self._page = page
        self._settings = settings
        self._tokens = tokens

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self._app(scope, receive, send)
            return
        is_begun = is_whole = False

        async def sending(message: Message) -> None:
            nonlocal is_begun, is_whole
            is_begun = True
            is_whole = message["type"] == "http.response.body" and not message.get("more_body", False)
            await send(message)

        try:
            self._admit(scope)
            if self._page.owns(scope["path"]):
                await self._page(scope, receive, sending)
                return
            # What the request changes goes into the action log under the name of its token.
            with acting_as(scope["mtask.caller"].name, "web"):
                await self._app(scope, receive, sending)
        except (MtaskError, Refusal) as error:
            if is_begun:
                raise
            await response_of(error, scope.get("mtask.caller", ANYBODY))(scope, receive, send)
        except ClientDisconnect:
            logger.debug("a client went away before its request was read")
        except Exception:
            logger.exception("a request failed")
            if is_begun and not is_whole:
                raise  # so that the connection ends, and the client sees that the answer is not whole
            if not is_begun:
                await response_of(InternalError("This is a mistake of the server. Its log says more."))(
                    scope, receive, send
                )

    def _admit(self, scope: Scope) -> None:
        """Set the path and the caller of a request, or raise a Refusal."""
        headers = Headers(scope=scope)
        host = self._checked_host(headers, scope)
        _check_origin(headers, scope, host)
        paths.check_query(scope.get("query_string", b""))
        path = paths.routed_path(scope.get("raw_path") or scope["path"].encode())
        is_without = path in _WITHOUT_TOKEN or self._page.owns(path)
        scope["mtask.caller"] = ANYBODY if is_without else self._caller(headers)
        if paths.is_by_query(path):
            path, scope["query_string"] = paths.by_query(path, scope.get("query_string", b""))
        scope["path"] = path
        scope["root_path"] = ""

    def _checked_host(self, headers: Headers, scope: Scope) -> str:
        given = headers.getlist("host")
        if len(given) != 1:
            raise BadRequest("Send one header Host.")
        port = (scope.get("server") or ("", self._settings.port))[1]
        if not self._settings.accepts_host(given[0], port or self._settings.port):
            raise WrongHost("The header Host does not name this server. `mtask web --allow-host NAME` adds a name.")
        return given[0]

    def _caller(self, headers: Headers) -> Caller:
        if self._settings.is_open:
            return ANYBODY
        given = headers.getlist("authorization")
        scheme, _, token = given[0].partition(" ") if len(given) == 1 else ("", "", "")
        if scheme.lower() != "bearer" or not token.strip():
            raise Unauthenticated("Send a token: Authorization: Bearer TOKEN.")
        caller = self._tokens.caller_of(token.strip())
        if caller is None:
            raise Unauthenticated("The server does not know this token.")
        return caller


def _check_origin(headers: Headers, scope: Scope, host: str) -> None:
    """Refuse a change that a page of another site sends. Browsers name the site of such a page."""
    origin = headers.get("origin")
    if scope["method"] in _READS or origin is None:
        return
    if urlsplit(origin).netloc.lower() != host.lower():
        raise Forbidden("A page of another site sent this request.")
