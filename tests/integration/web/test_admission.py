"""Who gets past the gate: tokens, roles, hosts, origins, and bodies."""

from __future__ import annotations

import asyncio
import logging
import re
from typing import Any

import pytest

from mtask.web.settings import WebSettings
from tests.integration.web.serving import Serve, Serving, serving_on

CHANGES = [
    ("POST", "/v1/tasks", {"name": "echo", "key": "a"}, "publish"),
    ("POST", "/jobs", {"jobType": "echo"}, "publish"),
    ("POST", "/jobber/queue", {"type": "echo"}, "publish"),
    ("PUT", "/v1/tasks/echo/a", {}, "publish"),
    ("POST", "/v1/tasks:batch", {"tasks": [{"name": "echo"}]}, "publish"),
    ("PATCH", "/v1/tasks/echo/a", {"options": {"priority": 1}}, "publish"),
    ("POST", "/v1/tasks/echo/a:cancel", None, "publish"),
    ("POST", "/v1/tasks/echo/a:retry", None, "publish"),
    ("POST", "/v1/tasks/echo/a:rerun", None, "publish"),
    ("DELETE", "/v1/tasks/echo/a", None, "operate"),
    *(
        ("POST", f"/v1/bulk/{action}", {"filter": {"name": ["echo"]}, "dry_run": True}, "operate")
        for action in ("cancel", "retry", "remove")
    ),
    ("POST", "/v1/flows", {"key": "f", "steps": [{"step": "a", "name": "echo"}]}, "publish"),
    ("POST", "/v1/flows/f:cancel", None, "publish"),
    ("POST", "/v1/flows/f:retry", None, "publish"),
    ("POST", "/v1/queues/q:pause", None, "operate"),
    ("POST", "/v1/queues/q:resume", None, "operate"),
    ("POST", "/v1/names/n:pause", None, "operate"),
    ("POST", "/v1/names/n:resume", None, "operate"),
    ("PUT", "/v1/queues/q/limit", {"concurrency": 1}, "operate"),
    ("PUT", "/v1/queues/q/keep", {"success": 1}, "operate"),
    ("PUT", "/v1/queues/q/breaker", {"failures": 20, "wait": 30}, "operate"),
    ("PUT", "/v1/queues/q/fair", {"fair": True}, "operate"),
    ("PUT", "/v1/tenants/acme/limit", {"concurrency": 1}, "operate"),
    ("POST", "/v1/tenants/acme:pause", None, "operate"),
    ("POST", "/v1/tenants/acme:resume", None, "operate"),
    ("POST", "/v1/workers/w:stop", None, "operate"),
    ("PATCH", "/v1/workers/w", {"concurrency": 1}, "operate"),
    ("PUT", "/v1/schedules/s", {"name": "echo", "cron": "* * * * *"}, "operate"),
    ("POST", "/v1/schedules/s:pause", None, "operate"),
    ("POST", "/v1/schedules/s:resume", None, "operate"),
    ("DELETE", "/v1/schedules/s", None, "operate"),
]


@pytest.mark.parametrize(("method", "path"), [(change[0], change[1]) for change in CHANGES])
async def test_browser_at_an_address_of_the_api_gets_the_answer_of_the_api(
    server: Serving, method: str, path: str
) -> None:
    answer = await server.ask(method, path, token=None, headers={"Accept": "text/html"})
    assert (answer.status_code, answer.json()["type"]) == (401, "/v1/problems/unauthenticated")


async def test_retention_of_a_task_that_exists_is_for_those_who_may_remove_it(server: Serving) -> None:
    options = {"options": {"retain_success_ms": 1}}
    assert (await server.ask("PUT", "/v1/tasks/echo/a", json=options, token="publish")).status_code == 201
    attempts: list[tuple[str, str, dict[str, Any]]] = [
        ("PATCH", "/v1/tasks/echo/a", options),
        ("PATCH", "/v1/tasks/echo/a", {"options": {"priority": 1, "retain_fail_ms": 1}}),
    ]
    # Each way in which a publish replaces the options of a task.
    modes: tuple[dict[str, Any], ...] = (
        {"if_exists": "update"},
        {"if_running": "again"},
        {"debounce": 0.1},
        {"collect": True},
        {"window": 0.001},
    )
    for number, mode in enumerate(modes):
        row = {"name": "echo", "key": f"b{number}", **options}
        attempts += [
            ("POST", "/v1/tasks", {**row, **mode}),
            ("PUT", f"/v1/tasks/echo/b{number}", {**options, **mode}),
            ("POST", "/v1/tasks:batch", {"tasks": [row], **mode}),
        ]
    for method, path, body in attempts:
        refused = await server.ask(method, path, json=body, token="publish")
        assert (refused.status_code, refused.json()["type"]) == (403, "/v1/problems/forbidden"), (method, path)
        assert "takes a token with the role operate" in refused.json()["detail"]
        assert (await server.ask(method, path, json=body, token="operate")).is_success, (method, path)
    keeps = {"clean_failed": True, "clean_success": True, **options}
    assert (await server.ask("PUT", "/v1/tasks/echo/a", json=keeps, token="publish")).is_success


