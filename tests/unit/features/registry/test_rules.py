"""What a handler declares, and how one publishes by it."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, Field
from pydantic_core import core_schema

from mtask import App, Context
from mtask.errors import InvalidInput, InvalidOption, InvalidParams
from mtask.features.registry import rules
from mtask.features.registry.rules import (
    MAX_SCHEMA,
    Declaration,
    declaration_of,
    declared_by,
    hash_of,
    nearest_of,
    schema_of,
    successor,
)
from mtask.kernel.document.handlers import Handler


def handler(function: Any, **declared: Any) -> Handler:
    """Return the handler of a function, in an app of its own."""
    app = App()
    app.task(name="send", **declared)(function)
    return app.handlers["send"]


def declaration(of: Handler) -> Declaration:
    """Return the declaration as a publisher reads it."""
    declared = declared_by(of)
    return declaration_of({"_id": of.name, "current": declared["hash"], "versions": [declared]})


async def send(to: str, subject: str = "hi", count: int | None = None) -> None: ...


async def sole(to: str) -> None: ...


async def optional(to: str = "a") -> None: ...


async def anything(to: str, **rest: Any) -> None: ...


async def nothing(context: Context) -> None: ...


class Inner(BaseModel):
    """A type whose fields are named like parts of a schema."""

    title: str = "secret"
    default: int = Field(7, examples=["secret"])


class Kind(BaseModel):
    """A type with values that are named like parts of a schema."""

    kind: str = Field(json_schema_extra={"enum": ["title", "default"]})


class Strange:
    """A type without a JSON Schema."""

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> Any:
        return core_schema.is_instance_schema(cls)


class Large(BaseModel):
    """A type whose schema is too long."""

    to: str = Field(description="x" * MAX_SCHEMA)


FUNCTIONS = (send, sole, optional, anything, nothing)


def test_what_a_handler_declares_is_stored_by_the_names_and_units_of_tasks() -> None:
    made = declared_by(handler(send, queue="mail", run_timeout=timedelta(seconds=2), lookup=["to"], next="other"))
    assert made["options"] == {"run_timeout_ms": 2000}
    assert (made["queue"], made["lookup"], made["next"]) == ("mail", ["to"], [{"name": "other"}])
    assert (made["sole"], made["isolation"], made["on_exception"]) == (None, None, "retry")
    assert declared_by(handler(sole))["sole"] == "to"
    by_kind = declared_by(handler(send, next={"import": "store", "export": "load"}))["next"]
    assert by_kind == [{"kind": "export", "name": "load"}, {"kind": "import", "name": "store"}]


@pytest.mark.parametrize(
    "declared",
    [
        {"queue": "mail"},
        {"priority": 1},
        {"max_retries": 0},
        {"lookup": ["to"]},
        {"next": "other"},
        {"isolation": "thread"},
        {"on_exception": "fail"},
        {"limit_key": "acme"},
    ],
)
def test_each_part_of_a_declaration_is_in_its_hash(declared: dict[str, Any]) -> None:
    assert hash_of(handler(send, **declared)) != hash_of(handler(send))
    assert hash_of(handler(send, **declared)) == hash_of(handler(send, **declared))


def test_parameters_are_in_the_hash_and_default_values_are_not() -> None:
    async def other(to: str, subject: str = "other", count: int | None = 5) -> None: ...

    async def another(to: str, subject: int = 0, count: int | None = None) -> None: ...

    assert hash_of(handler(other)) == hash_of(handler(send))
    assert hash_of(handler(another)) != hash_of(handler(send))
    assert len({hash_of(handler(function)) for function in FUNCTIONS}) == len(FUNCTIONS)


def test_a_declaration_is_worked_out_once() -> None:
    own = handler(send)
    assert declared_by(own) is declared_by(own)


def test_schema_holds_no_defaults_titles_or_examples_and_keeps_fields_with_such_names() -> None:
    async def odd(inner: Inner, default: str = "secret", title: list[Inner] | None = None) -> None: ...

    schema = json.loads(schema_of(handler(odd)))
    assert "secret" not in schema_of(handler(odd))
    assert list(schema["properties"]) == ["inner", "default", "title"]
    assert schema["required"] == ["inner"]
    assert schema["properties"]["default"] == {"type": "string"}
    assert set(schema["$defs"]["Inner"]["properties"]) == {"title", "default"}
    assert schema["$defs"]["Inner"]["properties"]["default"] == {"type": "integer"}


def test_values_of_an_enum_stay() -> None:
    async def of(inner: Kind) -> None: ...

    assert json.loads(schema_of(handler(of)))["$defs"]["Kind"]["properties"]["kind"]["enum"] == ["title", "default"]


def test_a_schema_that_cannot_be_made_or_is_too_long_names_the_parameters() -> None:
    async def strange(to: Strange, count: int = 1) -> None: ...

    made = json.loads(schema_of(handler(strange)))
    assert made == {
        "type": "object",
        "properties": {"to": {}, "count": {}},
        "additionalProperties": False,
        "required": ["to"],
    }

    async def large(inner: Large, **rest: Any) -> None: ...

    made = json.loads(schema_of(handler(large)))
    assert made["properties"] == {"inner": {}}
    assert made["additionalProperties"] is True


_PARAMS = st.one_of(
    st.none(),
    st.just("a"),
    st.just(5),
    st.dictionaries(st.sampled_from(["to", "subject", "count", "x"]), st.just("1"), max_size=4),
)


@given(st.sampled_from(FUNCTIONS), _PARAMS)
def test_params_are_refused_by_name_only_where_the_handler_refuses_them(function: Any, params: Any) -> None:
    own = handler(function)
    by_name, by_handler = declaration(own), True
    try:
        own.bind(params)
    except InvalidParams as error:
        by_handler = False
        names_alone = "Field required" in str(error) or "Extra inputs" in str(error) or "give a mapping" in str(error)
    try:
        by_name.bind(params)
    except InvalidParams:
        assert not by_handler
        assert names_alone
    else:
        assert by_handler or not names_alone, "what a name tells is found"


@given(st.sampled_from([send, sole, optional]), _PARAMS)
def test_lookups_by_name_are_those_by_handler(function: Any, params: Any) -> None:
    own = handler(function, lookup=["to"])
    assert declaration(own).lookup_in(params) == own.lookup_in(params)


@pytest.mark.parametrize("schema", ["", "{", "5", "[]", '{"properties": 5, "required": {}}', "[" * 100_000])
def test_a_schema_that_cannot_be_read_refuses_nothing(schema: str) -> None:
    declared = {**declared_by(handler(send)), "schema": schema}
    made = declaration_of({"_id": "send", "current": declared["hash"], "versions": [declared]})
    made.bind({"anything": 1})


@pytest.mark.parametrize(
    "change",
    [
        {"current": "gone"},
        {"versions": 5},
        {"versions": [{"hash": "x"}]},
        {"versions": []},
    ],
)
def test_a_malformed_document_is_a_value_error(change: dict[str, Any]) -> None:
    declared = declared_by(handler(send))
    with pytest.raises(ValueError, match=r"version|queue|schema"):
        declaration_of({"_id": "send", "current": declared["hash"], "versions": [declared], **change})


def test_options_that_this_mtask_does_not_know_are_a_value_error() -> None:
    declared = {**declared_by(handler(send)), "options": {"of_tomorrow": 1}}
    with pytest.raises(InvalidOption):
        declaration_of({"_id": "send", "current": declared["hash"], "versions": [declared]})


def test_a_queue_that_no_task_can_have_is_a_value_error() -> None:
    declared = {**declared_by(handler(send)), "queue": "a\u202eb"}
    with pytest.raises(InvalidInput, match="queue"):
        declaration_of({"_id": "send", "current": declared["hash"], "versions": [declared]})


def test_a_version_without_live_workers_is_followed_by_the_last_started_live_one() -> None:
    assert successor(["a", "b", "c"], "c", {"a", "b"}) == "b"
    assert successor(["a", "b", "c"], "c", {"a"}) == "a"
    assert successor(["a", "b", "c"], "c", {"a", "c"}) is None
    assert successor(["a", "b", "c"], "c", set()) is None
    assert successor(["a", "b", "c"], "c", {"x"}) is None


def test_the_nearest_name_is_found() -> None:
    assert nearest_of("sennd", ["send", "other"]) == "send"
    assert nearest_of("quite/another", ["send", "other"]) is None
    assert nearest_of("x", []) is None


def test_labels_are_clear() -> None:
    assert rules.label("a/b", "0f") == "a/b@0f"
