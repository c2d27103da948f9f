"""Hostile requests: what strangers, broken clients and attackers send to the API and to the page. One seed, one run."""

from __future__ import annotations

import base64
import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote, urlencode

from tests.faults.web.surface import BODIES, FORMS, LISTS, SEGMENTS, VIEWS
from tests.faults.web.texts import JSON_ODD, NO_TEXT, TEXTS

_NAMES = ("echo", "refuse", "mail", "k1", "k2", "later1", "paused", "queue1", "acme:k1", "lookup1")


@dataclass(frozen=True, slots=True)
class Request:
    """One request, as it goes over the wire."""

    label: str
    method: str
    target: bytes
    headers: Sequence[tuple[str, bytes]] = ()
    body: bytes = b""
    token: str | None = None  #: the name of the token that it shows
    session: str | None = None  #: the name of the token whose session it has
    #: Whether HTTP itself is broken: then the HTTP server may answer in place of mtask, or end the connection.
    is_broken: bool = False
    is_stream: bool = False  #: whether the answer does not end
    has_length: bool = True  #: whether the header Content-Length is to be added

    @property
    def shown(self) -> str:
        """The request for readers."""
        return f"{self.label}: {self.method} {self.target[:200]!r} {self.headers!r:.300} {self.body[:200]!r}"


@dataclass(slots=True)
class Known:
    """What a client knows that has used the server before."""

    #: Cursors by the list that gave them, plans of bulk changes, tokens of events, and ETags.
    cursors: list[str] = field(default_factory=list)
    plans: list[str] = field(default_factory=list)
    event_ids: list[str] = field(default_factory=list)
    etags: list[str] = field(default_factory=list)
    #: CSRF tokens by the name of the session's token.
    csrf: dict[str, str] = field(default_factory=dict)


_METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT", "PROPFIND", "get", "X")
_JSON = ("Content-Type", b"application/json")
_FORM = ("Content-Type", b"application/x-www-form-urlencoded")
MEBIBYTE = 1024 * 1024