async def test_each_change_takes_its_role_and_a_read_only_server_refuses_all(
    serving: Serve, mongo_uri: str, database_name: str
) -> None:
    async def scenario(server: Serving) -> None:
        for method, path, body, role in CHANGES:
            for token in ("read", "publish"):
                answer = await server.ask(method, path, token=token, json=body)
                is_refused = token == "read" or role == "operate"
                assert (answer.status_code == 403) is is_refused, (method, path, token, answer.text)
            assert (await server.ask(method, path, json=body)).status_code not in (401, 403, 405, 500), (method, path)
        document = (await server.ask("GET", "/v1/openapi.json", token="read")).json()
        listed = {
            (method.upper(), path)
            for path, item in document["paths"].items()
            for method in item
            if method != "get" and not path.startswith("/v1/task:") and path != "/v1/task"
        }
        assert len(listed) == len(CHANGES), "a change is missing above"

    async def refusing(server: Serving) -> None:
        for method, path, body, _ in CHANGES:
            assert (await server.ask(method, path, json=body)).status_code == 403, (method, path)
        assert (await server.ask("GET", "/v1/tasks")).json() == {"tasks": [], "next_cursor": None, "looked_to": None}

    async with serving_on(mongo_uri, f"{database_name}_ro", WebSettings(port=0, is_read_only=True)) as server:
        await refusing(server)
    async with serving() as server:
        await scenario(server)


async def test_without_a_right_token_only_the_health_is_told(serving: Serve, caplog: pytest.LogCaptureFixture) -> None:
    for logger in ("mtask", "uvicorn", "uvicorn.error", "uvicorn.access", "asyncio"):  # those of the server
        caplog.set_level("DEBUG", logger)
    async with serving() as server:
        for path in ("/v1/tasks", "/v1/events", "/v1/openapi.json", "/v1/nothing", "/v1/problems/not-found"):
            for headers in ({}, {"Authorization": "Bearer hunter2"}, {"Authorization": "Basic cmVhZDo="}):
                answer = await server.ask("GET", path, token=None, headers=headers)
                assert answer.status_code == 401, (path, headers)
                assert answer.headers["www-authenticate"] == "Bearer"
                assert "hunter2" not in answer.text
        for path in ("/healthz", "/readyz"):
            assert (await server.ask("GET", path, token=None)).status_code == 200
        big = "x" * 3_000_000
        refused = await server.ask("POST", "/v1/tasks", token=None, content=big)
        assert refused.status_code == 401, "no body is read for a stranger"
    assert "hunter2" not in caplog.text
    assert "Bearer" not in caplog.text


async def test_a_rebound_name_and_a_page_of_another_site_are_refused(serving: Serve) -> None:
    async with serving(settings=WebSettings(port=0, is_open=True)) as server:
        for host in ("evil.example.org", f"evil.example.org:{server.port}", "127.0.0.1", f"127.0.0.1:{server.port}x"):
            for path in ("/v1/tasks", "/healthz", "/readyz"):
                assert (await server.raw(path, headers=[f"Host: {host}"])).status == 421, (host, path)
        assert (await server.raw("/healthz", headers=[f"Host: localhost:{server.port}"])).status == 200
        own = f"http://127.0.0.1:{server.port}"
        for origin, status in (("https://evil.example.org", 403), ("null", 403), (own, 404)):
            answer = await server.ask("POST", "/v1/tasks/echo/a:cancel", token=None, headers={"Origin": origin})
            assert answer.status_code == status, origin
        assert (await server.ask("GET", "/v1/tasks", headers={"Origin": "https://evil.example.org"})).status_code == 200


