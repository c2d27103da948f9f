"""Bulk changes over the wire: a dry run, a plan, its progress, and what a tenant may."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from mtask.features.bulk import operations as bulk
from mtask.features.bulk.rest import BulkList, BulkPlanned, BulkState
from mtask.kernel.driver.stores import SyncStore
from mtask.web.settings import WebSettings
from tests.clients import claim, fail
from tests.integration.web.serving import Serve, Serving
from tests.mongo import until

DRY = {"filter": {"status": ["FAIL"]}, "dry_run": True}


async def fill(server: Serving, store: SyncStore, tenant: str, count: int) -> None:
    rows = [{"name": "echo", "key": f"{n}", "options": {"max_unexpected_retries": 0}} for n in range(count)]
    assert (await server.ask("POST", "/v1/tasks:batch", token=tenant, json={"tasks": rows})).status_code == 200
    for n in range(count):
        task_id = f"echo:{tenant}:{n}"
        run_id = await asyncio.to_thread(claim, store, task_id)
        await asyncio.to_thread(fail, store, task_id, run_id, "no luck")


async def over(server: Serving, location: str, token: str = "operate") -> Any:
    async with asyncio.timeout(60):
        while True:
            state = (await server.ask("GET", location, token=token)).json()
            BulkState.model_validate(state)
            if state["is_over"]:
                return state
            await asyncio.sleep(0.05)


async def test_a_tenant_plans_and_runs_a_bulk_change_of_its_own_tasks(
    server: Serving, store: SyncStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bulk, "BATCH", 2)
    await fill(server, store, "acme", 5)
    await fill(server, store, "umbra", 3)
    planned = await server.ask("POST", "/v1/bulk/retry", token="acme", json=DRY)
    assert planned.status_code == 200
    assert BulkPlanned.model_validate(planned.json()).count == 5
    plan = {"plan": planned.json()["plan"]}
    for token, action in (("umbra", "retry"), ("operate", "retry"), ("acme", "remove")):
        assert (await server.ask("POST", f"/v1/bulk/{action}", token=token, json=plan)).status_code == 422
    begun = await server.ask("POST", "/v1/bulk/retry", token="acme", json=plan)
    assert begun.status_code == 202
    again = await server.ask("POST", "/v1/bulk/retry", token="acme", json=plan)
    assert again.headers["location"] == begun.headers["location"]
    state = await over(server, begun.headers["location"], "acme")
    assert (state["done_cnt"], state["left_cnt"], state["filter"]) == (5, 0, {"status": ["FAIL"]})
    assert await server.client.count(status="FAIL") == 3
    assert (await server.ask("GET", begun.headers["location"], token="umbra")).status_code == 404
    for token, count in (("acme", 1), ("umbra", 0), ("operate", 1)):
        listed = BulkList.model_validate((await server.ask("GET", "/v1/bulk", token=token)).json())
        assert len(listed.bulks) == count
    keyed = {"filter": {"key": ["0"], "name": ["echo"]}, "dry_run": True}
    planned = await server.ask("POST", "/v1/bulk/remove", token="umbra", json=keyed)
    assert planned.json()["count"] == 1
    begun = await server.ask("POST", "/v1/bulk/remove", token="umbra", json={"plan": planned.json()["plan"]})
    state = await over(server, begun.headers["location"], "umbra")
    assert (state["done_cnt"], state["filter"]["key"]) == (1, ["0"])
    assert "umbra" not in str(state)
    assert await server.client.count() == 7


async def test_a_server_goes_on_with_what_another_one_left(serving: Serve, store: SyncStore) -> None:
    begun: list[str] = []

    async def dies(server: Serving) -> None:
        await fill(server, store, "acme", 3)
        plan = await server.client.plan_bulk("retry", status="FAIL")
        begun.append((await server.client.begin_bulk(plan.plan)).bulk_id)

    async def goes_on(server: Serving) -> None:
        assert (await over(server, f"/v1/bulk/{begun[0]}"))["done_cnt"] == 3

    async def only_reads(server: Serving) -> None:
        await asyncio.sleep(0)
        assert not (await server.ask("GET", f"/v1/bulk/{begun[0]}")).json()["is_over"]

    async with serving() as server:
        await dies(server)
    async with serving(settings=WebSettings(port=0, is_read_only=True)) as server:
        await only_reads(server)
    async with serving() as server:
        await goes_on(server)


async def test_what_is_no_bulk_change_is_refused(server: Serving) -> None:
    for body in (
        {},
        {"filter": {}, "dry_run": True},
        {"filter": {"status": ["FAIL"]}},
        {"filter": {"status": ["SUCCESS"]}, "dry_run": True},
        {"filter": {"status": []}, "dry_run": True},
        {"filter": {"status": ["FAIL"], "all": True}, "dry_run": True},
        {"plan": "x.y"},
        {"plan": ""},
        {"plan": "x.y", "dry_run": True},
        {"filter": {"params": {"$where": "1"}}, "dry_run": True},
        {"filter": {"key": [""]}, "dry_run": True},
        {"filter": {"key": ["k" * 513]}, "dry_run": True},
        {"filter": {"key_prefix": ""}, "dry_run": True},
    ):
        answer = await server.ask("POST", "/v1/bulk/retry", json=body)
        assert answer.status_code == 422, (body, answer.text)
    assert (
        await server.ask("POST", "/v1/bulk/retry", token="acme", json={"filter": {}, "dry_run": True})
    ).status_code == 422
    assert (await server.ask("POST", "/v1/bulk/drop", json=DRY)).status_code == 405
    assert (await server.ask("POST", "/v1/bulk/retry", token="publish", json=DRY)).status_code == 403
    for path in ("/v1/bulk/none", "/v1/bulk/secret"):
        assert (await server.ask("GET", path)).status_code == 404


async def test_long_lists_of_names_find_their_tasks_and_no_plan_is_too_long_to_be_sent(server: Serving) -> None:
    """MongoDB takes no regular expression of more than 32,764 bytes: it was one of all names."""
    names = [f"{'n' * 80}{number}" for number in range(400)]
    for key in ("a1", "b1"):
        await server.client.publish(names[7], key=key, delay=3600)
    await server.client.publish("other", key="a1", delay=3600)
    query = "&".join(f"name={name}" for name in names)
    listed = await server.ask("GET", f"/v1/tasks?key_prefix=a&{query}")
    assert [one["_id"] for one in listed.json()["tasks"]] == [f"{names[7]}:a1"]
    counted = await server.ask("GET", f"/v1/tasks:count?key_prefix=a&{query}")
    assert counted.json()["count"] == 1
    planned = await server.ask("POST", "/v1/bulk/cancel", json={"filter": {"name": names}, "dry_run": True})
    assert planned.json()["count"] == 2
    begun = await server.ask("POST", "/v1/bulk/cancel", json={"plan": planned.json()["plan"]})
    assert begun.status_code == 202

    async def is_over() -> bool:
        return bool((await server.ask("GET", begun.headers["location"])).json()["is_over"])

    await until(is_over, message="it is carried out")
    assert [(await server.client.get(names[7], key)).status for key in ("a1", "b1")] == ["CANCELED"] * 2
    long = {"filter": {"worker_id": [f"{'w' * 200}{number}" for number in range(1000)]}, "dry_run": True}
    refused = await server.ask("POST", "/v1/bulk/cancel", json=long)
    assert (refused.status_code, "name fewer" in refused.json()["detail"]) == (422, True)
