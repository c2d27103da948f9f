"""A real server for tests: the API on uvicorn in this process, on a port of its own, and requests to it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import uvicorn
from pymongo import AsyncMongoClient

from mtask import AsyncClient, Encryption
from mtask.features.events.hub import Hub
from mtask.web.access import Caller, Role
from mtask.web.gate import Connections, Gate, config_of
from mtask.web.server import build, listen
from mtask.web.settings import WebSettings
from mtask.web.tokens import Token, Tokens, digest_of

#: Tokens are the names of their callers: "read", "publish", "operate", "acme" and "umbra" (two tenants).
CALLERS = (
    *(Caller(role.value, role) for role in Role),
    *(Caller(tenant, Role.OPERATE, tenant) for tenant in ("acme", "umbra")),
)
TOKENS = Tokens(Token(caller, digest_of(caller.name)) for caller in CALLERS)


@dataclass(slots=True)
class Serving:
    """A running server and its parts."""

    url: str
    port: int
    client: AsyncClient
    hub: Hub
    gate: Gate
    connections: Connections
    http: httpx.AsyncClient

    async def ask(self, method: str, path: str, *, token: str | None = "operate", **given: Any) -> httpx.Response:
        """Send a request with this token."""
        headers = dict(given.pop("headers", {}))
        if token is not None:
            headers["Authorization"] = f"Bearer {token}"
        return await self.http.request(method, path, headers=headers, **given)

    async def raw(
        self, target: str | bytes, *, method: str = "GET", headers: Sequence[str] = (), body: str = ""
    ) -> Raw:
        """Send a request whose target no client library has normalised."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        lines = [f"Host: 127.0.0.1:{self.port}", "Authorization: Bearer operate", "Connection: close"]
        given = {line.partition(":")[0].lower() for line in headers}
        kept = [line for line in lines if line.partition(":")[0].lower() not in given]
        named = target if isinstance(target, bytes) else target.encode()
        head = "\r\n".join([*kept, *headers, f"Content-Length: {len(body.encode())}", "", body])
        writer.write(method.encode() + b" " + named + b" HTTP/1.1\r\n" + head.encode())
        await writer.drain()
        answer = await reader.read()
        writer.close()
        await writer.wait_closed()
        first, _, rest = answer.partition(b"\r\n")
        return Raw(int(first.split()[1]), rest.partition(b"\r\n\r\n")[2])


@dataclass(frozen=True, slots=True)
class Raw:
    """The answer to a raw request."""

    status: int
    body: bytes

    def json(self) -> Any:
        """Return the answer's document."""
        return json.loads(self.body)


#: What the fixture `serving` is: `async with serving(settings, **options) as server`.
Serve = Callable[..., AbstractAsyncContextManager[Serving]]


@asynccontextmanager
async def serving_on(
    uri: str,
    database: str,
    settings: WebSettings | None = None,
    *,
    tokens: Tokens | None = None,
    appname: str | None = None,
    encryption: Encryption | None = None,
) -> AsyncIterator[Serving]:
    """Serve the API during the block. `appname` is for fail points that only this server meets.

    The fixture `serving` is this for the test's own database, and the fixture `server` one with the usual settings.
    """
    chosen = settings or WebSettings(port=0)
    source: AsyncMongoClient[dict[str, Any]] = AsyncMongoClient(uri, appname=appname)
    if tokens is None:
        tokens = Tokens() if chosen.is_open else TOKENS

    def make_client() -> AsyncClient:
        return AsyncClient(uri, database=database, encryption=encryption)

    async with source, AsyncClient(source, database=database, encryption=encryption) as client:
        app, hub = build(client, chosen, tokens, make_client)
        listening = listen(chosen)
        listening.listen(100)
        port = listening.getsockname()[1]
        connections = Connections(chosen.connections)
        config = config_of(app, connections)
        server = uvicorn.Server(config)
        running = asyncio.create_task(server._serve([listening]))
        url = f"http://127.0.0.1:{port}"
        try:
            async with httpx.AsyncClient(base_url=url, timeout=60, trust_env=False) as http:
                yield Serving(url, port, client, hub, app, connections, http)
        finally:
            hub.close()
            server.should_exit = True
            await running
