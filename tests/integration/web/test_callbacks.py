"""Callbacks over HTTP: in each body that publishes, and apart for each tenant."""

from __future__ import annotations

from tests.integration.web.serving import Serving
from tests.mongo import Client as Mongo

URL = "https://hooks.example.com/a"


async def test_bodies_take_a_callback(server: Serving, mongo: Mongo) -> None:
    callback = {"url": URL, "on": ["FAIL"]}
    await server.ask("POST", "/v1/tasks", json={"name": "t", "key": "a", "callback": callback})
    await server.ask("PUT", "/v1/tasks/t/b", json={"callback": {"url": URL}})
    await server.ask("POST", "/v1/tasks:batch", json={"tasks": [{"name": "t", "key": "c", "callback": callback}]})
    step = {"step": "s", "name": "t", "callback": callback}
    await server.ask("POST", "/v1/flows", json={"key": "f", "steps": [step]})
    for key in ("a", "c", "f%2Fs"):
        found = (await server.ask("GET", f"/v1/tasks/t/{key}")).json()
        assert found["callback"] == {**callback}, key
    assert len((await server.ask("GET", "/v1/tasks/t/b")).json()["callback"]["on"]) == 3
    for wrong in (
        {"url": "ftp://a"},
        {"url": URL, "on": ["LOST"]},
        {"url": URL, "on": []},
        {"url": URL, "tenant": "acme"},
        {"url": URL, "secret": "a b"},
        {},
        "https://a",
    ):
        answer = await server.ask("PUT", "/v1/tasks/t/wrong", json={"callback": wrong})
        assert answer.status_code == 422, wrong
    refused = await server.ask("POST", "/v1/tasks", json={"name": "mtask/callback", "params": {"url": URL}})
    assert refused.status_code == 422
    assert await server.client.count() == 4


async def test_tenants_have_their_own_secrets_and_hear_their_own_keys(
    server: Serving, database_name: str, mongo: Mongo
) -> None:
    for tenant in ("acme", "umbra"):
        body = {"callback": {"url": f"https://{tenant}.example/", "secret": None}}
        assert (await server.ask("PUT", "/v1/tasks/t/k", token=tenant, json=body)).status_code == 201
        stolen = {"callback": {"url": URL, "secret": "umbra/default"}}
        assert (await server.ask("PUT", "/v1/tasks/t/stolen", token=tenant, json=stolen)).status_code == 422
        await server.ask("POST", "/v1/tasks/t/k:cancel", token=tenant)
        shown = (await server.ask("GET", "/v1/tasks/t/k", token=tenant)).json()
        other = {"acme": "umbra", "umbra": "acme"}[tenant]
        assert other not in str(shown)
    found = list(mongo[database_name]["tasks"].find({"name": "mtask/callback"}))
    told = {d["params"]["secret"]: (d["params"]["url"], d["params"]["event"]["data"]["task_id"]) for d in found}
    assert told == {
        "acme/default": ("https://acme.example/", "t:k"),
        "umbra/default": ("https://umbra.example/", "t:k"),
    }
    assert len({d["key"] for d in found}) == 2
    for tenant in ("acme", "umbra"):
        for delivery in found:
            path = f"/v1/tasks/mtask%2Fcallback/{delivery['key']}"
            assert (await server.ask("GET", path, token=tenant)).status_code == 404
