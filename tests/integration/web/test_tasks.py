"""Tasks over the wire: publish, read, list, wait, and change."""

from __future__ import annotations

import asyncio
from typing import Any
from urllib.parse import quote

import pytest

from mtask.kernel.document.status import RunStatus
from mtask.kernel.driver.stores import SyncStore
from mtask.kernel.operations import claim as claims
from mtask.kernel.operations import transactions
from mtask.kernel.statements.finish import Outcome
from mtask.web.models.publishing import PublishedBatch, PublishedTask
from mtask.web.routes.tasks import TaskDocument, TaskList
from mtask.web.settings import WebSettings
from tests.clients import claim, fail, succeed
from tests.integration.web.serving import Serve, Serving
from tests.mongo import Client as Mongo
from tests.mongo import fail_command, until

KEYS = [
    "a/b:cancel",
    "..",
    ".",
    "%2F",
    "%252F",
    "é",
    "a b",
    "a+b",
    "?x=1",
    "#",
    "\0",
    "a:b:c",
    "😀",
    "x" * 512,
    "a\\b",
    "//",
]


async def test_every_key_has_both_addresses_and_travels_through_every_verb(server: Serving) -> None:
    for key in KEYS:
        encoded = quote(key, safe="")
        path, query = f"/v1/tasks/a%2Fb/{encoded}", f"name=a/b&key={encoded}"
        made = await server.raw(path, method="PUT", headers=["Content-Type: application/json"], body="{}")
        assert made.status == 201, (key, made.body)
        assert made.json()["key"] == key
        assert made.json()["task_id"] == f"a/b:{key}"
        assert (await server.client.get("a/b", key)).key == key
        for target in (path, f"/v1/task?{query}"):
            found = (await server.raw(target)).json()
            assert (found["name"], found["key"], found["_id"]) == ("a/b", key, f"a/b:{key}"), target
        assert (await server.raw(f"{path}:cancel", method="POST")).json()["task_state"]["status"] == "CANCELED"
        assert (await server.raw(f"/v1/task:retry?{query}", method="POST")).json()["task_state"]["status"] == "INIT"
        assert (await server.raw(f"/v1/task/position?{query}")).json()["ahead"] == 0
        assert (await server.raw(f"/v1/task?{query}", method="DELETE")).status == 204
        assert (await server.raw(path)).status == 404
        again = await server.ask("POST", "/v1/tasks", json={"name": "a/b", "key": key})
        assert (await server.raw(again.headers["location"])).json()["key"] == key
        await server.client.remove("a/b", key)


@pytest.mark.parametrize(
    "target", [b"/v1/tasks/a/%ff", b"/v1/tasks/a/%", b"/v1/tasks/a/%c3", b"/v1/task?name=a&key=%ff"]
)
async def test_an_address_that_is_no_utf8_is_refused(server: Serving, target: bytes) -> None:
    assert (await server.raw(target)).status == 400


async def test_params_keep_their_types_and_answers_have_the_documented_form(server: Serving) -> None:
    params = {
        "when": {"$date": "2030-01-01T00:00:00Z"},
        "id": {"$oid": "5f50c31e8a7d4b1c2a3b4c5d"},
        "large": {"$numberLong": str(2**60)},
        "exact": 2**53,
        "price": {"$numberDecimal": "1.10"},
        "nan": {"$numberDouble": "NaN"},
        "nested": [{"a": None}, True, 1.5],
    }
    body = {
        "name": "echo",
        "key": "a",
        "params": params,
        "queue": "mail",
        "delay": 60,
        "lookup": {"user_id": 7},
        "options": {"priority": 5},
    }
    made = await server.ask("POST", "/v1/tasks", json=body)
    assert (made.status_code, made.headers["location"]) == (201, "/v1/tasks/echo/a")
    assert PublishedTask.model_validate(made.json()).created
    read = await server.ask("GET", "/v1/tasks/echo/a")
    document = read.json()
    TaskDocument.model_validate(document)
    assert document["params"] == params
    assert (document["queue"], document["lookup"], document["task_option"]["priority"]) == ("mail", {"user_id": [7]}, 5)
    stored = await server.client.get("echo", "a")
    assert stored.params["when"].year == 2030
    assert stored.task_state.start_time is not None
    listed = await server.ask("GET", "/v1/tasks?lookup.user_id=7&fields=status,params.exact")
    (row,) = TaskList.model_validate(listed.json()).tasks
    assert row.fields == {"status": "INIT", "params.exact": 2**53}
    assert (await server.ask("GET", '/v1/tasks?lookup.user_id="7"')).json()["tasks"] == []


