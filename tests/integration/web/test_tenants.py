"""Two tenants with one name and key: neither sees, changes or hears of the other's tasks, in any verb."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from mtask.errors import InvalidName
from mtask.features.controls.rules import Limit
from mtask.features.events.hub import place_of
from mtask.features.limits import operations as permits
from mtask.features.limits.operations import PermitPool, PermitRequest, Wanted
from mtask.kernel.driver.stores import SyncStore
from mtask.web.access import Caller, Role
from mtask.web.page.tasks import _ids, shown_token
from tests.clients import claim, fail, server_now
from tests.integration.stores import register
from tests.integration.web.serving import Serving
from tests.integration.web.test_events import Sent, following, take
from tests.integration.web.test_logs import LOGS, keep

TASK = "/v1/tasks/echo/a"
BOTH = ("acme", "umbra")


async def test_one_name_and_key_through_every_verb(server: Serving, store: SyncStore) -> None:
    async def ask(tenant: str, method: str, path: str, **given: Any) -> Any:
        answer = await server.ask(method, path, token=tenant, **given)
        for other in BOTH:
            assert other not in answer.text, (tenant, method, path, answer.text)
        return answer

    for method, path in (("GET", TASK), ("DELETE", TASK), ("POST", f"{TASK}:cancel"), ("GET", f"{TASK}/position")):
        missing = await ask("acme", method, path)
        assert (missing.status_code, missing.json()["task_id"]) == (404, "echo:a")

    for number, tenant in enumerate(BOTH):
        made = await ask(tenant, "PUT", TASK, json={"params": number})
        assert (made.status_code, made.json()["task_id"]) == (201, "echo:a")
        again = await ask(tenant, "POST", "/v1/tasks", json={"name": "echo", "key": "a", "params": number})
        assert (again.status_code, again.json()["params_differ"]) == (200, False)
        assert again.headers["location"] == TASK
        header = {"Idempotency-Key": "i"}
        implied = await ask(tenant, "POST", "/v1/tasks", json={"name": "echo", "params": number}, headers=header)
        assert implied.status_code == 201
        batch = await ask(tenant, "POST", "/v1/tasks:batch", json={"tasks": [{"name": "echo", "key": "b"}]})
        assert batch.json()["tasks"][0]["created"]
    assert {task.key for task in await server.client.find()} == {f"{t}:{key}" for t in BOTH for key in ("a", "i", "b")}

    assert (await ask("acme", "GET", TASK)).json()["params"] == 0
    assert (await ask("umbra", "GET", "/v1/task?name=echo&key=a")).json()["params"] == 1
    listed = (await ask("acme", "GET", "/v1/tasks?name=echo&key=a&key=b&fields=params")).json()["tasks"]
    assert sorted((row["key"], row["fields"]["params"] or 0) for row in listed) == [("a", 0), ("b", 0)]
    # A tenant cannot name another tenant's key, whatever it writes.
    for key in ("umbra:a", "umbra%3Aa", ":umbra:a", "..%2Fumbra%3Aa"):
        assert (await server.ask("GET", f"/v1/tasks/echo/{key}", token="acme")).status_code == 404

    canceled = await ask("acme", "POST", f"{TASK}:cancel")
    assert canceled.json()["task_state"]["status"] == "CANCELED"
    assert (await ask("umbra", "GET", TASK)).json()["task_state"]["status"] == "INIT"
    await ask("acme", "POST", f"{TASK}:retry")
    await ask("acme", "PATCH", TASK, json={"options": {"priority": 7}})
    assert (await ask("umbra", "GET", TASK)).json()["task_option"]["priority"] == 0
    run_id = await asyncio.to_thread(claim, store, "echo:acme:a")
    await asyncio.to_thread(fail, store, "echo:acme:a", run_id, "no luck", final=True)
    assert (await ask("acme", "GET", TASK)).json()["task_state"]["status"] == "FAIL"
    assert (await ask("acme", "POST", f"{TASK}:rerun")).json()["task_state"]["status"] == "INIT"
    assert (await ask("acme", "GET", f"{TASK}/position")).json()["task_id"] == "echo:a"
    assert (await ask("acme", "DELETE", TASK)).status_code == 204
    assert (await ask("umbra", "GET", TASK)).status_code == 200


async def test_lists_and_counts_of_tenants_lie_apart(server: Serving, store: SyncStore) -> None:
    for tenant, count in (("acme", 3), ("umbra", 5)):
        rows = [{"name": "echo", "key": f"k{n}", "lookup": {"user": 7}, "params": {"n": n}} for n in range(count)]
        assert (await server.ask("POST", "/v1/tasks:batch", token=tenant, json={"tasks": rows})).status_code == 200
    # A tenant whose name begins with another tenant's name, and keys that look like another tenant's.
    await server.client.publish("echo", key="acmes:k", lookup={"user": 7})
    await server.client.publish("echo", key="umbra:acme:k", lookup={"user": 7})
    for tenant, count in (("acme", 3), ("umbra", 5)):
        for query in (
            "",
            "?name=echo",
            "?status=INIT",
            "?status=INIT&status=RUNNING&queue=default",
            "?lookup.user=7",
            "?status=INIT&status=FAIL",
            "?key_prefix=",
        ):
            if query == "?key_prefix=":
                assert (await server.ask("GET", f"/v1/tasks{query}", token=tenant)).status_code == 422
                continue
            listed = await server.ask("GET", f"/v1/tasks{query}", token=tenant)
            assert len(listed.json()["tasks"]) == count, (tenant, query, listed.text)
            assert all(other not in listed.text for other in ("acme", "umbra") if count == 3)
            counted = await server.ask("GET", f"/v1/tasks:count{query}", token=tenant)
            assert counted.json() == {"count": count, "is_more": False}, (tenant, query)
        first = (await server.ask("GET", "/v1/tasks?limit=2", token=tenant)).json()
        rest = (await server.ask("GET", f"/v1/tasks?cursor={first['next_cursor']}", token=tenant)).json()
        assert len(first["tasks"] + rest["tasks"]) == count
        for query, there in (("?key_prefix=k", count), ("?key_prefix=umbra:", 0), ("?key=k0", 1)):
            found = (await server.ask("GET", f"/v1/tasks{query}", token=tenant)).json()["tasks"]
            assert len(found) == there, (tenant, query)
        assert len((await server.ask("GET", "/v1/tasks?params.n=1", token=tenant)).json()["tasks"]) == 1
        # Another tenant's cursor shows nothing of that tenant.
        other = (await server.ask("GET", "/v1/tasks?limit=1", token="umbra" if count == 3 else "acme")).json()
        peeked = await server.ask("GET", f"/v1/tasks?cursor={other['next_cursor']}", token=tenant)
        assert len(peeked.json()["tasks"]) <= count
    assert len((await server.ask("GET", "/v1/tasks")).json()["tasks"]) == 10


async def test_task_of_no_tenant_is_nobodys_whatever_its_key(server: Serving, store: SyncStore) -> None:
    """Who publishes for no tenant may give any key, also one that begins like those of acme."""
    await server.client.init()
    strange = "/v1/tasks/echo/strange"
    await server.client.publish("echo", "secret", key="acme:strange", lookup={"user": 7})
    run_id = await asyncio.to_thread(claim, store, "echo:acme:strange")
    await asyncio.to_thread(fail, store, "echo:acme:strange", run_id, "secret reason", final=True)
    before = await server.client.get("echo", "acme:strange")
    assert (await server.ask("PUT", "/v1/tasks/echo/own", token="acme", json={"lookup": {"user": 7}})).is_success

    async with following(server, token="acme") as events:
        for method, path, given in (
            ("GET", strange, {}),
            ("GET", f"{strange}/position", {}),
            ("GET", f"{strange}/logs", {}),
            ("POST", f"{strange}:cancel", {}),
            ("POST", f"{strange}:retry", {"json": {}}),
            ("POST", f"{strange}:rerun", {}),
            ("PATCH", strange, {"json": {"options": {"priority": 5}}}),
            ("DELETE", strange, {}),
        ):
            answer = await server.ask(method, path, token="acme", **given)
            assert (answer.status_code, "secret" in answer.text) == (404, False), (method, path, answer.text)
        for options in ({}, {"if_exists": "update"}, {"if_exists": "reject"}, {"if_running": "again"}):
            answer = await server.ask("PUT", strange, token="acme", json=options)
            assert answer.status_code == 409, (options, answer.text)
            assert "not of the tenant" in answer.text, (options, answer.text)
        rows = {"tasks": [{"name": "echo", "key": key} for key in ("strange", "other")]}
        await server.client.publish("echo", "secret", key="acme:flow/two")
        steps = [{"step": step, "name": "echo"} for step in ("one", "two")]
        answer = await server.ask("POST", "/v1/flows", token="acme", json={"key": "flow", "steps": steps})
        assert (answer.status_code, "not of the tenant" in answer.text) == (409, True), answer.text
        batch = (await server.ask("POST", "/v1/tasks:batch", token="acme", json=rows)).json()["tasks"]
        assert [row["created"] for row in batch] == [False, True], batch
        assert "not of the tenant" in str(batch[0]), batch
        await server.client.rerun("echo", "acme:strange")
        await server.client.cancel("echo", "acme:strange")
        await server.ask("POST", "/v1/tasks/echo/own:cancel", token="acme")
        told = await take(events, 2)
        assert [(event.kind, event.data["key"]) for event in told] == [("published", "other"), ("canceled", "own")]

    for query, count in (
        ("", 2),
        ("?name=echo", 2),
        ("?status=CANCELED", 1),
        ("?status=CANCELED&name=echo&queue=default", 1),
        ("?lookup.user=7", 1),
        ("?key=strange", 0),
        ("?key_prefix=str", 0),
    ):
        listed = await server.ask("GET", f"/v1/tasks{query}", token="acme")
        assert len(listed.json()["tasks"]) == count, (query, listed.text)
        counted = await server.ask("GET", f"/v1/tasks:count{query}", token="acme")
        assert counted.json() == {"count": count, "is_more": False}, query
    wanted = {"filter": {"name": ["echo"], "status": ["CANCELED"]}, "dry_run": True}
    planned = (await server.ask("POST", "/v1/bulk/retry", token="acme", json=wanted)).json()
    assert planned["count"] == 1
    begun = await server.ask("POST", "/v1/bulk/retry", token="acme", json={"plan": planned["plan"]})
    assert "tenant" not in begun.json()["filter"]
    carried = await server.client.carry_bulk(begun.json()["bulk_id"])
    assert (carried.done_cnt, carried.criteria["tenant"]) == (1, "acme")
    after = await server.client.get("echo", "acme:strange")
    assert (after.status, after.params, after.task_option) == ("CANCELED", before.params, before.task_option)


@pytest.mark.parametrize("name", ["echo:umbra", "echo|.*", "", "echo\\z"])
async def test_name_that_would_move_the_border_of_a_tenant_is_refused(server: Serving, name: str) -> None:
    """The key of this task of umbra begins as the stored keys of acme do, behind a name with a colon."""
    secret = {"name": "echo", "key": "acme:k", "params": "secret"}
    made = await server.ask("POST", "/v1/tasks", token="umbra", json=secret)
    assert made.status_code == 201
    asked = {"name": [name, "echo"]}
    for method, path, given in (
        ("GET", "/v1/tasks", {"params": asked}),
        ("GET", "/v1/tasks:count", {"params": asked}),
        ("POST", "/v1/bulk/cancel", {"json": {"filter": asked, "dry_run": True}}),
    ):
        answer = await server.ask(method, path, token="acme", **given)
        assert answer.status_code == 422, (path, answer.text)
        assert "secret" not in answer.text
    with pytest.raises(InvalidName):
        _ids(shown_token([{"name": name, "key": "k"}]), Caller("acme", Role.READ, "acme"))


async def test_flows_of_tenants_lie_apart(server: Serving) -> None:
    flow = {"key": "f", "steps": [{"step": "one", "name": "echo"}, {"step": "two", "name": "echo", "after": ["one"]}]}
    for tenant in BOTH:
        made = await server.ask("POST", "/v1/flows", token=tenant, json=flow)
        assert (made.status_code, made.json()["task_ids"]) == (201, ["echo:f/one", "echo:f/two"])
        assert (await server.ask("POST", "/v1/flows", token=tenant, json=flow)).status_code == 200
    changed = await server.ask("POST", "/v1/flows/f:cancel", token="acme", json={"everything": True})
    assert sorted(changed.json()["task_ids"]) == ["echo:f/one", "echo:f/two"]
    for tenant, status in (("acme", "CANCELED"), ("umbra", "INIT")):
        found = await server.ask("GET", "/v1/flows/f", token=tenant)
        assert found.json()["steps"][0]["status"] == status
        assert found.json()["steps"][1]["after"] == ["echo:f/one"]
        step = await server.ask("GET", "/v1/tasks/echo/f%2Ftwo", token=tenant)
        assert step.json()["flow"]["key"] == "f"
        assert step.json()["flow"]["after"] == ["echo:f/one"]
        listed = await server.ask("GET", "/v1/flows", token=tenant)
        assert [row["key"] for row in listed.json()["flows"]] == ["f"]
        for answer in (found, step, listed):
            assert "acme" not in answer.text
            assert "umbra" not in answer.text
    assert (await server.ask("POST", "/v1/flows/f:retry", token="acme")).json()["counts"]["INIT"] == 1
    assert (await server.ask("GET", "/v1/flows/g", token="acme")).status_code == 404


async def test_flow_is_of_a_tenant_as_a_whole(server: Serving) -> None:
    steps = [{"step": "one", "name": "echo"}]
    of_step = {"key": "f", "steps": [{**steps[0], "tenant": "acme"}]}
    refused = await server.ask("POST", "/v1/flows", json=of_step)
    assert (refused.status_code, "tenant" in refused.text) == (422, True)
    for field in ("lookup", "call_id"):
        wrong = {"key": "f", "steps": [{**steps[0], field: None}]}
        assert (await server.ask("POST", "/v1/flows", json=wrong)).status_code == 422
    other = await server.ask("POST", "/v1/flows", json={"key": "f", "steps": steps, "tenant": "umbra"}, token="acme")
    assert (other.status_code, "of another tenant" in other.json()["detail"]) == (422, True)
    assert await server.client.count() == 0
    made = await server.ask("POST", "/v1/flows", json={"key": "f", "steps": steps, "tenant": "acme"})
    assert (made.status_code, made.json()["key"]) == (201, "acme:f")
    assert (await server.ask("GET", made.headers["location"])).json()["key"] == "acme:f"
    assert (await server.ask("GET", "/v1/flows/f", token="acme")).json()["key"] == "f"
    assert {task.tenant for task in await server.client.find()} == {"acme"}


async def test_events_of_tenants_lie_apart_also_after_a_removal_and_a_resume(server: Serving, store: SyncStore) -> None:
    await server.client.init()
    async with following(server, token="acme") as acme, following(server, token="umbra") as umbra:
        for tenant in BOTH:
            await server.ask("PUT", TASK, token=tenant, json={})
        run_id = await asyncio.to_thread(claim, store, "echo:acme:a")
        await asyncio.to_thread(fail, store, "echo:acme:a", run_id, "secret of the first tenant", final=True)
        await server.ask("DELETE", TASK, token="acme")
        await server.ask("PUT", TASK, token="acme", json={"queue": "other"})
        await server.ask("POST", f"{TASK}:cancel", token="umbra")
        first = await take(acme, 5)
        other = await take(umbra, 2)
    assert [event.kind for event in first] == ["published", "claimed", "failed", "removed", "published"]
    assert [event.kind for event in other] == ["published", "canceled"]
    async with following(server, token="umbra", after=other[0].id) as umbra:
        resumed = await take(umbra, 1)
    async with following(server, "?key=a", token="acme", after=first[0].id) as acme:
        assert [event.kind for event in await take(acme, 4)] == [event.kind for event in first[1:]]
    assert resumed == other[1:]
    for tenant, events in (("acme", first), ("umbra", [*other, *resumed])):
        assert {event.data["task_id"] for event in events} == {"echo:a"}, tenant
        text = json.dumps([event.data for event in events])
        assert not any(name in text for name in BOTH)
    assert "secret" not in json.dumps([event.data for event in [*other, *resumed]])


async def test_id_of_a_stream_tells_a_tenant_nothing_of_others_and_leaves_no_event_out(server: Serving) -> None:
    async def resumed(server: Serving, token: str, after: str, number: int) -> list[Sent]:
        async with following(server, token=token, after=after) as events:
            return await take(events, number)

    await server.client.init()
    # A stream that is open knows the last change, and with it its name and key.
    async with following(server) as everybody:
        await server.client.publish("payroll", key="secret", tenant="umbra")
        [seen] = await take(everybody, 1)
        path = "/v1/events"
        async with server.http.stream("GET", path, headers={"Authorization": "Bearer acme"}) as answer:
            first = (await anext(answer.aiter_lines())).removeprefix("id: ")
        assert b"secret" in bytes.fromhex(str(seen.id).partition(".")[0])
        assert b"payroll" not in bytes.fromhex(first.partition(".")[0])
        assert place_of(first) < place_of(seen.id)
        # From the id of an instant, all changes of this instant come again.
        [own] = await resumed(server, "read", first, 1)
        assert own == seen
        assert (await server.ask("PUT", TASK, token="acme", json={})).is_success
        [own] = await resumed(server, "acme", first, 1)
        assert (own.kind, own.data["key"]) == ("published", "a")
        assert b"payroll" not in bytes.fromhex(str(own.id).partition(".")[0])


async def test_of_a_removed_task_of_nobody_a_tenant_learns_nothing_but_its_key(
    server: Serving, store: SyncStore
) -> None:
    await server.client.init()
    acme = server.client.for_tenant("acme")
    async with server.client.events() as place:
        begin = str(place.token)
    await server.client.publish("mail", key="acme:a")
    run_id = await asyncio.to_thread(claim, store, "mail:acme:a")
    await asyncio.to_thread(keep, store, "acme:a", run_id, "secret line")
    await asyncio.to_thread(fail, store, "mail:acme:a", run_id, "secret reason", final=True)
    await server.client.remove("mail", "acme:a")
    seen = [("claimed", "mail:a"), ("failed", "mail:a"), ("removed", "mail:a")]
    async with following(server, token="acme", after=begin) as events:
        told = await take(events, 3)
    assert [(event.kind, event.data["task_id"]) for event in told] == seen
    assert {name for event in told for name in event.data} == {"kind", "task_id", "name", "key", "time"} | (
        {"task_status", "token"}
    )
    async with acme.events(after=begin) as own:
        one = [await own.poll(20) for _ in seen]
    assert [event and (event.kind.value, event.reason, event.worker_id, event.run_id) for event in one] == [
        (kind, None, None, None) for kind, _ in seen
    ]

    assert (await server.ask("GET", LOGS, token="acme")).status_code == 404
    assert (await server.ask("PUT", "/v1/tasks/mail/a", token="acme", json={})).status_code == 201
    assert (await server.ask("GET", LOGS, token="acme")).json() == {"runs": []}
    await asyncio.to_thread(keep, store, "acme:a", "own", "own line", tenant="acme")
    # A worker of an older mtask stores no tenant.
    await asyncio.to_thread(keep, store, "acme:a", "old", "old line")
    await asyncio.to_thread(store.database["logs"].update_one, {"_id": "old"}, {"$unset": {"tenant": 1}})
    for is_there, runs in ((True, ["own", "old"]), (False, ["own"])):
        if not is_there:
            await acme.remove("mail", "a")
        assert [run["run_id"] for run in (await server.ask("GET", LOGS, token="acme")).json()["runs"]] == runs
        assert [log.run_id for log in await acme.logs("mail", "a")] == runs
    assert len(await server.client.logs("mail", "acme:a")) == 3


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v1/stats"),
        ("GET", "/v1/queues"),
        ("GET", "/v1/controls"),
        ("GET", "/v1/workers"),
        ("GET", "/v1/handlers"),
        ("GET", "/v1/handlers/s"),
        ("GET", "/v1/schedules"),
        ("GET", "/v1/schedules/s"),
        ("PUT", "/v1/schedules/s"),
        ("POST", "/v1/queues/q:pause"),
        ("PUT", "/v1/queues/q/keep"),
        ("PUT", "/v1/queues/q/fair"),
        ("PUT", "/v1/tenants/acme/limit"),
        ("POST", "/v1/tenants/umbra:pause"),
        ("POST", "/v1/workers/w:stop"),
    ],
)
async def test_what_concerns_all_tenants_is_not_for_one(server: Serving, method: str, path: str) -> None:
    answer = await server.ask(method, path, token="acme", json={} if method == "PUT" else None)
    assert (answer.status_code, answer.json()["type"]) == (403, "/v1/problems/forbidden")


async def test_token_without_a_tenant_publishes_for_any_and_controls_them(server: Serving, store: SyncStore) -> None:
    made = await server.ask("POST", "/v1/tasks", json={"name": "echo", "key": "a", "tenant": "acme"})
    assert (made.status_code, made.json()["key"]) == (201, "acme:a")
    assert made.headers["location"] == "/v1/tasks/echo/acme%3Aa"
    assert (await server.ask("GET", "/v1/tasks/echo/acme%3Aa")).json()["tenant"] == "acme"
    own = await server.ask("GET", TASK, token="acme")
    assert (own.status_code, "tenant" in own.json()) == (200, False)
    batch = {"tasks": [{"name": "echo", "key": "b", "tenant": tenant} for tenant in BOTH]}
    rows = (await server.ask("POST", "/v1/tasks:batch", json=batch)).json()["tasks"]
    assert [row["task_id"] for row in rows] == ["echo:acme:b", "echo:umbra:b"]
    # A tenant's token publishes for its tenant, which it may name.
    named = await server.ask("PUT", "/v1/tasks/echo/c", json={"tenant": "acme"}, token="acme")
    assert named.status_code == 201
    other = await server.ask("PUT", "/v1/tasks/echo/c", json={"tenant": "umbra"}, token="acme")
    assert (other.status_code, "of another tenant" in other.json()["detail"]) == (422, True)
    stored = {task.id: task.tenant for task in await server.client.find()}
    pairs = [("acme", "a"), ("acme", "b"), ("acme", "c"), ("umbra", "b")]
    assert stored == {f"echo:{tenant}:{key}": tenant for tenant, key in pairs}

    limited = await server.ask("PUT", "/v1/tenants/acme/limit", json={"concurrency": 5})
    assert (limited.status_code, limited.json()["limit"]["concurrency"]) == (200, 5)
    assert (await server.ask("POST", "/v1/tenants/acme:pause")).json()["paused"] is True
    assert (await server.ask("PUT", "/v1/queues/default/fair", json={"fair": True})).json()["fair"] is True
    waits = (await server.ask("GET", "/v1/tasks/echo/acme%3Aa/position")).json()["reasons"]
    assert any("the tenant 'acme' is paused" in reason["message"] for reason in waits)
    assert (await server.ask("PUT", "/v1/tenants/a%3Ab/limit", json={})).status_code == 422


async def test_schedule_over_rest_is_of_the_tenant_that_is_named_and_stays_so(server: Serving) -> None:
    path = "/v1/schedules/digest"
    for given, tenant in (({"tenant": "acme"}, "acme"), ({}, "acme"), ({"tenant": "acme"}, "acme")):
        body = {"name": "echo", "every": 60, "params": {"made": len(given)}, **given}
        answer = await server.ask("PUT", path, json=body)
        assert (answer.status_code, answer.json().get("tenant")) == (200, tenant), answer.text
    other = await server.ask("PUT", path, json={"name": "echo", "every": 60, "tenant": "umbra"})
    assert (other.status_code, "not of the tenant" in other.text) == (409, True), other.text
    wrong = await server.ask("PUT", path, json={"name": "echo", "every": 60, "tenant": "a:b"})
    assert (wrong.status_code, "tenant" in wrong.text) == (422, True), wrong.text
    assert (await server.ask("GET", path)).json()["tenant"] == "acme"


async def test_tenant_is_told_that_its_task_waits_for_others_and_not_for_which(
    server: Serving, store: SyncStore
) -> None:
    def fill_the_queue() -> None:
        register(store, "w1", ["echo"])
        pool, limit = PermitPool("default"), Limit(concurrency=1)
        for worker, task_id in (("w1", "echo:umbra:a"), ("w2", "echo:umbra:b")):
            wanted = Wanted(task_id, (0, 0, server_now(store)))
            store.run(permits.take([PermitRequest(pool, limit, [wanted])], worker, f"token-{worker}"))

    await server.client.limit("default", concurrency=1)
    for tenant in BOTH:
        assert (await server.ask("PUT", TASK, json={}, token=tenant)).status_code == 201
    await asyncio.to_thread(fill_the_queue)
    answer = await server.ask("GET", f"{TASK}/position", token="acme")
    reasons = [(reason["code"], reason["message"]) for reason in answer.json()["reasons"]]
    limit = "the limit of the queue 'default', 1 at once, is reached: 1 other task holds its permit"
    better = "1 better task waits for a permit of the queue 'default' before it, in w2"
    assert reasons == [("limited", limit), ("behind", better)]
    assert "umbra" not in answer.text
    assert "echo:umbra:a" in (await server.ask("GET", "/v1/tasks/echo/acme%3Aa/position")).text


async def test_callback_of_a_tenants_task_is_signed_by_the_tenants_secret_whoever_publishes_it(server: Serving) -> None:
    body = {"name": "echo", "key": "a", "callback": {"url": "https://hooks.example.com/x"}}
    await server.ask("POST", "/v1/tasks", json={**body, "tenant": "acme"})
    await server.ask("POST", "/v1/tasks", json=body, token="umbra")
    found = {task.id: task.callback for task in await server.client.find()}
    assert {task_id: callback and (callback.secret, callback.tenant) for task_id, callback in found.items()} == {
        "echo:acme:a": ("acme/default", "acme"),
        "echo:umbra:a": ("umbra/default", "umbra"),
    }
