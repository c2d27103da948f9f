"""Sends requests byte by byte: no client library mends them."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from http.cookies import SimpleCookie
from urllib.parse import urlencode

from tests.faults.web.hostile import Known, Request
from tests.faults.web.serving import Target

#: Times in seconds: the longest wait for an answer; for an answer to what is no HTTP; for what follows in a stream.
_PATIENCE, _SHORT, _GLANCE = 60.0, 2.0, 0.3
_CSRF = re.compile(r'name="csrf" value="([^"]+)"')


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to a request. is_whole: the server ended it itself."""

    status: int
    headers: Sequence[tuple[str, str]]
    body: bytes
    is_whole: bool
    seconds: float = 0.0  #: how long it took

    def header(self, name: str) -> str:
        """Return a header; "" if there is none."""
        return next((value for each, value in self.headers if each == name), "")

    @property
    def text(self) -> str:
        """The body as text."""
        return self.body.decode("utf-8", "replace")


class Sender:
    """Sends requests to one server, with its tokens and sessions."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._cookies: dict[str, str] = {}

    async def know(self) -> Known:
        """Begin a session for each token, and learn what a client learns: cursors, plans, ids and ETags."""
        known = Known()
        for name, token in self._target.tokens.items():
            origin = f"http://127.0.0.1:{self._target.port}".encode()
            headers = (("Content-Type", b"application/x-www-form-urlencoded"), ("Origin", origin))
            answer = await self._asked("POST", "/login", None, urlencode({"token": token}).encode(), headers=headers)
            cookie = SimpleCookie(answer.header("set-cookie"))
            self._cookies[name] = "; ".join(f"{each}={morsel.value}" for each, morsel in cookie.items())
            page = await self._asked("GET", "/tasks", None, session=name)
            found = _CSRF.search(page.text)
            if found is not None:
                known.csrf[name] = found[1]
        for path in ("/v1/tasks?limit=2", "/v1/tasks?status=SUCCESS&limit=2", "/v1/tasks?status=INIT&limit=2"):
            known.cursors += re.findall(r'"next_cursor":"([^"]+)"', (await self._asked("GET", path, "operate")).text)
        actions = (await self._asked("GET", "/v1/actions?limit=2", "operate")).text
        known.cursors += re.findall(r'"next_cursor":"([^"]+)"', actions)
        for action in ("cancel", "remove"):
            body = b'{"filter": {"key": ["later5"]}, "dry_run": true}'
            planned = await self._asked("POST", f"/v1/bulk/{action}", "operate", body)
            known.plans += re.findall(r'"plan":"([^"]+)"', planned.text)
        known.etags.append((await self._asked("GET", "/v1/tasks/echo/k1", "operate")).header("etag"))
        stream = Request("known", "GET", b"/v1/events", (), b"", "operate", is_stream=True)
        events = await self.send(stream)
        known.event_ids += re.findall(r"^id: (\S+)", events.text if events else "", re.MULTILINE)
        missing = [name for name in known.__slots__ if not getattr(known, name)]
        if missing:
            raise RuntimeError(f"a client that uses the server learns no {', '.join(missing)}")
        return known

    async def _asked(
        self,
        method: str,
        target: str,
        token: str | None,
        body: bytes = b"",
        session: str | None = None,
        headers: Sequence[tuple[str, bytes]] = (),
    ) -> Answer:
        headers = headers or ((("Content-Type", b"application/json"),) if body else ())
        answer = await self.send(Request("known", method, target.encode(), headers, body, token, session))
        if answer is None or answer.status >= 400:
            raise RuntimeError(f"{method} {target}: {answer}")
        return answer

    async def send(self, request: Request) -> Answer | None:
        """Send a request; return the answer, or None if the server ended the connection without one."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self._target.port)
        try:
            with suppress(ConnectionError):  # it may answer, and leave, before it has read all
                writer.write(self._head(request) + request.body)
                await writer.drain()
            return await _answer(reader, writer, request)
        finally:
            writer.close()
            with suppress(ConnectionError, TimeoutError):
                await asyncio.wait_for(writer.wait_closed(), _SHORT)

    def _head(self, request: Request) -> bytes:
        given = {name.lower() for name, _ in request.headers}
        headers: list[tuple[str, bytes]] = []
        if "host" not in given:
            headers.append(("Host", f"127.0.0.1:{self._target.port}".encode()))
        if request.token is not None and "authorization" not in given:
            headers.append(("Authorization", f"Bearer {self._target.tokens[request.token]}".encode()))
        if request.session is not None and "cookie" not in given:
            headers.append(("Cookie", self._cookies[request.session].encode()))
        headers += request.headers
        if request.has_length and not given & {"content-length", "transfer-encoding"}:
            headers.append(("Content-Length", str(len(request.body)).encode()))
        if "connection" not in given:
            headers.append(("Connection", b"close"))
        lines = [f"{name}: ".encode() + value for name, value in headers]
        first = request.method.encode() + b" " + request.target + b" HTTP/1.1"
        return b"\r\n".join([first, *lines, b"", b""])


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: Request) -> Answer | None:
    received, is_whole = b"", False
    loop = asyncio.get_running_loop()
    begun = loop.time()
    end = loop.time() + (_SHORT if request.is_broken else _PATIENCE)
    is_ended = not request.is_broken
    try:
        while True:
            async with asyncio.timeout_at(end):
                part = await reader.read(1 << 20)
            if not part:
                is_whole = True
                break
            received += part
            head = received.partition(b"\r\n\r\n")[0].lower()
            if request.is_stream and b"text/event-stream" in head:
                end = min(end, loop.time() + _GLANCE)
    except ConnectionError:
        pass
    except TimeoutError:
        if not is_ended:
            # The server waits for the rest of a request that is none: a client that leaves gets no answer.
            with suppress(ConnectionError, OSError):
                writer.write_eof()
    return _parsed(received, is_whole, loop.time() - begun)


def _parsed(received: bytes, is_whole: bool, seconds: float) -> Answer | None:
    while True:
        head, separator, body = received.partition(b"\r\n\r\n")
        if not separator:
            return None
        first, *lines = head.decode("latin-1").split("\r\n")
        status = int(first.split()[1])
        if status >= 200:
            break
        received = body  # "100 Continue" goes before the answer
    headers = [(name.lower(), value.strip()) for name, _, value in (line.partition(":") for line in lines)]
    if ("transfer-encoding", "chunked") in headers:
        body = _unchunked(body)
    # A server that refuses a large body, and reads no more of it, may reset the connection behind its answer.
    is_whole |= ("content-length", str(len(body))) in headers
    return Answer(status, headers, body, is_whole, seconds)


def _unchunked(body: bytes) -> bytes:
    parts = []
    while body:
        size, _, rest = body.partition(b"\r\n")
        length = int(size or b"0", 16)
        if not length:
            break
        parts.append(rest[:length])
        body = rest[length + 2 :]
    return b"".join(parts)