async def test_a_repeat_publishes_nothing_and_other_params_are_told(server: Serving) -> None:
    body: dict[str, Any] = {"name": "echo", "params": {"a": 1, "b": [2]}}
    header = {"Idempotency-Key": "k"}
    first = await server.ask("POST", "/v1/tasks", json=body, headers=header)
    assert (first.status_code, first.json()["key"], first.json()["created"]) == (201, "k", True)
    same = await server.ask(
        "POST",
        "/v1/tasks",
        content='{"params": {"b": [2], "a": 1}, "name": "echo"}',
        headers={**header, "Content-Type": "application/json"},
    )
    assert (same.status_code, same.json()["created"], same.json()["params_differ"]) == (200, False, False)
    for params in ({"a": True, "b": [2]}, {"a": 1.0, "b": [2]}, None):
        other = await server.ask("POST", "/v1/tasks", json={**body, "params": params}, headers=header)
        assert (other.status_code, other.json()["type"]) == (422, "/v1/problems/idempotency-key-reused"), params
        named = await server.ask("PUT", "/v1/tasks/echo/k", json={"params": params})
        assert (named.status_code, named.json()["params_differ"]) == (200, True)
    assert await server.client.count() == 1
    rejected = await server.ask("PUT", "/v1/tasks/echo/k", json={"if_exists": "reject"})
    assert (rejected.status_code, rejected.json()["type"]) == (409, "/v1/problems/task-exists")
    updated = await server.ask("PUT", "/v1/tasks/echo/k", json={"if_exists": "update", "params": 7})
    assert updated.json()["updated"]
    keyless = await server.ask("POST", "/v1/tasks", json={"name": "echo"})
    assert keyless.json()["key"] not in ("k", "")


async def test_a_batch_answers_task_by_task(server: Serving) -> None:
    tasks: list[dict[str, Any]] = [
        {"name": "echo", "key": "a", "params": 1},
        {"name": "echo", "params": 2},
        {"name": "no name", "key": "b"},
        {"name": "echo", "key": "c", "options": {"priorty": 1}},
        {"name": "echo", "key": "d", "params": {"$numberLong": "7"}},
    ]
    header = {"Idempotency-Key": "batch"}
    answer = await server.ask("POST", "/v1/tasks:batch", json={"tasks": tasks}, headers=header)
    rows = PublishedBatch.model_validate(answer.json()).tasks
    assert [row.created for row in rows] == [True, True, False, False, True]
    assert [row.key for row in rows] == ["a", "batch/1", "b", "c", "d"]
    assert [row.problem.type for row in rows if row.problem] == [
        "/v1/problems/invalid-name",
        "/v1/problems/unknown-option",
    ]
    tasks[0]["params"], tasks[1]["params"] = 3, 4
    again = (await server.ask("POST", "/v1/tasks:batch", json={"tasks": tasks}, headers=header)).json()["tasks"]
    assert [row["created"] for row in again] == [False] * 5
    assert [row.get("params_differ") for row in again] == [True, True, None, None, False]
    assert "problem" not in again[0], "under an explicit key, other params are only told"
    assert again[1]["problem"]["type"] == "/v1/problems/idempotency-key-reused"
    rejected = await server.ask("POST", "/v1/tasks:batch", json={"tasks": tasks[:1], "if_exists": "reject"})
    assert rejected.json()["tasks"][0]["problem"]["status"] == 409
    assert await server.client.count() == 3
    for one in ("/v1/tasks:batch", "/v1/tasks"):
        body = {"tasks": [{"name": "echo"}]} if one.endswith("batch") else {"name": "echo"}
        empty = await server.ask("POST", one, json=body, headers={"Idempotency-Key": ""})
        assert (empty.status_code, empty.json()["type"]) == (422, "/v1/problems/invalid-key")
    for wrong in ([], [{"name": "echo"}] * 1001):
        assert (await server.ask("POST", "/v1/tasks:batch", json={"tasks": wrong})).status_code == 422


async def test_without_the_database_the_answer_holds_the_key_for_a_repeat(
    serving: Serve, mongo: Mongo, database_name: str
) -> None:
    async with serving(appname=database_name) as server:
        await server.client.init()
        with fail_command(mongo, ["insert", "update", "findAndModify"], error_code=13, app_name=database_name):
            one = await server.ask("POST", "/v1/tasks", json={"name": "echo", "params": {"secret": "hunter2"}})
            many = await server.ask("POST", "/v1/tasks:batch", json={"tasks": [{"name": "echo"}]})
        for answer in (one, many):
            assert answer.status_code == 503, answer.text
            assert "failCommand" not in answer.text
            assert "hunter2" not in answer.text
        assert (await server.ask("PUT", f"/v1/tasks/echo/{one.json()['key']}", json={})).status_code == 201
        assert many.json()["tasks"][0]["key"]


