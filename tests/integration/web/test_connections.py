"""Connections: each may keep the server waiting for so long, and those that nobody needs give way to new ones."""

from __future__ import annotations

import asyncio
import resource
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from mtask.web import gate
from mtask.web.settings import WebSettings
from tests.integration.web.serving import Serve, Serving
from tests.mongo import PATIENCE, until

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@asynccontextmanager
async def connected(server: Serving, sent: str = "") -> AsyncIterator[Streams]:
    """Give the block a connection on which this was sent. {host} stands for the header Host, {token} for a token."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    host = f"Host: 127.0.0.1:{server.port}\r\n"
    writer.write(sent.replace("{host}", host).replace("{token}", "Authorization: Bearer read\r\n").encode())
    try:
        yield reader, writer
    finally:
        writer.close()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"_HEAD": 0.3, "_UNREAD": 0.3, "_SLOWEST": 10**9, "_LOOK": 0.05}.items():
        monkeypatch.setattr(gate, name, value)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize(
    "sent",
    [
        "",
        "GET /healthz HTTP/1.1\r\nHost: a",
        "GET /healthz HTTP/1.1\r\n{host}\r\nGET /healthz HTTP/1.1\r\nHost: a",
        "POST /v1/tasks HTTP/1.1\r\n{host}Content-Length: 1000\r\n\r\nhalf of the body of a stranger",
    ],
)
async def test_a_connection_that_sends_no_whole_request_is_closed(server: Serving, sent: str) -> None:
    async with connected(server, sent) as (reader, _):
        answers = await asyncio.wait_for(reader.read(), PATIENCE)
        assert answers.count(b"HTTP/1.1 ") == ("{host}" in sent)
    await until(lambda: len(server.connections) == 0, message="it is forgotten")


@pytest.mark.usefixtures("impatient")
async def test_a_client_that_does_not_read_its_answer_is_cut_off_and_one_that_waits_is_not(server: Serving) -> None:
    await server.client.publish("t", "x" * 8_000_000, key="large", delay=3600)
    await server.client.publish("t", key="small", delay=3600)
    ask = "GET /v1/tasks/t/{key} HTTP/1.1\r\n{host}{token}Prefer: wait=20\r\n\r\n"
    async with connected(server, ask.replace("{key}", "small")) as (waiting, _):
        await until(lambda: server.hub.viewer_cnt == 1, message="it waits")
        with socket.socket() as unread:
            unread.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)  # so the answer waits in the server
            unread.connect(("127.0.0.1", server.port))
            head = f"GET /v1/tasks/t/large HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\nAuthorization: Bearer read"
            await asyncio.to_thread(unread.sendall, head.encode() + b"\r\n\r\n")
            await until(lambda: len(server.connections) == 2, message="it is connected")
            await until(lambda: len(server.connections) == 1, message="it is cut off")
        await server.client.cancel("t", "small")
        assert (await waiting.readline()).startswith(b"HTTP/1.1 200")


async def test_connections_that_nobody_needs_give_way_to_new_ones(serving: Serve) -> None:
    async with serving(settings=WebSettings(port=0, connections=10)) as server:
        await server.client.publish("t", key="k", delay=3600)
        ask = "GET /v1/tasks/t/k HTTP/1.1\r\n{host}{token}Prefer: wait=20\r\n\r\n"
        body = "POST /login HTTP/1.1\r\n{host}Origin: {origin}\r\nContent-Length: 100\r\n"
        body += "Content-Type: application/x-www-form-urlencoded\r\n\r\nx"
        async with connected(server, ask) as (waiting, _), AsyncExitStack() as many:
            await until(lambda: server.hub.viewer_cnt == 1, message="it waits")
            for number in range(30):
                sent = ("", "GET / HTTP/1.1\r\nHo", body.replace("{origin}", server.url))[number % 3]
                await many.enter_async_context(connected(server, sent))
                answer = await server.raw("/healthz")
                assert answer.status == 200
                assert len(server.connections) <= 12
            await server.client.cancel("t", "k")
            assert (await waiting.readline()).startswith(b"HTTP/1.1 200")


def test_connections_need_file_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[tuple[int, int]] = [(256, 256)]
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda _, given: limits.append(given))
    assert gate.connections_within(4000) == 128
    limits[:] = [(1024, 1_048_576)]
    assert gate.connections_within(4000) == 4000
    assert limits[-1] == (4250, 1_048_576)
    limits[:] = [(1024, 4096)]
    assert gate.connections_within(4000) == 3846
