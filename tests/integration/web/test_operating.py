"""Queues, workers, schedules, statistics, and the OpenAPI document."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import pytest

from mtask import App
from tests import build
from tests.integration.web.serving import Serving, serving_on
from tests.integration.worker_harness import Working
from tests.mongo import Client as Mongo


async def test_controls_of_queues_and_names(server: Serving) -> None:
    await server.ask("PUT", "/v1/tasks/echo/a", json={"queue": "mail/out"})
    for path, kind in (("/v1/queues/mail%2Fout", "queue"), ("/v1/names/a%2Fecho", "name")):
        paused = (await server.ask("POST", f"{path}:pause")).json()
        assert (paused["paused"], paused["kind"]) == (True, kind)
        assert not (await server.ask("POST", f"{path}:resume")).json()["paused"]
    rate = {"starts": 3, "window": 0.5}
    limited = await server.ask("PUT", "/v1/queues/mail%2Fout/limit", json={"concurrency": 2, "key_rate": rate})
    assert limited.json()["limit"] == {"concurrency": 2, "starts": None, "window_ms": None}
    assert limited.json()["key_limit"] == {"concurrency": None, "starts": 3, "window_ms": 500}
    kept = await server.ask("PUT", "/v1/queues/mail%2Fout/keep", json={"success": 10})
    assert (kept.json()["keep_success"], kept.json()["keep_fail"]) == (10, None)
    (queue,) = (await server.ask("GET", "/v1/queues")).json()["queues"]
    assert (queue["queue"], queue["counts"], queue["stuck"]) == ("mail/out", {"INIT": 1}, ["no worker is live"])
    assert queue["oldest_preempt_time"].endswith("Z")
    assert queue["control"]["keep_success"] == 10
    assert [one["_id"] for one in (await server.ask("GET", "/v1/controls")).json()["controls"]] == [
        "name:a/echo",
        "queue:mail/out",
    ]
    assert (await server.ask("GET", "/v1/stats")).json()["stats"][0]["count"] == 1
    for body in ({"concurrency": 0}, {"rate": {"starts": 1}}, {"concurrency": True}, {"x": 1}):
        assert (await server.ask("PUT", "/v1/queues/q/limit", json=body)).status_code == 422, body


async def test_callers_share_statistics_that_are_fresh(server: Serving) -> None:
    await server.client.init()
    reads = 0
    stats = server.client.stats

    async def counted(**given: Any) -> Any:
        nonlocal reads
        reads += 1
        return await stats(**given)

    server.client.stats = counted  # type: ignore[method-assign]
    answers = await asyncio.gather(*(server.ask("GET", "/v1/stats") for _ in range(20)))
    assert {answer.status_code for answer in answers} == {200}
    assert reads == 1


async def test_workers_are_listed_resized_and_stopped(server: Serving, working: Working) -> None:
    app = App()

    @app.task(name="echo")
    async def echo() -> None: ...

    async with working(app) as bench:
        worker_id = bench.worker.worker_id
        (worker,) = (await server.ask("GET", "/v1/workers")).json()["workers"]
        assert (worker["_id"], worker["is_live"], worker["names"]) == (worker_id, True, ["echo"])
        resized = await server.ask("PATCH", f"/v1/workers/{worker_id}", json={"concurrency": 3})
        assert resized.json()["control"]["concurrency"] == 3
        paused = await server.ask("POST", "/v1/queues/default:pause?timeout=20")
        assert (paused.status_code, paused.json()["paused"]) == (200, True)
        stopped = await server.ask("POST", f"/v1/workers/{worker_id}:stop")
        assert stopped.json()["control"]["stop"]
        await asyncio.wait_for(asyncio.shield(bench.life), 20)
    assert (await server.ask("GET", "/v1/workers")).json()["workers"] == []
    assert len((await server.ask("GET", "/v1/workers?gone=true")).json()["workers"]) == 1
    missing = await server.ask("POST", "/v1/workers/nobody:stop")
    assert (missing.status_code, missing.json()["worker_id"]) == (404, "nobody")


async def test_a_pause_that_a_worker_does_not_confirm_is_in_force_and_told_by_202(
    server: Serving, mongo: Mongo, database_name: str
) -> None:
    await server.client.init()
    hangs = build.worker("hangs", await server.client.server_time(), queues=["q"], names=["echo"])
    mongo[database_name]["workers"].insert_one(hangs)
    answer = await server.ask("POST", "/v1/queues/q:pause?timeout=0")
    assert (answer.status_code, answer.headers["content-type"]) == (202, "application/problem+json")
    assert (answer.json()["type"], answer.json()["worker_ids"]) == ("/v1/problems/control-unconfirmed", ["hangs"])
    assert (await server.client.controls())[0].paused


async def test_schedules(server: Serving) -> None:
    path = "/v1/schedules/night%2Freport"
    body = {"name": "report", "params": {"n": 2**60}, "cron": "30 2 * * *", "timezone": "Europe/Berlin"}
    made = await server.ask("PUT", path, json={**body, "options": {"priority": 2}})
    assert (made.status_code, made.json()["_id"]) == (200, "night/report")
    assert made.json()["params"] == {"n": {"$numberLong": str(2**60)}}
    read = (await server.ask("GET", f"{path}?firings=3")).json()
    assert (len(read["next_firings"]), read["task_option"]["priority"]) == (3, 2)
    assert (await server.ask("POST", f"{path}:pause")).json()["paused"]
    assert not (await server.ask("POST", f"{path}:resume")).json()["paused"]
    every = await server.ask("PUT", path, json={"name": "report", "every": 90})
    assert every.json()["trigger"]["interval_ms"] == 90_000
    once = await server.ask("PUT", path, json={"name": "report", "at": "2040-01-01T00:00:00+02:00"})
    assert once.json()["schedule_state"]["next_fire_time"] == "2039-12-31T22:00:00.000Z"
    rejected = await server.ask("PUT", path, json={**body, "if_exists": "reject"})
    assert (rejected.status_code, rejected.json()["schedule_id"]) == (409, "night/report")
    for wrong in ({}, {"cron": "* * * * *", "every": 5}, {"cron": "often"}, {"at": "2040-01-01T00:00:00"}):
        assert (await server.ask("PUT", path, json={"name": "report", **wrong})).status_code == 422, wrong
    assert len((await server.ask("GET", "/v1/schedules")).json()["schedules"]) == 1
    assert (await server.ask("DELETE", path)).json() == {"removed": True}
    assert (await server.ask("DELETE", path)).status_code == 404


@pytest.fixture(scope="module")
def document(mongo_uri: str) -> dict[str, Any]:
    """Return the OpenAPI document."""

    async def read() -> Any:
        async with serving_on(mongo_uri, "web_openapi") as server:
            return (await server.ask("GET", "/v1/openapi.json")).json()

    found: dict[str, Any] = asyncio.run(read())
    return found


def test_the_openapi_document_is_whole(document: dict[str, Any]) -> None:
    text = json.dumps(document)
    for name in re.findall(r"#/components/schemas/([^\"]+)", text):
        assert name in document["components"]["schemas"], name
    operations = [operation for item in document["paths"].values() for operation in item.values()]
    assert len({operation["operationId"] for operation in operations}) == len(operations) > 40
    for operation in operations:
        assert operation["summary"]
        assert operation["description"]
        assert {"401", "403", "422", "503"} <= operation["responses"].keys()
        body = operation.get("requestBody", {}).get("content", {"application/json": {}})
        assert list(body) == ["application/json"]
    assert document["security"] == [{"bearer": []}]


def test_both_addresses_of_a_task_are_documented(document: dict[str, Any]) -> None:
    for path, item in document["paths"].items():
        if path.startswith("/v1/tasks/{name}/{key}"):
            twin = document["paths"]["/v1/task" + path.removeprefix("/v1/tasks/{name}/{key}")]
            assert twin.keys() == item.keys()
            named = {one["name"] for one in next(iter(twin.values()))["parameters"] if one["in"] == "query"}
            assert {"name", "key"} <= named


async def test_the_examples_of_the_openapi_document_work(server: Serving, document: dict[str, Any]) -> None:
    tried = 0
    for path, item in document["paths"].items():
        for method, operation in item.items():
            content = operation.get("requestBody", {}).get("content", {})
            name = content.get("application/json", {}).get("schema", {}).get("$ref", "").rpartition("/")[2]
            for example in document["components"]["schemas"].get(name, {}).get("examples", []):
                if "worker" in path or "plan" in example:
                    continue  # there is none
                if method == "patch" or path.endswith(":retry"):
                    await server.client.publish("x", key="x")
                if path.endswith(":retry"):
                    await server.client.cancel("x", "x")
                target = re.sub(r"\{\w+\}", "x", path.replace("{action}", "retry"))
                target += "?name=x&key=x" if re.match("/v1/task(?!s)", path) else ""
                answer = await server.ask(method.upper(), target, json=example)
                assert answer.status_code in (200, 201), (method, path, answer.text)
                tried += 1
    assert tried >= 8


async def test_work_is_held_back_for_a_time(server: Serving) -> None:
    path = "/v1/queues/mail"
    paused = (await server.ask("POST", f"{path}:pause?for=1800")).json()
    assert paused["paused"]
    assert paused["until"] > paused["update_time"]
    for query in ("for=0", "for=5e-324", "until=soon", "until=0.5", "for=1&until=2999-01-01T00:00:00Z"):
        assert (await server.ask("POST", f"{path}:pause?{query}")).status_code == 422, query
    later = (await server.ask("POST", "/v1/names/send:pause?until=2999-01-01T00:00:00Z")).json()
    assert later["until"].startswith("2999-01-01")
    made = (await server.ask("PUT", f"{path}/breaker", json={"failures": 3, "wait": 2})).json()
    assert made["breaker"] == {"failures": 3, "wait_ms": 2000}
    assert (await server.ask("PUT", f"{path}/breaker", json={})).json()["breaker"] is None
    assert (await server.ask("PUT", f"{path}/breaker", json={"failures": 0})).status_code == 422
    for expires in (60, "2999-01-01T00:00:00Z"):
        body = {"name": "send", "key": str(expires)[:4], "expires": expires}
        answer = await server.ask("POST", "/v1/tasks", json=body)
        assert answer.status_code == 201, answer.text
    task = (await server.ask("GET", "/v1/tasks/send/2999")).json()
    assert task["task_state"]["not_after"].startswith("2999-01-01")