async def test_pages_follow_each_other_also_after_their_last_task_was_removed(server: Serving) -> None:
    tasks = [{"name": "echo", "key": str(number)} for number in range(25)]
    await server.ask("POST", "/v1/tasks:batch", json={"tasks": tasks})
    seen: list[str] = []
    cursor = ""
    while True:
        page = (await server.ask("GET", f"/v1/tasks?limit=10{cursor}")).json()
        seen += [row["key"] for row in page["tasks"]]
        if page["next_cursor"] is None:
            break
        await server.client.remove("echo", seen[-1])
        cursor = f"&cursor={page['next_cursor']}"
    assert sorted(seen, key=int) == [str(number) for number in range(25)]


async def test_the_etag_changes_with_what_a_caller_may_want_to_change(server: Serving, store: SyncStore) -> None:
    await server.ask("PUT", "/v1/tasks/echo/a", json={"params": 1})
    tags = []

    async def read() -> str:
        answer = await server.ask("GET", "/v1/tasks/echo/a")
        tags.append(answer.headers["etag"])
        return tags[-1]

    assert await read() == await read()
    known = {"If-None-Match": f'"other", {tags[0]}'}
    assert (await server.ask("GET", "/v1/tasks/echo/a", headers=known)).status_code == 304
    changed = await server.ask("PATCH", "/v1/tasks/echo/a", json={"options": {"priority": 1}})
    assert changed.headers["etag"] == await read()
    run_id = await asyncio.to_thread(claim, store, "echo:a")
    await read()
    await asyncio.to_thread(fail, store, "echo:a", run_id)
    await read()
    assert len(set(tags)) == 4
    for method, path in (("DELETE", ""), ("POST", ":cancel"), ("POST", ":retry"), ("POST", ":rerun")):
        refused = await server.ask(method, f"/v1/tasks/echo/a{path}", headers={"If-Match": tags[0]})
        assert (refused.status_code, refused.json()["type"]) == (412, "/v1/problems/precondition-failed")
        for wrong in ('W/"x"', "x", '"a", "b"', ""):
            refused = await server.ask(method, f"/v1/tasks/echo/a{path}", headers={"If-Match": wrong})
            assert refused.status_code == 422, wrong
    tag = (await server.ask("GET", "/v1/tasks/echo/a")).headers["ETag"]
    changed = await server.ask(
        "PATCH", "/v1/tasks/echo/a", headers={"If-Match": tag}, json={"options": {"priority": 9}}
    )
    assert changed.status_code == 200
    assert changed.headers["ETag"] not in tags
    assert (await server.ask("POST", "/v1/tasks/echo/a:cancel", headers={"If-Match": "*"})).status_code == 200


async def test_prefer_wait_answers_when_the_task_has_ended(server: Serving, store: SyncStore) -> None:
    for key in "abc":
        await server.ask("PUT", f"/v1/tasks/echo/{key}", json={})
    waiting = asyncio.create_task(server.ask("GET", "/v1/tasks/echo/a", headers={"Prefer": "wait=30"}))
    removed = asyncio.create_task(server.ask("GET", "/v1/tasks/echo/b", headers={"Prefer": "respond-async, wait=30"}))
    await until(lambda: server.hub.viewer_cnt == 2, 20, "two requests wait")
    await server.client.remove("echo", "b")
    run_id = await asyncio.to_thread(claim, store, "echo:a")
    await asyncio.to_thread(succeed, store, "echo:a", run_id, {"n": 2**60})
    answer = await asyncio.wait_for(waiting, 20)
    assert answer.json()["task_state"]["status"] == "SUCCESS"
    assert answer.json()["task_state"]["worker_states"][0]["returns"] == {"n": {"$numberLong": str(2**60)}}
    assert answer.headers["preference-applied"] == "wait=30"
    assert (await asyncio.wait_for(removed, 20)).status_code == 404
    ended = await server.ask("GET", "/v1/tasks/echo/a", headers={"Prefer": "wait=30"})
    assert ended.json()["task_state"]["status"] == "SUCCESS"
    open_one = await server.ask("GET", "/v1/tasks/echo/c", headers={"Prefer": "wait=1"})
    assert (open_one.status_code, open_one.json()["task_state"]["status"]) == (200, "INIT")
    assert server.hub.viewer_cnt == 0


