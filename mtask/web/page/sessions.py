"""Sessions: whoever shows a token once gets a cookie in its place. They live in memory and end with the server."""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time
from collections import Counter, OrderedDict
from dataclasses import dataclass, field
from http.cookies import CookieError, SimpleCookie

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import Scope

from mtask.web.access import Caller

#: The time after which a session ends, in seconds, and the most sessions at once. Then the tenant, or the token without
#: one, that has most of them loses the longest unused one; of a tenant's tokens, that which has most.
LIFE, MOST = 12 * 3600, 1_000
#: The most messages that wait to be shown in a session, and their longest length.
_MOST_NOTES, _LONGEST_NOTE = 5, 2_000


@dataclass(frozen=True, slots=True)
class Note:
    """A message about a change, which the next page shows."""

    text: str
    kind: str = "done"  #: "done" or "wrong"


@dataclass(slots=True)
class Session:
    """One session of one browser."""

    caller: Caller
    csrf: str = field(repr=False)
    end: float = field(repr=False)
    digest: str = field(repr=False)
    notes: list[Note] = field(default_factory=list)

    @property
    def owner(self) -> str:
        """Whose share of the sessions this is one of."""
        return f"token {self.caller.name}" if self.caller.tenant is None else f"tenant {self.caller.tenant}"

    def note(self, text: str, kind: str = "done") -> None:
        """Keep a message for the next page."""
        self.notes = [*self.notes[-_MOST_NOTES + 1 :], Note(text[:_LONGEST_NOTE], kind)]

    def take_notes(self) -> list[Note]:
        """Return the messages that no page has shown yet."""
        taken, self.notes = self.notes, []
        return taken

    def proves(self, given: str | None) -> bool:
        """Whether this is the session's CSRF token."""
        return given is not None and hmac.compare_digest(self.csrf.encode(), given.encode("utf-8", "replace"))


class Sessions:
    """The sessions of one server."""

    def __init__(self) -> None:
        self._by_digest: OrderedDict[str, Session] = OrderedDict()
        self._counts: Counter[str] = Counter()

    def begin(self, caller: Caller) -> tuple[str, Session]:
        """Return the cookie's value and the session."""
        value = secrets.token_urlsafe(32)
        made = Session(caller, secrets.token_urlsafe(32), time.monotonic() + LIFE, _digest(value))
        self._by_digest[made.digest] = made
        self._counts[made.owner] += 1
        if len(self._by_digest) > MOST:
            owner = max(self._counts, key=lambda each: (self._counts[each], each == made.owner))
            of_owner = [each for each in self._by_digest.values() if each.owner == owner]
            (token, _), *_ = Counter(each.caller.name for each in of_owner).most_common(1)
            self.end(next(each for each in of_owner if each.caller.name == token))
        return value, made

    def session_of(self, value: str) -> Session | None:
        """Return the session of a cookie, or None."""
        found = self._by_digest.get(_digest(value))
        if found is None or found.end <= time.monotonic():
            if found is not None:
                self.end(found)
            return None
        self._by_digest.move_to_end(found.digest)
        return found

    def end(self, session: Session) -> None:
        """End a session."""
        if self._by_digest.pop(session.digest, None) is not None:
            self._counts[session.owner] -= 1
            if not self._counts[session.owner]:
                del self._counts[session.owner]


def _digest(value: str) -> str:
    return hashlib.sha256(value.encode("utf-8", "replace")).hexdigest()


def scheme_of(scope: Scope) -> str:
    """Return the scheme that the browser uses. A proxy tells it. No page of another site can make a browser lie."""
    told = Headers(scope=scope).get("x-forwarded-proto", "").partition(",")[0].strip().lower()
    return "https" if told == "https" else str(scope["scheme"])


def is_over_tls(request: Request) -> bool:
    """Whether the browser uses TLS. A lie only keeps the liar's own cookie from coming back."""
    return scheme_of(request.scope) == "https"


def cookie_name(request: Request) -> str:
    """Return the name of the cookie. It carries the port, because a browser sends cookies to all ports of a host."""
    port = (request.scope.get("server") or ("", 0))[1]
    return f"{'__Host-' if is_over_tls(request) else ''}mtask-{port}"


def cookie_in(request: Request) -> str | None:
    """Return the value of the session's cookie, or None."""
    try:
        found = SimpleCookie("; ".join(request.headers.getlist("cookie"))).get(cookie_name(request))
    except CookieError:
        return None
    return None if found is None else found.value


def set_cookie(request: Request, value: str) -> str:
    """Return the header Set-Cookie that begins a session; with the value "", the header that ends it."""
    life = LIFE if value else 0
    secure = "; Secure" if is_over_tls(request) else ""
    return f"{cookie_name(request)}={value}; Path=/; Max-Age={life}; HttpOnly; SameSite=Strict{secure}"