class Hostile:
    """Makes hostile requests."""

    def __init__(self, seed: int, known: Known, port: int) -> None:
        self._chance = random.Random(seed)
        self._known = known
        self._origin = f"http://127.0.0.1:{port}".encode()
        self._host = f"127.0.0.1:{port}".encode()
        self._kinds: Sequence[tuple[int, Callable[[], Request]]] = (
            (22, self._segments),
            (20, self._query),
            (24, self._body),
            (8, self._headers),
            (6, self._forged),
            (2, self._large),
            (3, self._stream),
            (4, self._broken_http),
            (26, self._view),
            (20, self._form),
            (5, self._bad_form),
        )

    def requests(self, count: int) -> Iterator[Request]:
        """Yield this many requests."""
        weights = [weight for weight, _ in self._kinds]
        for _ in range(count):
            yield self._chance.choices(self._kinds, weights)[0][1]()

    # --- parts ------------------------------------------------------------------------------------------

    def _of(self, several: Sequence[Any]) -> Any:
        return self._chance.choice(several)

    def _is(self, probability: float) -> bool:
        return self._chance.random() < probability

    def _text(self) -> str:
        made = str(self._of(_NAMES) if self._is(0.25) else self._of(TEXTS))
        return f"{made}{self._of(TEXTS)}" if self._is(0.1) else made

    def _token(self) -> str | None:
        token: str | None = self._chance.choices(("operate", "acme", "publish", "read", None), (12, 4, 1, 1, 1))[0]
        return token

    def _encoded(self, text: str) -> str:
        """Return a text in an address: percent-encoded, partly so, or as no text at all."""
        way = self._chance.random()
        if way < 0.06:
            return str(self._of(NO_TEXT))
        if way < 0.16:
            return quote(text, safe="/:;?&=@!$'()*,~")
        if way < 0.2:
            return quote(quote(text, safe=""), safe="")
        return quote(text, safe="")

    def _pairs(self, names: Sequence[str], *, every: bool = False) -> str:
        """Return a query of some of these names, or of all, with hostile values."""
        chosen = list(names) if every else [name for name in names if self._is(0.5 if len(names) < 4 else 0.25)]
        pairs = [f"{name}={self._encoded(self._text())}" for name in chosen]
        if pairs and self._is(0.1):
            pairs.append(self._of(pairs))
        if self._is(0.08):
            pairs.append(f"{self._encoded(self._text())}={self._encoded(self._text())}")
        if "cursor" in names and self._known.cursors and self._is(0.3):
            pairs.append(f"cursor={quote(self._bent(self._of(self._known.cursors)))}")
        if self._is(0.02):
            pairs += ["a=b"] * 300
        self._chance.shuffle(pairs)
        return "&".join(pairs)

    def _bent(self, text: str) -> str:
        """Return an opaque text as it is, cut, changed, or made anew with other values in it."""
        way = self._chance.randrange(6)
        if way == 0 or not text:
            return text
        if way == 1:
            return text[: self._chance.randrange(len(text))]
        if way == 2:
            at = self._chance.randrange(len(text))
            return f"{text[:at]}{self._of('AZ09-_.=/+%é')}{text[at + 1 :]}"
        if way == 3:
            return str(text * self._chance.randrange(2, 200))
        inner = [self._of(["created", "finished", "due", "zq"]), self._of([0, -1, 2**70, 1.5, "x", None]), self._text()]
        try:
            inner = json.loads(base64.urlsafe_b64decode(text.partition(".")[0] + "==").decode())
            if isinstance(inner, list):
                inner[self._chance.randrange(len(inner))] = self._of(
                    [None, 2**70, -(10**18), self._text(), [], {}, True]
                )
        except ValueError:
            pass
        made = base64.urlsafe_b64encode(json.dumps(inner).encode()).decode().rstrip("=")
        return f"{made}.{text.partition('.')[2]}" if "." in text else made

    def _json(self, value: Any) -> str:
        """Return a value as JSON with one place in it that is hostile."""
        if isinstance(value, dict) and value and self._is(0.85):
            name = self._of(list(value))
            parts = [(each, self._json(one) if each == name else json.dumps(one)) for each, one in value.items()]
            if self._is(0.08):
                parts.append((self._text(), json.dumps(self._text())))
            if self._is(0.05):
                parts.append(parts[0])
            if self._is(0.05):
                parts.pop(0)
            return "{" + ", ".join(f"{json.dumps(each)}: {text}" for each, text in parts) + "}"
        if isinstance(value, list) and value and self._is(0.7):
            at = self._chance.randrange(len(value))
            return "[" + ", ".join(self._json(one) if at == i else json.dumps(one) for i, one in enumerate(value)) + "]"
        if self._is(0.5):
            return json.dumps(self._text(), ensure_ascii=self._is(0.5))
        if self._is(0.2):
            return json.dumps({self._text(): self._text(), "a": [self._text()]})
        if self._is(0.2):
            return json.dumps(
                self._of([True, False, None, 0, -1, 1.5, 2**31, 2**53 + 1, 2**63 - 1, 2**63, [], {}, [[]]])
            )
        return str(self._of(JSON_ODD))

    # --- requests to the API ----------------------------------------------------------------------------

    def _segments(self) -> Request:
        method, path = self._of(SEGMENTS)
        if self._is(0.08):
            method = self._of(_METHODS)
        given = [self._encoded(self._of(_NAMES) if self._is(0.2) else self._text()) for _ in range(path.count("{}"))]
        target = path.format(*given)
        if self._is(0.03):
            target += self._of(("/", "/..", ":zq", "?", "?zq=1", "//", ":cancel:cancel", "/position/position"))
        has_body = method in ("PUT", "PATCH") or (path.startswith("/v1/bulk/") and method == "POST")
        body = b"{}" if has_body else b""
        if "/schedules/" in path and method == "PUT":
            body = b'{"name": "echo", "every": 3600}'
        return self._api("segments", method, target, body)

    def _query(self) -> Request:
        path, names = self._of(list(LISTS.items()))
        return self._api("query", "GET", f"{path}?{self._pairs(names, every=path.startswith('/v1/task/'))}")

    def _body(self) -> Request:
        method, target, valid = self._of(BODIES)
        text = self._json(valid)
        if self._is(0.08):
            text = text[: self._chance.randrange(len(text) + 1)]
        if self._is(0.05):
            text = str(self._of(JSON_ODD))
        encoding = self._of(("utf-8",) * 12 + ("utf-16", "latin-1", "utf-7"))
        body = text.encode(encoding, "replace")
        if self._is(0.03):
            body += bytes(self._chance.randrange(256) for _ in range(8))
        return self._api("body", method, target, body)

    def _api(self, label: str, method: str, target: str, body: bytes = b"", *headers: tuple[str, bytes]) -> Request:
        given = [*headers, *([_JSON] if body else [])]
        return Request(label, method, target.encode("ascii", "replace"), given, body, self._token())

    def _headers(self) -> Request:
        text = self._text().encode("utf-8", "replace").replace(b"\r", b" ").replace(b"\n", b" ").replace(b"\0", b" ")
        text = text.strip() or b"zq"
        tag = self._of(self._known.etags or ['"zq"']).encode()
        name, value = self._of(
            (
                ("If-Match", self._of((text, tag, b"W/" + tag, tag + b", " + tag, b"*", b'""', b'"' + text + b'"'))),
                ("If-None-Match", self._of((text, tag, b"*", b"W/" + tag))),
                ("Idempotency-Key", text),
                ("Prefer", self._of((b"wait=0", b"wait=-1", b"wait=1e9", b'wait="1"', b"respond-async, wait=1", text))),
                ("Last-Event-ID", text),
                (
                    "Content-Type",
                    self._of(
                        (
                            text,
                            b"text/plain",
                            b"application/json; charset=utf-16",
                            b"application/json;;;=",
                            b"multipart/form-data; boundary=x",
                            b"application/x-www-form-urlencoded",
                            b"application/jsonx",
                            b"/",
                        )
                    ),
                ),
                ("Content-Encoding", self._of((b"gzip", b"br", b"identity, gzip", text))),
                ("Accept", self._of((b"text/html", b"*/*;q=zq", text))),
                (
                    "Authorization",
                    self._of(
                        (
                            b"Bearer",
                            b"Bearer ",
                            b"Bearer zq zq",
                            b"Basic enE6enE=",
                            b"bearer " + text,
                            b"Bearer " + b"x" * 600,
                            b"Bearer \xff\xfe",
                            text,
                        )
                    ),
                ),
                ("Cookie", self._of((b"mtask-1=zq", text, b"=; ;;", b'$Version=1; a="', b"a=" + b"x" * 3000))),
                ("Origin", self._of((b"null", b"http://evil.example", self._origin, b"://", text, b"http://[zq"))),
                ("X-Forwarded-Proto", b"https"),
                ("X-Forwarded-For", text),
                ("Range", b"bytes=0-1"),
                ("Expect", b"100-continue"),
                ("X-HTTP-Method-Override", b"DELETE"),
            )
        )
        method, target, valid = self._of(BODIES) if self._is(0.6) else ("GET", "/v1/tasks/echo/k1", None)
        body = b"" if valid is None else json.dumps(valid).encode()
        given = [(name, value)]
        if body and name != "Content-Type":
            given.append(_JSON)
        if self._is(0.1):
            given.append((name, value))  # a header that occurs twice
        token = None if name in ("Authorization", "Cookie") and self._is(0.8) else self._token()
        is_broken = name in ("Expect", "Content-Type") or any(one < 32 or one == 127 for one in value)
        return Request("headers", method, target.encode(), given, body, token, is_broken=is_broken)

    def _forged(self) -> Request:
        """Return a request with a cursor, a plan or an event's id of another list, cut, or made by the caller."""
        way = self._chance.randrange(4)
        if way == 0:
            cursor = quote(self._bent(self._of(self._known.cursors or ["zq"])), safe="")
            criteria = self._of(
                ("", "&status=FAIL", "&status=INIT", "&key_prefix=k", "&lookup.user_id=1", "&name=echo")
            )
            return self._api("forged", "GET", f"{self._of(('/v1/tasks', '/v1/actions'))}?cursor={cursor}{criteria}")
        if way == 1:
            plan = self._bent(self._of(self._known.plans or ["zq.zq"]))
            body = json.dumps({"plan": plan}).encode()
            return self._api("forged", "POST", f"/v1/bulk/{self._of(('cancel', 'retry', 'remove'))}", body)
        if way == 2:
            after = quote(self._bent(self._of(self._known.event_ids or ["zq"])), safe="")
            return Request(
                "forged", "GET", f"/v1/events?after={after}".encode(), (), b"", self._token(), is_stream=True
            )
        fields = [
            ("csrf", self._known.csrf.get("operate", "")),
            ("plan", self._bent(self._of(self._known.plans or [""]))),
        ]
        fields.append(("action", self._of(("cancel", "retry", "zq"))))
        return self._page_form("forged", "/bulk/run", fields)

    def _large(self) -> Request:
        """Return a request of about a mebibyte: just allowed, or just too large."""
        size = MEBIBYTE + self._of((-400_000, -200, 0, 1, 5_000))
        filling = self._of(("x", "é", "\u202e", "<", '\\"', "[", " "))
        way = self._chance.randrange(4)
        if way == 0:
            text = json.dumps({"name": "echo", "params": filling * (size // len(json.dumps(filling)[1:-1]) - 40)})
            return self._api("large", "POST", "/v1/tasks", text.encode()[: size + 1])
        if way == 1:
            return self._api(
                "large", "POST", "/v1/tasks:batch", json.dumps({"tasks": [{"name": "echo"}] * 3000}).encode()
            )
        if way == 2:
            fields = [("csrf", self._known.csrf.get("operate", "")), ("params", filling * (size // 12))]
            return self._page_form("large", "/task/retry?name=refuse&key=k1", fields)
        return self._api("large", "PUT", "/v1/tasks/echo/large", b"[" * size)

    def _stream(self) -> Request:
        target = f"/v1/events?{self._pairs(('name', 'queue', 'key', 'kind', 'after'))}"
        session = None
        if self._is(0.3):
            target, session = "/live", "operate"
        event_id = self._bent(self._of(self._known.event_ids or ["zq"])).encode("ascii", "replace")
        given = [("Last-Event-ID", event_id)] if self._is(0.4) else []
        method = "HEAD" if self._is(0.1) else "GET"
        return Request("stream", method, target.encode(), given, b"", self._token(), session, is_stream=True)

    def _broken_http(self) -> Request:
        """Return a request that breaks HTTP's own rules."""
        body = b'{"name": "echo"}'
        token = ("X-Zq", b"1")
        ways: Sequence[tuple[Sequence[tuple[str, bytes]], bytes, bool]] = (
            ([_JSON, ("Content-Length", b"5")], body, False),
            ([_JSON, ("Content-Length", b"-1")], body, False),
            ([_JSON, ("Content-Length", b"zq")], body, False),
            ([_JSON, ("Content-Length", b"\xd9\xa1\xd9\xa2")], body, False),
            ([_JSON, ("Content-Length", b"99999999999999999999999")], body, False),
            ([_JSON, ("Content-Length", b"16"), ("Content-Length", b"17")], body, False),
            ([_JSON, ("Content-Length", b"2097152")], body, False),
            ([_JSON, ("Transfer-Encoding", b"chunked")], b"zq\r\n" + body, False),
            ([_JSON, ("Transfer-Encoding", b"chunked")], b"10\r\n" + body + b"\r\n0\r\n\r\n", False),
            ([_JSON, ("Transfer-Encoding", b"gzip, chunked")], b"0\r\n\r\n", False),
            ([_JSON, ("Transfer-Encoding", b"chunked"), ("Content-Length", b"3")], b"0\r\n\r\n", False),
            ([("X-Zq", b"a" * 70_000)], b"", True),
            ([("X-Zq", b"a\0b")], b"", True),
            ([("X Zq", b"1")], b"", True),
            ([("Host", b"evil.example")], b"", True),
            ([("Host", b"")], b"", True),
            ([("Host", self._host), ("Host", b"evil.example")], b"", True),
            ([token] * 300, b"", True),
            ([("Upgrade", b"websocket"), ("Connection", b"Upgrade")], b"", True),
        )
        headers, content, has_length = self._of(ways)
        target = self._of(
            (b"/v1/tasks", b"/v1/tasks", b"*", b"http://evil.example/v1/tasks", b"/v1/t\xc3\xa9", b"v1", b"/a b")
        )
        method = "POST" if content else self._of(_METHODS)
        return Request("broken", method, target, headers, content, self._token(), is_broken=True, has_length=has_length)

    # --- requests to the page ---------------------------------------------------------------------------

    def _view(self) -> Request:
        path, names = self._of(list(VIEWS.items()))
        query = self._pairs(names, every=path in ("/task", "/flow", "/queue"))
        headers = [("HX-Request", b"true")] if self._is(0.25) else []
        if self._is(0.05):
            came = self._of((b"http://[", self._origin + b"/queues", self._text().encode("ascii", "replace")))
            headers.append(("Referer", came.translate(None, b"\r\n\0")))
        method = self._of(_METHODS[:8]) if self._is(0.05) else "GET"
        session = self._chance.choices(("operate", "acme", "read", None), (12, 4, 2, 1))[0]
        target = f"{path}?{query}" if query else path
        if path == "/task" and self._is(0.6):
            name, key = self._of(
                (("echo", "bad3"), ("refuse", ""), ("echo", ""), ("echo", "lookup3"), ("echo", "worker4"))
            )
            target = f"/task?name={name}&key={quote(key or self._of(TEXTS), safe='')}"
        return Request(
            "view", method, target.encode("ascii", "replace"), headers, b"", None, session, is_broken=self._odd(headers)
        )

    def _odd(self, headers: Sequence[tuple[str, bytes]]) -> bool:
        return any(one < 32 or one == 127 for _, value in headers for one in value)

    def _form(self) -> Request:
        path, (names, fields) = self._of(list(FORMS.items()))
        target = f"{path}?{self._pairs(names, every=True)}" if names else path
        session = "operate" if self._is(0.8) else "acme"
        pairs = [("csrf", self._known.csrf.get(session, ""))]
        chosen = [name for name in fields if self._is(0.7)]
        pairs += [(name, self._json({"a": 1}) if name == "params" else self._text()) for name in chosen]
        known = {"action": "retry", "kind": self._of(("cron", "every", "at")), "name": "echo", "id": "page"}
        pairs = [(name, known[name]) if name in known and self._is(0.5) else (name, value) for name, value in pairs]
        return self._page_form("form", target, pairs, session)

    def _page_form(
        self, label: str, target: str, pairs: Sequence[tuple[str, str]], session: str | None = "operate"
    ) -> Request:
        body = urlencode([(name, value.encode("utf-8", "replace")) for name, value in pairs]).encode()
        given = [_FORM, ("Origin", self._origin)]
        if self._is(0.1):
            given.append(
                ("Referer", self._of((b"http://[", self._origin + b"/queues", b"//evil.example", b"/a?b=c#d")))
            )
        return Request(label, "POST", target.encode("ascii", "replace"), given, body, None, session)

    def _bad_form(self) -> Request:
        """Return a forged form: with another session's CSRF token or none, from elsewhere, or of another type."""
        path = self._of([path for path in FORMS if path != "/login"])
        target = f"{path}?{self._pairs(FORMS[path][0], every=True)}"
        csrf = self._of(
            ("", "zq", self._known.csrf.get("acme", ""), self._known.csrf.get("operate", "")[:-1], "é" * 43)
        )
        own = self._known.csrf.get("operate", "")
        pairs, given = [("csrf", csrf)], [_FORM, ("Origin", self._origin)]
        way = self._chance.randrange(6)
        if way == 1:
            pairs, given = (
                [("csrf", own)],
                [_FORM, ("Origin", self._of((b"null", b"http://evil.example", b"http://[", b"zq")))],
            )
        if way == 2:
            pairs, given = [("csrf", own)], [_FORM]
        if way == 3:
            pairs, given = (
                [("csrf", own)],
                [self._of((("Content-Type", b"text/plain"), _JSON)), ("Origin", self._origin)],
            )
        body = urlencode(pairs).encode()
        if way == 4:
            body = self._of((b"%ff=%ff", b"csrf=%zz", b"\xff\xfe", b"&&&&", b"a=b&" * 5000, b"csrf", b"=", b"%"))
        return Request(
            "bad form", "POST", target.encode("ascii", "replace"), given, body, None, self._of(("operate", None))
        )
