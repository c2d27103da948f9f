"""The page as an ASGI application beside the API: sessions, CSRF, the views, and how errors look."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Mapping
from contextlib import AsyncExitStack
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from mtask.client import AsyncClient
from mtask.errors import DatabaseError, MtaskError
from mtask.features.audit_log.client import acting_as
from mtask.features.events.hub import Hub
from mtask.parts import surfaces
from mtask.web.access import ANYBODY, Caller
from mtask.web.bodies import PATIENCE
from mtask.web.page import overview, rendering, task, tasks
from mtask.web.page.forms import Form, form_of, query_of
from mtask.web.page.reads import Reads
from mtask.web.page.sessions import Session, Sessions, cookie_in, set_cookie
from mtask.web.page.views import Addresses, Parts, Visit, see, to_login
from mtask.web.paths import path_in
from mtask.web.problems import (
    Forbidden,
    InternalError,
    MethodNotAllowed,
    NotFound,
    Problem,
    Refusal,
    TooManyRequests,
    Unauthenticated,
    detail_of,
    status_of,
    title_of,
)
from mtask.web.rooms import Rooms
from mtask.web.settings import WebSettings
from mtask.web.sharing import Counts
from mtask.web.tokens import Logins

logger = logging.getLogger("mtask.web")
#: The longest form with a token, in bytes.
_LARGEST_LOGIN = 8 * 1024
_LOGIN, _LOGOUT, _STATIC, _ICON = "/login", "/logout", "/static/", "/favicon.ico"
_HEADS = frozenset({"GET", "HEAD"})
#: The first segments of the API's addresses.
_OF_THE_API = frozenset({"v1", "jobs", "jobber", "metrics", "healthz", "readyz"})
_FIRST = re.compile("[/:]")


def all_addresses() -> Addresses:
    """Return the table of all addresses of the page but those of the login."""
    found = Addresses()
    for views in (overview, tasks, task, *surfaces.modules("page").values()):
        found |= views.addresses
    return found


class WebPage:
    """The page."""

    def __init__(
        self,
        client: AsyncClient,
        settings: WebSettings,
        logins: Logins,
        hub: Hub,
        services: Mapping[str, Any],
        counts: Counts,
        rooms: Rooms,
    ) -> None:
        self._settings, self._logins = settings, logins
        self._sessions = Sessions()
        self._parts = Parts(client, settings, hub, services, Reads(client, counts), rooms, {})
        self.addresses = all_addresses()
        self._paths = {path for _, path in self.addresses} | {_LOGIN, _LOGOUT}

    def owns(self, path: str, accept: str = "") -> bool:
        """Whether the page answers at this path, and not the API. `accept` is the request's header Accept.

        A browser at an address that nothing serves gets a page that says so.
        """
        if path in self._paths or path == _ICON or path.startswith(_STATIC):
            return True
        return "text/html" in accept and _FIRST.split(path.removeprefix("/"))[0] not in _OF_THE_API

    def caller_of(self, scope: Scope) -> Caller | None:
        """Return the caller whose session the request belongs to, or None."""
        session = self._session(Request(scope))
        return None if session is None else session.caller

    async def end(self) -> None:
        """End all live pages."""
        for pulse in self._parts.pulses.values():
            await pulse.end()
        await self._parts.reads.end()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        request = Request(scope, receive)
        try:
            answer = await self._answer(request)
        except ClientDisconnect:
            return
        if request.method == "HEAD":
            answer = Response(None, answer.status_code, headers=dict(answer.headers))
        await answer(scope, receive, send)

    async def _answer(self, request: Request) -> Response:
        session, fresh = None, None
        try:
            path = request.scope["path"]
            if path.startswith(_STATIC) or path == _ICON:
                return _static(path)
            session = self._session(request)
            if path == _LOGIN:
                return await self._login(request, session)
            if session is None and not self._settings.is_open:
                raise Unauthenticated("This takes a session. Show a token.")
            if session is None:
                fresh, session = self._sessions.begin(ANYBODY)
            answer = await self._view(request, session)
        except (MtaskError, Refusal) as error:
            answer = self._problem(request, session, error)
        except ClientDisconnect:
            raise
        except Exception:
            logger.exception("a page failed")
            mistake = InternalError("This is a mistake of the server. Its log says more.")
            answer = self._problem(request, session, mistake)
        if answer.status_code == 405:
            answer.headers["Allow"] = self._allowed(request.scope["path"])
        if fresh is not None:
            answer.headers["Set-Cookie"] = set_cookie(request, fresh)
        return answer

    def _allowed(self, path: str) -> str:
        """Return the methods that an address takes, as the header Allow has them."""
        return ", ".join(sorted(method for method, known in self.addresses if known == path)) or "POST"

    def _session(self, request: Request) -> Session | None:
        value = cookie_in(request)
        return None if value is None else self._sessions.session_of(value)

    async def _view(self, request: Request, session: Session) -> Response:
        async with AsyncExitStack() as held:
            return await self._view_holding(request, session, held)

    async def _view_holding(self, request: Request, session: Session, held: AsyncExitStack) -> Response:
        path, method = request.scope["path"], "GET" if request.method in _HEADS else request.method
        form = Form()
        if method == "POST":
            form = await self._checked_form(request, session, held)
        if path == _LOGOUT and method == "POST":
            self._sessions.end(session)
            left = see(_LOGIN)
            left.headers["Set-Cookie"] = set_cookie(request, "")
            return left
        address = self.addresses.get((method, path))
        if address is None and path not in self._paths:
            raise NotFound("There is no such address.")
        if address is None:
            raise MethodNotAllowed("This address does not take this method.")
        visit = Visit(request, self._parts, session, query_of(request), form)
        address.check(visit)
        # What the visit changes goes into the action log under the name of the session's token.
        with acting_as(session.caller.name, "web"):
            return await address.view(visit)

    async def _checked_form(self, request: Request, session: Session, held: AsyncExitStack) -> Form:
        """Return the form of a change. Its page must be one of this server, and of this session."""
        _check_origin(request)
        bodies = self._parts.rooms.bodies

        async def hold(length: int) -> None:
            await held.enter_async_context(bodies.awaited(session.caller, length, PATIENCE))

        form = await form_of(request, self._settings.max_body, hold)
        if not session.proves(form.exact("csrf") or request.headers.get("x-csrf-token")):
            raise Forbidden("This form belongs to another session. Reload the page, and send it again.")
        return form

    async def _login(self, request: Request, session: Session | None) -> Response:
        """Exchange a token for a session.

        A link with a token leads to a page with a button. Else a link on another site, or in a mail, could sign a
        visitor in under the token of somebody who reads along.
        """
        is_sent = request.method == "POST"
        form = query_of(request)
        if is_sent:
            _check_origin(request)
            form = await form_of(request, _LARGEST_LOGIN)
        target = _own_address(form.exact("next"))
        token = form.text("token")
        if self._settings.is_open or (session is not None and not token):
            return see(target)
        if not token:
            return rendering.html("login.html", {"target": target, "wrong": ""})
        caller = self._logins.caller_of(token, request.scope["mtask.address"])
        if caller is None:
            wrong = "The server does not know this token."
            return rendering.html("login.html", {"target": target, "wrong": wrong}, 401)
        if not is_sent:
            now = None if session is None else session.caller.name
            return rendering.html("link.html", {"target": target, "token": token, "caller": caller, "now": now})
        if session is not None:
            self._sessions.end(session)
        value, _ = self._sessions.begin(caller)
        answer = see(target)
        answer.headers["Set-Cookie"] = set_cookie(request, value)
        return answer

    def _problem(self, request: Request, session: Session | None, error: Problem) -> Response:
        """Return the page that tells of an error."""
        if isinstance(error, DatabaseError):
            logger.warning("%s %s: %s: %s", request.method, request.url.path, type(error).__name__, detail_of(error))
        if isinstance(error, Unauthenticated):
            is_page = request.method in _HEADS and request.headers.get("hx-request") != "true"
            if is_page and request.scope["path"] != "/live":
                return see(to_login(request.scope["path"] + _query(request)))
            return rendering.html("login.html", {"target": "/", "wrong": "The session has ended."}, 401)
        status = status_of(type(error))
        shown = ANYBODY if session is None else session.caller
        context = {"title": title_of(type(error)), "detail": shown.shown_text(detail_of(error)), "status": status}
        if session is None:
            bare = rendering.html("bare.html", context, status)
            if isinstance(error, TooManyRequests):
                bare.headers["Retry-After"] = str(math.ceil(error.delay))
            return bare
        visit = Visit(request, self._parts, session, Form())
        again = request.method in _HEADS and isinstance(error, DatabaseError)
        back = _own_address(path_in(request.headers.get("referer", "")) or None)
        answer = visit.html("problem.html", status, **context, again=again, back=back)
        if status == 503:
            answer.headers["Retry-After"] = "2"
        return answer


def _query(request: Request) -> str:
    query = request.scope.get("query_string", b"").decode("ascii", "replace")
    return f"?{query}" if query else ""


def _static(path: str) -> Response:
    found = rendering.static("/static/icon.svg" if path == _ICON else path)
    if found is None:
        raise NotFound("There is no such file.")
    return found


def _check_origin(request: Request) -> None:
    """Refuse a form that names no page of this server. The gate has refused other sites; browsers name all others."""
    if request.headers.get("origin") is None:
        raise Forbidden("A form must come from a page of this server.")


def _own_address(given: str | None) -> str:
    """Return the address if it is one of this server, else the overview."""
    is_own = given is not None and given.startswith("/") and given[1:2] not in ("/", "\\") and given.isprintable()
    return given if is_own and given is not None and given.isascii() else "/"