async def test_prefer_wait_waits_for_a_value_that_comes_after_the_commit(server: Serving, store: SyncStore) -> None:
    await server.ask("PUT", "/v1/tasks/echo/a", json={})
    run_id = await asyncio.to_thread(claim, store, "echo:a")
    committed = Outcome("echo:a", run_id, RunStatus.SUCCESS, returns_owed_by="w")
    assert await asyncio.to_thread(store.run, claims.finish_in_transaction(committed))
    in_vain = await server.ask("GET", "/v1/tasks/echo/a", headers={"Prefer": "wait=1"})
    assert in_vain.json()["task_state"]["worker_states"][0].get("returns") is None
    waiting = asyncio.create_task(server.ask("GET", "/v1/tasks/echo/a", headers={"Prefer": "wait=30"}))
    await until(lambda: server.hub.viewer_cnt == 1, 20, "the request waits")
    await asyncio.to_thread(store.run, transactions.store_return("echo:a", run_id, 7))
    answer = await asyncio.wait_for(waiting, 20)
    assert answer.json()["task_state"]["worker_states"][0]["returns"] == 7
    assert answer.headers["etag"] != in_vain.headers["etag"]


async def test_the_page_tells_of_a_value_that_is_still_to_come_and_of_one_that_is_lost(
    serving: Serve, store: SyncStore
) -> None:
    async with serving(settings=WebSettings(port=0, is_open=True)) as server:
        await server.client.publish("echo", key="a")
        run_id = await asyncio.to_thread(claim, store, "echo:a")
        committed = Outcome("echo:a", run_id, RunStatus.SUCCESS, returns_owed_by="w")
        assert await asyncio.to_thread(store.run, claims.finish_in_transaction(committed))
        view = ("GET", "/task?name=echo&key=a")
        assert "still to come" in (await server.ask(*view, token=None, headers={"Accept": "text/html"})).text
        await asyncio.to_thread(store.run, transactions.lose_return("echo:a", run_id, "it <died>"))
        assert "lost: it &lt;died&gt;" in (await server.ask(*view, token=None, headers={"Accept": "text/html"})).text


async def test_the_waits_of_one_token_leave_some_for_another(serving: Serve) -> None:
    async with serving(settings=WebSettings(port=0, max_waiters=4)) as server:
        await server.ask("PUT", "/v1/tasks/echo/a", json={})
        wait = {"Prefer": "wait=30"}
        waiting = [asyncio.create_task(server.ask("GET", "/v1/tasks/echo/a", headers=wait)) for _ in range(2)]
        await until(lambda: server.hub.viewer_cnt == 2, message="they wait")
        third = await server.ask("GET", "/v1/tasks/echo/a", headers=wait)
        assert "preference-applied" not in third.headers, "it has half of the four"
        waiting.append(asyncio.create_task(server.ask("GET", "/v1/tasks/echo/a", token="read", headers=wait)))
        await until(lambda: server.hub.viewer_cnt == 3, message="another token waits")
        await server.client.cancel("echo", "a")
        assert ["preference-applied" in (await each).headers for each in waiting] == [True] * 3


async def test_too_many_waiters_are_answered_at_once(serving: Serve) -> None:
    async with serving(settings=WebSettings(port=0, max_waiters=0)) as server:
        await server.ask("PUT", "/v1/tasks/echo/a", json={})
        answer = await server.ask("GET", "/v1/tasks/echo/a", headers={"Prefer": "wait=30"})
        assert answer.status_code == 200
        assert "preference-applied" not in answer.headers


async def test_states_that_do_not_allow_a_change_are_conflicts(server: Serving) -> None:
    await server.ask("PUT", "/v1/tasks/echo/a", json={})
    for action in ("retry", "rerun"):
        answer = await server.ask("POST", f"/v1/tasks/echo/a:{action}")
        assert (answer.status_code, answer.json()["type"]) == (409, "/v1/problems/task-not-finished")
        assert answer.json()["task_status"] == "INIT"
    answer = await server.ask("PATCH", "/v1/tasks/echo/a", json={"options": {"priorty": 1}})
    assert (answer.status_code, answer.json()["nearest"]) == (422, "priority")
    answer = await server.ask("PATCH", "/v1/tasks/echo/a", json={"options": {"run_timeout": 5}})
    assert (answer.status_code, answer.json()["nearest"]) == (422, "run_timeout_ms")
    for method, path in (("PATCH", "/v1/tasks/echo/a"), ("PUT", "/v1/tasks/echo/b")):
        answer = await server.ask(method, path, json={"options": {"worker_timeout_ms": 20_000}})
        assert answer.status_code == 422
        assert "worker_timeout_ms (20000) must exceed ping_interval_ms (30000)" in answer.json()["detail"]
    for options in ({}, {"session": 1}, {"key": "x"}, {"priority": "high"}):
        assert (await server.ask("PATCH", "/v1/tasks/echo/a", json={"options": options})).status_code == 422
        if options:
            assert (await server.ask("PUT", "/v1/tasks/echo/b", json={"options": options})).status_code == 422
