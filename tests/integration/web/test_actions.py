"""The action log of the web server: the name of the token, and who may read it."""

from __future__ import annotations

import asyncio
from typing import Any

from tests.integration.web.serving import Serving


async def test_changes_are_written_down_under_the_name_of_the_token(server: Serving) -> None:
    await server.ask("POST", "/v1/tasks", json={"name": "send", "key": "k", "params": {"token": "hidden"}})
    task = "/v1/tasks/send/k"
    for method, path, token, given in (
        ("POST", f"{task}:cancel", "publish", {}),
        ("POST", f"{task}:retry", "operate", {}),
        ("PATCH", task, "operate", {"json": {"options": {"priority": 3}}}),
        ("POST", "/v1/queues/mail:pause", "operate", {}),
        ("PUT", "/v1/queues/mail/limit", "operate", {"json": {"concurrency": 2}}),
        ("PUT", "/v1/schedules/s", "operate", {"json": {"name": "send", "cron": "0 0 * * *"}}),
        ("POST", "/v1/schedules/s:pause", "operate", {}),
        ("DELETE", "/v1/schedules/s", "operate", {}),
        ("DELETE", task, "acme", {}),
        ("POST", "/v1/workers/w:stop", "operate", {}),
        ("DELETE", task, "operate", {}),
        ("DELETE", task, "read", {}),
    ):
        await server.ask(method, path, token=token, **given)
    body = (await server.ask("GET", "/v1/actions", token="read")).json()
    assert [(row["actor"], row["intent"], row["target"], row["result"]) for row in body["actions"]][::-1] == [
        ("publish", "cancel", "task:send:k", "done"),
        ("operate", "retry", "task:send:k", "done"),
        ("operate", "update", "task:send:k", "done"),
        ("operate", "pause", "queue:mail", "done"),
        ("operate", "limit", "queue:mail", "done"),
        ("operate", "add schedule", "schedule:s", "done"),
        ("operate", "pause schedule", "schedule:s", "done"),
        ("operate", "remove schedule", "schedule:s", "done"),
        ("acme", "remove", "task:send:acme:k", "done"),
        ("operate", "stop worker", "worker:w", "WorkerNotFound"),
        ("operate", "remove", "task:send:k", "done"),
    ]
    assert {row["via"] for row in body["actions"]} == {"web"}
    assert "hidden" not in str(body)
    assert body["next_cursor"] is None


async def test_requests_at_the_same_time_are_told_apart(server: Serving) -> None:
    async def pause(number: int) -> Any:
        token = ("operate", "publish")[number % 2]
        await server.client.publish("send", key=str(number))
        return await server.ask("POST", f"/v1/tasks/send/{number}:cancel", token=token)

    answers = await asyncio.gather(*(pause(number) for number in range(30)))
    assert {answer.status_code for answer in answers} == {200}
    rows = (await server.ask("GET", "/v1/actions")).json()["actions"]
    assert len(rows) == 30
    for row in rows:
        number = int(row["target"].removeprefix("task:send:"))
        assert row["actor"] == ("operate", "publish")[number % 2]


async def test_the_log_is_read_in_pages_and_not_by_tenants(server: Serving) -> None:
    for queue in ("a", "b", "c"):
        await server.ask("POST", f"/v1/queues/{queue}:pause")
    first = (await server.ask("GET", "/v1/actions?limit=2&actor=operate&intent=pause")).json()
    rest = (await server.ask("GET", f"/v1/actions?limit=2&cursor={first['next_cursor']}")).json()
    assert [row["target"] for row in first["actions"] + rest["actions"]] == ["queue:c", "queue:b", "queue:a"]
    assert rest["next_cursor"] is None
    (only,) = (await server.ask("GET", "/v1/actions?target=queue:b&since=2020-01-01T00:00:00Z")).json()["actions"]
    assert only == first["actions"][1]
    assert (await server.ask("GET", "/v1/actions", token="acme")).status_code == 403
    assert (await server.ask("GET", "/v1/actions", token=None)).status_code == 401
    for wrong in ("intent=publish", "since=2020-01-01T00:00:00", "limit=0", "who=ann"):
        assert (await server.ask("GET", f"/v1/actions?{wrong}")).status_code == 422, wrong