async def test_only_json_of_a_bounded_size_is_read(server: Serving) -> None:
    body = '{"name": "echo"}'
    for kind in ("text/plain", "application/x-www-form-urlencoded", "application/problem+json", "", "text/json"):
        answer = await server.ask("POST", "/v1/tasks", content=body, headers={"Content-Type": kind})
        assert answer.status_code == 415, kind
    for kind in ("application/json", "Application/JSON; charset=utf-8"):
        answer = await server.ask("POST", "/v1/tasks", content=body, headers={"Content-Type": kind})
        assert answer.status_code == 201, answer.text
    latin = {"Content-Type": "application/json; charset=latin-1"}
    assert (await server.ask("POST", "/v1/tasks", content=body, headers=latin)).status_code == 415
    gzip = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
    assert (await server.ask("POST", "/v1/tasks", content=body, headers=gzip)).status_code == 415

    large = {"name": "echo", "params": "x" * 2**20}
    assert (await server.ask("POST", "/v1/tasks", json=large)).status_code == 413
    assert (await server.ask("POST", "/v1/tasks:batch", json={"tasks": [large]})).status_code == 200

    async def chunks() -> object:
        for _ in range(20):
            yield b" " * 100_000

    json_type = {"Content-Type": "application/json"}
    answer = await server.ask("POST", "/v1/tasks", content=chunks(), headers=json_type)
    assert answer.status_code == 413

    for wrong in ('{"name": "echo", "name": "b"}', '{"name": NaN}', "[]", "7", "null", '{"name": "echo", "x": 1}'):
        answer = await server.ask("POST", "/v1/tasks", content=wrong, headers=json_type)
        assert answer.status_code == 422, (wrong, answer.text)
        assert answer.headers["content-type"] == "application/problem+json"
    assert (await server.ask("POST", "/v1/tasks", content=b"\xff", headers=json_type)).status_code == 422
    assert (await server.ask("POST", "/v1/tasks")).status_code == 422
    assert (await server.ask("POST", "/v1/tasks/echo/a:cancel", json={"x": 1})).status_code == 422


async def test_errors_of_addresses_and_methods_are_problems(server: Serving) -> None:
    for method, path, status in (
        ("GET", "/nothing", 404),
        ("GET", "/docs", 404),
        ("GET", "/v1/tasks/", 404),
        ("GET", "/v1/tasks//a", 404),
        ("PUT", "/v1/tasks", 405),
        ("GET", "/v1/tasks/echo/a:explode", 404),
        ("GET", "/v1/tasks?bad=1", 422),
        ("GET", "/v1/tasks?limit=0", 422),
        ("GET", "/v1/tasks?cursor=zzz", 422),
        ("GET", "/v1/tasks?status=DONE", 422),
        ("GET", "/v1/tasks?fields=$where", 422),
        ("GET", "/v1/tasks?name=%ff", 400),
        ("GET", "/v1/events?after=zzz", 422),
        ("GET", "/v1/problems/nothing", 404),
    ):
        answer = await server.raw(path, method=method)
        assert answer.status == status, (method, path, answer.body)
        document = answer.json()
        assert document["status"] == status
        told = await server.ask("GET", document["type"], token="read")
        assert (told.status_code, told.json()["title"]) == (200, document["title"])


@pytest.mark.parametrize("origin", ["http://[", "://", "zq", "http://127.0.0.1:1@evil.example"])
async def test_an_origin_that_is_no_address_is_another_site(server: Serving, origin: str) -> None:
    for path in ("/v1/tasks", "/task/cancel?name=a&key=b"):
        answer = await server.ask("POST", path, json={"name": "echo"}, headers={"Origin": origin})
        assert (answer.status_code, answer.json()["type"]) == (403, "/v1/problems/forbidden")


@pytest.mark.parametrize("head", ["Authorization: Bearer operate", "X-Nothing: 1"])
async def test_a_request_whose_rest_is_no_http_is_no_failure_of_the_server(
    serving: Serve, caplog: pytest.LogCaptureFixture, head: str
) -> None:
    async with serving() as server:
        lines = ["POST /v1/tasks HTTP/1.1", f"Host: 127.0.0.1:{server.port}", head, "Transfer-Encoding: chunked"]
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write("\r\n".join([*lines, "", "no length of a chunk\r\n"]).encode())
        assert (await reader.read()).startswith(b"HTTP/1.1 400 ")
        writer.close()
        await writer.wait_closed()
        assert (await server.ask("GET", "/healthz")).status_code == 200
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []


async def test_allow_names_all_methods_of_an_address(server: Serving) -> None:
    documented: dict[str, dict[str, Any]] = (await server.ask("GET", "/v1/openapi.json")).json()["paths"]
    for path, item in documented.items():
        target = re.sub(r"\{\w+\}", "a", path) + ("?name=a&key=a" if re.match(r"/v1/task(?!s)", path) else "")
        answer = await server.ask("OPTIONS", target)
        allowed = {method.strip().lower() for method in answer.headers["allow"].split(",")}
        assert (answer.status_code, allowed) == (405, set(item)), path
