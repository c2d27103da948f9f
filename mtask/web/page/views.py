"""What a view gets of a request, and the table of addresses."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

from starlette.requests import Request
from starlette.responses import Response

from mtask.client import AsyncClient
from mtask.features.events.hub import Hub
from mtask.web.access import Caller, Role, client_of
from mtask.web.page import rendering
from mtask.web.page.forms import Form
from mtask.web.page.pulse import Pulse
from mtask.web.page.reads import Reads
from mtask.web.page.sessions import Session
from mtask.web.problems import Forbidden
from mtask.web.rooms import Rooms
from mtask.web.settings import WebSettings

#: The views in the bar: address, title, the key that follows "g" on the keyboard, and whether tenants may not see it.
NAVIGATION = (
    ("/", "Overview", "o", True),
    ("/tasks", "Tasks", "t", False),
    ("/flows", "Flows", "f", False),
    ("/queues", "Queues", "q", True),
    ("/workers", "Workers", "w", True),
    ("/schedules", "Schedules", "s", True),
    ("/handlers", "Handlers", "h", True),
    ("/log", "Log", "l", True),
)


#: The addresses of single things, each below that of their list.
_SINGLE = ("/task", "/flow", "/queue", "/handler")


@dataclass(frozen=True, slots=True)
class Parts:
    """What the views work with."""

    client: AsyncClient
    settings: WebSettings
    hub: Hub
    services: Mapping[str, Any]  #: what features do beside requests, by feature
    reads: Reads
    rooms: Rooms
    pulses: dict[str | None, Pulse]

    def pulse(self, caller: Caller) -> Pulse:
        """Return the pulse of the caller's tenant."""
        if caller.tenant not in self.pulses:
            # The key decides which events it counts: the role is nothing to it.
            self.pulses[caller.tenant] = Pulse(self.hub, self.client, caller)
        return self.pulses[caller.tenant]


@dataclass(slots=True)
class Visit:
    """One request of one session."""

    request: Request
    parts: Parts
    session: Session
    query: Form
    form: Form = field(default_factory=Form)

    @property
    def caller(self) -> Caller:
        """The caller behind the session."""
        return self.session.caller

    @property
    def client(self) -> AsyncClient:
        """The client with which the caller reads and changes tasks."""
        return client_of(self.parts.client, self.caller)

    @property
    def is_fragment(self) -> bool:
        """Whether the page asks only for its live part."""
        headers = self.request.headers
        return headers.get("hx-request") == "true" and headers.get("hx-history-restore-request") != "true"

    @property
    def path(self) -> str:
        """The address of this page, with its query."""
        query = self.request.scope.get("query_string", b"").decode("ascii", "replace")
        return f"{self.request.scope['path']}?{query}" if query else str(self.request.scope["path"])

    def may(self, role: Role) -> bool:
        """Whether the caller may make changes that take this role here."""
        return self.caller.may(role) and not self.parts.settings.is_read_only

    def html(self, template: str, code: int = 200, **context: Any) -> Response:
        """Return a page, or only its live part if the page asks for that."""
        return rendering.html(template, self.context() | context, code)

    def context(self) -> dict[str, Any]:
        """Return what all templates get."""
        is_tenant = self.caller.tenant is not None
        here = self.request.scope["path"]
        return {
            "layout": "fragment.html" if self.is_fragment else "base.html",
            "caller": self.caller,
            "csrf": self.session.csrf,
            "database": self.parts.client.database_name,
            "is_open": self.parts.settings.is_open,
            "is_read_only": self.parts.settings.is_read_only,
            "may_operate": self.may(Role.OPERATE),
            "may_publish": self.may(Role.PUBLISH),
            "navigation": [entry for entry in NAVIGATION if not (entry[3] and is_tenant)],
            "here": "/tasks" if here.startswith("/bulk") else f"{here}s" if here in _SINGLE else here,
            "path": self.path,
            "notes": () if self.is_fragment else self.session.take_notes(),
        }

    def back(self, address: str, text: str) -> Response:
        """Keep a message for the next page, and lead the browser there."""
        self.session.note(text)
        return see(address)


def see(address: str) -> Response:
    """Lead the browser to another page of this server."""
    return Response(None, 303, headers={**rendering.SECURITY, "Location": address, "Cache-Control": "no-store"})


def to_login(path: str) -> str:
    """Return the address at which a session begins, and which leads back."""
    return "/login" if path in ("/", "") else f"/login?next={quote(path, safe='')}"


View = Callable[[Visit], Awaitable[Response]]


@dataclass(frozen=True, slots=True)
class Address:
    """What one address and method does, and who may do it."""

    view: View
    role: Role
    of_database: bool
    is_change: bool

    def check(self, visit: Visit) -> None:
        """Raise Forbidden unless the caller may do it."""
        if self.is_change and visit.parts.settings.is_read_only:
            raise Forbidden("This server is read-only.")
        if not visit.caller.may(self.role):
            has = visit.caller.role.value
            raise Forbidden(f"This takes a token with the role {self.role.value}; yours has the role {has}.")
        if self.of_database and visit.caller.tenant is not None:
            raise Forbidden("This concerns the tasks of all tenants. It takes a token without a tenant.")


class Addresses(dict[tuple[str, str], Address]):
    """The table of addresses, by method and path."""

    def get_at(self, path: str, *, of_database: bool = False) -> Callable[[View], View]:
        """Register a view that only shows."""
        return self._at("GET", path, Role.READ, of_database)

    def post_at(self, path: str, role: Role, *, of_database: bool = False) -> Callable[[View], View]:
        """Register a view that changes something. It gets the form, whose CSRF token was checked."""
        return self._at("POST", path, role, of_database)

    def _at(self, method: str, path: str, role: Role, of_database: bool) -> Callable[[View], View]:
        def register(view: View) -> View:
            self[method, path] = Address(view, role, of_database, method == "POST")
            return view

        return register
