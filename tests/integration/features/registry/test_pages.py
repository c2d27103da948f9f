"""The registry over HTTP: its routes, and the form from which to publish."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from enum import StrEnum
from typing import Any
from urllib.parse import quote

import pytest
from pydantic import BaseModel

from mtask import App
from mtask.features.registry.page import fields_of, params_in
from mtask.features.registry.rules import declaration_of, declared_by
from mtask.kernel.driver.stores import SyncStore
from mtask.web.page.forms import Form
from tests.integration.features.registry.apps import first_version, registered, second_version
from tests.integration.web.page.test_sessions import Visitor
from tests.integration.web.page.test_sessions import visiting as signed_in
from tests.integration.web.serving import Serve
from tests.mongo import Client as Mongo


class Kind(StrEnum):
    """The values of a choice."""

    PLAIN = "plain"
    RICH = "rich"


class Address(BaseModel):
    """A parameter with fields."""

    street: str


app = App()


@app.task(queue="mail")
async def everything(
    to: str,
    count: int,
    share: float,
    kind: Kind,
    is_urgent: bool,
    address: Address,
    note: str | None = None,
    limit: int | None = None,
    tags: list[str] | None = None,
    mood: Kind = Kind.PLAIN,
) -> None:
    """Have a parameter of each kind."""


GIVEN = {"to": " a ", "count": "7", "share": "0.5", "kind": '"rich"', "is_urgent": "true", "address": '{"street": "x"}'}


def form_of(fields: dict[str, str]) -> Form:
    return Form([(f"param.{name}", value) for name, value in fields.items()])


def fields() -> Any:
    declared = declared_by(app.handlers["everything"])
    return fields_of(declaration_of({"_id": "everything", "current": declared["hash"], "versions": [declared]}))


def test_each_kind_of_parameter_has_its_field() -> None:
    assert {field.name: (field.kind, field.is_required, field.is_nullable) for field in fields()} == {
        "to": ("text", True, False),
        "count": ("whole", True, False),
        "share": ("number", True, False),
        "kind": ("choice", True, False),
        "is_urgent": ("choice", True, False),
        "address": ("json", True, False),
        "note": ("text", False, True),
        "limit": ("whole", False, True),
        "tags": ("json", False, True),
        "mood": ("choice", False, False),
    }


def test_a_form_holds_the_params_and_leaves_empty_optional_ones_out() -> None:
    made = params_in(form_of({**GIVEN, "note": "", "limit": "", "tags": '["a"]', "mood": ""}), fields())
    assert made == {
        "to": " a ",
        "count": 7,
        "share": 0.5,
        "kind": "rich",
        "is_urgent": True,
        "address": {"street": "x"},
        "tags": ["a"],
    }
    app.handlers["everything"].bind(made)


@pytest.mark.parametrize(
    ("field", "value"),
    [("count", ""), ("count", "x"), ("count", '"7"'), ("count", "true"), ("kind", '"other"'), ("address", "{")],
)
def test_a_wrong_field_is_refused(field: str, value: str) -> None:
    with pytest.raises(ValueError, match=field):
        params_in(form_of({**GIVEN, field: value}), fields())


def test_a_schema_that_is_odd_gives_one_field_of_json() -> None:
    async def anything(to: str, **rest: Any) -> None: ...

    own = App()
    own.task(anything)
    declared = declared_by(own.handlers["anything"])
    made = declaration_of({"_id": "anything", "current": declared["hash"], "versions": [declared]})
    assert fields_of(made) is None
    assert params_in(Form([("params", '{"to": 1}')]), None) == {"to": 1}
    for schema in ("{", "[]", '{"properties": 1}'):
        odd = declaration_of({"_id": "x", "current": declared["hash"], "versions": [{**declared, "schema": schema}]})
        assert fields_of(odd) is None
    strange = '{"properties": {"a": 1, "b": {"anyOf": 5}, "c": {"$ref": "#/x"}}, "additionalProperties": false}'
    odd = declaration_of({"_id": "x", "current": declared["hash"], "versions": [{**declared, "schema": strange}]})
    assert [field.kind for field in fields_of(odd) or ()] == ["json", "json", "json"]


# --- the routes ---------------------------------------------------------------------------------------------


async def test_routes_list_handlers_and_tell_of_one(store: SyncStore, serving: Serve) -> None:
    registered(store, first_version())
    registered(store, second_version())
    async with serving() as server:
        (entry,) = (await server.ask("GET", "/v1/handlers")).json()["handlers"]
        assert (entry["name"], entry["workers"], len(entry["versions"])) == ("send", [], 2)
        version = entry["versions"][0]
        assert (version["hash"], version["version"]) == (entry["current"], 1)
        assert list(entry["params"]["properties"]) == ["to", "subject"]
        assert (await server.ask("GET", "/v1/handlers/send")).json() == entry
        assert (await server.ask("GET", "/v1/handlers/other")).status_code == 404
        assert (await server.ask("GET", "/v1/handlers/%20")).status_code in (400, 404, 422)


async def test_tenants_may_not_see_the_handlers_of_all(store: SyncStore, serving: Serve) -> None:
    registered(store, first_version())
    async with serving() as server:
        for path in ("/v1/handlers", "/v1/handlers/send"):
            assert (await server.ask("GET", path, token="acme")).status_code == 403
            assert (await server.ask("GET", path, token="read")).status_code == 200


# --- the page -----------------------------------------------------------------------------------------------


@asynccontextmanager
async def visiting(serving: Serve, token: str) -> AsyncIterator[Visitor]:
    """Serve the database, and sign in with this token."""
    async with serving() as server, signed_in(server, token) as visitor:
        yield visitor


async def test_a_task_is_published_from_the_form_of_its_handler(
    store: SyncStore, mongo: Mongo, database_name: str, serving: Serve
) -> None:
    registered(store, app)
    current = declared_by(app.handlers["everything"])["hash"]
    async with visiting(serving, "publish") as visitor:
        assert "everything" in (await visitor.http.get("/handlers")).text
        page = (await visitor.http.get("/handler?name=everything")).text
        assert all(f'name="param.{name}"' in page for name in GIVEN)
        given = {f"param.{name}": value for name, value in GIVEN.items()}
        sent = await visitor.send(
            "/handler/publish?name=everything", hash=current, key="a/b c", delay="90s", expires="2h", **given
        )
        assert sent.status_code == 303, sent.text
        made = mongo[database_name]["tasks"].find_one({"_id": "everything:a/b c"})
        assert made is not None
        assert (made["queue"], made["declared"]) == ("mail", current)
        assert made["params"]["address"] == {"street": "x"}
        state = made["task_state"]
        assert state["start_time"] - state["create_time"] == timedelta(seconds=90)
        assert state["not_after"] - state["create_time"] == timedelta(hours=2)
        assert "The task is published" in (await visitor.http.get(sent.headers["location"])).text
        again = await visitor.send("/handler/publish?name=everything", hash=current, key="a/b c", **given)
        assert "existed already" in (await visitor.http.get(again.headers["location"])).text
        outdated = await visitor.send("/handler/publish?name=everything", hash="older", key="x", **given)
        assert outdated.status_code == 422
        assert "another version" in outdated.text
        wrong = await visitor.send(
            "/handler/publish?name=everything", hash=current, key="y", **{**given, "param.count": "many"}
        )
        assert wrong.status_code == 422
        assert mongo[database_name]["tasks"].count_documents({}) == 1


async def test_the_form_is_for_publishers_without_a_tenant(store: SyncStore, serving: Serve) -> None:
    registered(store, first_version())
    async with visiting(serving, "read") as visitor:
        assert "Publish a task" not in (await visitor.http.get("/handler?name=send")).text
        assert (await visitor.send("/handler/publish?name=send", hash="x")).status_code == 403
    async with visiting(serving, "acme") as visitor:
        assert (await visitor.http.get("/handlers")).status_code == 403
        assert (await visitor.http.get("/handler?name=send")).status_code == 403


async def test_a_form_of_another_site_publishes_nothing(store: SyncStore, serving: Serve) -> None:
    registered(store, first_version())
    async with visiting(serving, "publish") as visitor:
        other = await visitor.http.post(
            "/handler/publish?name=send", data={"csrf": "x"}, headers={"Origin": "http://evil.example"}
        )
        assert other.status_code == 403
        assert (await visitor.http.post("/handler/publish?name=send", data={"hash": "x"})).status_code == 403
        assert await visitor.server.client.count() == 0


async def test_hostile_names_are_only_shown(store: SyncStore, mongo: Mongo, database_name: str, serving: Serve) -> None:
    registered(store, first_version())
    hostile = "<script>alert(1)</script>\"'\u202e"
    mongo[database_name].command("collMod", "handlers", validator={})
    schema = '{"properties": {%s: {"description": %s, "enum": [%s]}}, "additionalProperties": false}'
    quoted = '"' + hostile.replace("\\", "\\\\").replace('"', '\\"') + '"'
    mongo[database_name]["handlers"].update_one(
        {"_id": "send"},
        {
            "$set": {
                "versions.0.schema": schema % (quoted, quoted, quoted),
                "versions.0.app_version": hostile,
                "versions.0.options": {"limit_key": "x"},
            }
        },
    )
    async with visiting(serving, "publish") as visitor:
        for path in ("/handlers", "/handler?name=send"):
            page = await visitor.http.get(path)
            assert page.status_code == 200, page.text
            assert "<script>alert" not in page.text
            assert "\u202e" not in page.text.replace(quote(hostile), "") or 'value="' in page.text
        current = mongo[database_name]["handlers"].find_one({"_id": "send"})
        assert current is not None
        sent = await visitor.send(
            "/handler/publish?name=send", hash=current["current"], key="k", queue="q", **{f"param.{hostile}": quoted}
        )
        assert sent.status_code == 303, sent.text
        made = mongo[database_name]["tasks"].find_one({"_id": "send:k"})
        assert made is not None
        assert made["params"] == {hostile: hostile}


async def test_an_unknown_handler_has_no_page(serving: Serve) -> None:
    async with visiting(serving, "publish") as visitor:
        assert (await visitor.http.get("/handler?name=nobody")).status_code == 404
        assert "No handlers are registered" in (await visitor.http.get("/handlers")).text
