"""Encrypted tasks in the REST API and on the page: decrypted for their tenant, and for nobody without the keys."""

from __future__ import annotations

from tests.integration.web.page.test_sessions import visiting
from tests.integration.web.serving import Serve, Serving
from tests.keys import MARKER, encryption_of, everything_in, make_keys
from tests.mongo import Client as Mongo

TASK = "/v1/tasks/echo/a"


async def test_a_tenant_reads_its_own_encrypted_task_and_no_other(
    serving: Serve, mongo_uri: str, database_name: str, mongo: Mongo
) -> None:
    make_keys(mongo_uri, database_name, "tenant:acme", "queue:mail")

    async def with_keys(server: Serving) -> None:
        sent = {"params": {"text": MARKER}, "lookup": {"who": MARKER}}
        made = await server.ask("PUT", TASK, token="acme", json=sent)
        assert made.status_code == 201, made.text
        again = await server.ask("PUT", TASK, token="acme", json=sent)
        assert (again.status_code, again.json()["params_differ"]) == (200, False)
        assert (await server.ask("GET", TASK, token="acme")).json()["params"] == {"text": MARKER}
        found = await server.ask("GET", f"/v1/tasks?lookup.who={MARKER}&fields=params", token="acme")
        assert [row["fields"]["params"] for row in found.json()["tasks"]] == [{"text": MARKER}]
        for path in (TASK, f"/v1/tasks?lookup.who={MARKER}", "/v1/tasks", "/v1/tasks/echo/acme:a"):
            answer = await server.ask("GET", path, token="umbra")
            assert MARKER not in answer.text, path
        # The data key of acme is not used for what another tenant publishes.
        await server.ask("PUT", "/v1/tasks/echo/b", token="umbra", json={"params": "readable"})
        async with visiting(server, "acme") as visitor:
            assert MARKER in (await visitor.get("/task?name=echo&key=a")).text
        async with visiting(server, "umbra") as visitor:
            assert MARKER not in (await visitor.get("/task?name=echo&key=a")).text

    async def without_keys(server: Serving) -> None:
        answer = await server.ask("GET", TASK, token="acme")
        assert answer.status_code == 200
        assert (answer.json()["params"], MARKER in answer.text) == ("(encrypted)", False)
        async with visiting(server, "acme") as visitor:
            page = (await visitor.get("/task?name=echo&key=a")).text
            assert "(encrypted)" in page
            assert MARKER not in page

    async with serving(encryption=encryption_of(database_name, uri=mongo_uri)) as server:
        await with_keys(server)
    async with serving() as server:
        await without_keys(server)
    assert MARKER.encode() not in everything_in(mongo, database_name)
    stored = {task["_id"]: task.get("sealed") for task in mongo[database_name]["tasks"].find()}
    assert stored == {"echo:acme:a": "tenant:acme", "echo:umbra:b": None}
