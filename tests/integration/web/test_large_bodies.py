"""Large bodies: their values are bounded, and neither their work nor their room is that of other requests."""

from __future__ import annotations

import asyncio
import json

import pytest

from mtask.web import bodies as reading
from mtask.web.settings import WebSettings
from tests.integration.web.serving import Serve, Serving
from tests.mongo import until


async def test_a_body_of_too_many_values_is_refused_before_it_is_parsed(server: Serving) -> None:
    lists = '{"name": "t", "key": "a", "params": [' + "[]," * 300_000 + "[]]}"
    json_type = {"Content-Type": "application/json"}
    for path, text in (
        ("/v1/tasks", lists),
        ("/v1/tasks:batch", '{"tasks": [' + lists + "]}"),
        ("/v1/flows", '{"key": "f", "steps": [' + lists + "]}"),
        ("/jobs", '{"jobType": "t", "payload": [' + "1," * 300_000 + "1]}"),
    ):
        refused = await server.ask("POST", path, content=text.encode(), headers=json_type)
        assert (refused.status_code, refused.json()["type"]) == (413, "/v1/problems/body-too-large"), path
        assert "values" in refused.json()["detail"]
    # What is much text and few values passes, also if it is full of commas; and so do many values in few bytes.
    texts = {"name": "t", "key": "text", "params": ',[{"' * 200_000}
    assert (await server.ask("POST", "/v1/tasks", json=texts)).status_code == 201
    many = {"name": "t", "key": "many", "params": [0] * 90_000}
    assert (await server.ask("POST", "/v1/tasks", json=many)).status_code == 201
    assert (await server.client.get("t", "text")).params == texts["params"]
    assert (await server.client.get("t", "many")).params == many["params"]
    assert await server.client.count() == 2


async def test_others_are_answered_while_a_large_body_is_parsed(server: Serving) -> None:
    dates = [{"$date": "2030-01-01T00:00:00Z"}] * 90_000
    tasks = [{"name": "t", "key": str(number), "params": dates[:9_000]} for number in range(10)]
    sending = asyncio.create_task(server.ask("POST", "/v1/tasks:batch", json={"tasks": tasks}))
    values = server.gate.rooms.values
    await until(lambda: values.used > 0 or sending.done(), message="the body is parsed")
    assert (await server.ask("GET", "/healthz", token=None)).status_code == 200
    assert (await server.ask("GET", "/v1/tasks:count")).status_code == 200
    assert values.used > 90_000, "all that was answered in the meantime"
    answer = await sending
    assert (answer.status_code, values.used) == (200, 0)
    assert [one["created"] for one in answer.json()["tasks"]] == [True] * 10
    assert server.gate.rooms.bodies.used == 0


async def test_a_large_body_is_checked_and_its_action_logged_like_a_small_one(server: Serving) -> None:
    padding = "x" * reading.SMALL
    wrong = await server.ask("POST", "/v1/tasks", json={"name": "t", "params": padding, "prams": 1})
    assert (wrong.status_code, wrong.json()["errors"][0]["where"]) == (422, "body.prams")
    broken = await server.ask(
        "POST", "/v1/tasks", content=b"[" + padding.encode(), headers={"Content-Type": "application/json"}
    )
    assert (broken.status_code, broken.json()["type"]) == (422, "/v1/problems/invalid-input")
    as_text = await server.ask("POST", "/v1/tasks", content=padding.encode(), headers={"Content-Type": "text/plain"})
    assert as_text.status_code == 415
    made = await server.ask("POST", "/v1/tasks", token="acme", json={"name": "t", "key": "k", "params": padding})
    assert made.status_code == 201
    found = await server.client.get("t", "acme:k")
    assert found.tenant == "acme"
    await server.ask("POST", "/v1/tasks/t/k:cancel", token="acme")
    retried = await server.ask("POST", "/v1/tasks/t/k:retry", token="acme", json={"params": [padding]})
    assert retried.status_code == 200
    actions = {one.intent: one.actor for one in await server.client.actions()}
    assert actions["retry"] == "acme"
    unread = await server.ask("GET", "/v1/tasks", content=json.dumps(padding).encode())
    assert unread.status_code == 413, "a request without a body has no room for one"


async def test_a_body_that_does_not_come_holds_up_its_sender_alone(
    serving: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(settings=WebSettings(port=0, max_held_bytes=2000000)) as server:
        half = 600_000
        head = [f"POST /v1/tasks HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\nAuthorization: Bearer publish"]
        head += [f"Content-Type: application/json\r\nContent-Length: {half * 2 - 300_000}\r\n\r\n"]
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write("\r\n".join(head).encode() + b"x" * half)
        bodies = server.gate.rooms.bodies
        await until(lambda: bodies.used > 0, message="the server waits for the rest")
        body = {"name": "t", "key": "other", "params": "x" * 900_000}
        assert (await server.ask("POST", "/v1/tasks", json=body)).status_code == 201
        assert bodies.used > 0
        monkeypatch.setattr(reading, "TIME", 0.0)
        monkeypatch.setattr(reading, "SLOWEST", 1e9)
        writer.write(b"x")
        answer = await reader.read()
        assert answer.startswith(b"HTTP/1.1 408")
        assert b"/v1/problems/request-timeout" in answer
        assert bodies.used == 0
        writer.close()


@pytest.mark.parametrize("path", ["/v1/tasks", "/login"])
async def test_a_body_must_come_in_time(server: Serving, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "TIME", 0.1)
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\nAuthorization: Bearer publish\r\n"
    head += f"Origin: {server.url}\r\nContent-Type: application/x-www-form-urlencoded\r\nContent-Length: 100\r\n\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(head.encode() + b"x")
    assert (await reader.read()).startswith(b"HTTP/1.1 408"), "and the connection ends"
    writer.close()
