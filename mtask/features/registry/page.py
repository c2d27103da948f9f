"""Handlers: what is registered, who serves it, and a form from which to publish."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from starlette.responses import Response

from mtask.errors import InvalidInput
from mtask.features.registry.rules import Declaration
from mtask.kernel.document.identity import check_key, check_name
from mtask.web.access import Role
from mtask.web.page.forms import Form
from mtask.web.page.rendering import url
from mtask.web.page.views import Addresses, Visit
from mtask.web.problems import NotFound

addresses = Addresses()
#: The most params that have fields of their own. The params of a handler with more are one field.
_MOST_FIELDS = 100
#: The most values of a choice.
_MOST_CHOICES = 200
_PREFIX = "param."


@dataclass(frozen=True, slots=True)
class Field:
    """One param in the form."""

    name: str
    #: How it is written: text, number, whole, choice, or json for everything else.
    kind: str
    is_required: bool
    description: str = ""
    #: The values of a choice, as JSON.
    choices: tuple[str, ...] = ()
    #: Whether an empty field of a param that is required stands for null.
    is_nullable: bool = False


def fields_of(declaration: Declaration) -> list[Field] | None:
    """Return the fields of the form; None: the params are one field of JSON."""
    properties, needed = declaration.schema.get("properties"), declaration.schema.get("required")
    if not isinstance(properties, dict) or len(properties) > _MOST_FIELDS:
        return None
    if declaration.schema.get("additionalProperties") is not False:
        return None  # it takes any names
    required = set(map(str, needed)) if isinstance(needed, list) else set()
    return [_field(name, node, declaration.schema, name in required) for name, node in properties.items()]


def _field(name: str, node: Any, schema: Mapping[str, Any], is_required: bool) -> Field:
    node = _resolved(node, schema)
    description, is_nullable = str(node.get("description", ""))[:200], False
    options = node.get("anyOf")
    if isinstance(options, list):
        parts = [_resolved(part, schema) for part in options]
        real = [part for part in parts if part.get("type") != "null"]
        is_nullable = len(real) < len(parts)
        node = real[0] if len(real) == 1 else {}
    values = node.get("enum")
    if node.get("type") == "boolean":
        values = [True, False]
    if isinstance(values, list) and 0 < len(values) <= _MOST_CHOICES:
        choices = tuple(json.dumps(value, ensure_ascii=False) for value in values)
        return Field(name, "choice", is_required, description, choices, is_nullable)
    kind = {"string": "text", "integer": "whole", "number": "number"}.get(str(node.get("type")), "json")
    return Field(name, kind, is_required, description, (), is_nullable)


def _resolved(node: Any, schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a part of a schema, or the definition that it refers to."""
    if not isinstance(node, dict):
        return {}
    reference, definitions = node.get("$ref"), schema.get("$defs")
    if isinstance(reference, str) and isinstance(definitions, dict):
        found = definitions.get(reference.rpartition("/")[2])
        return found if isinstance(found, dict) else {}
    return node


def params_in(form: Form, fields: list[Field] | None) -> Any:
    """Return the params that a form holds; raise InvalidInput. An empty field of an optional param is left out."""
    if fields is None:
        return form.value("params")
    found = {}
    for field in fields:
        given = form.exact(_PREFIX + field.name) or ""
        if given == "" and not field.is_required:
            continue
        found[field.name] = _value(form, field, given)
    return found


def _value(form: Form, field: Field, given: str) -> Any:
    if field.kind == "text":
        return None if given == "" and field.is_nullable else given
    if not given.strip():
        if field.is_nullable:
            return None
        raise InvalidInput(f"{field.name}: this is needed.", field=field.name)
    if field.kind == "choice" and given not in field.choices:
        raise InvalidInput(f"{field.name}: choose one of the values.", field=field.name)
    value = form.value(_PREFIX + field.name)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if field.kind in ("whole", "number") and not is_number:
        raise InvalidInput(f"{field.name}: write a number.", field=field.name)
    return value


@addresses.get_at("/handlers", of_database=True)
async def handlers(visit: Visit) -> Response:
    """List the handlers."""
    reads = visit.parts.reads
    found = await reads.within(visit.client.handlers())
    return visit.html("handlers.html", handlers=found, now=await reads.now())


@addresses.get_at("/handler", of_database=True)
async def handler(visit: Visit) -> Response:
    """Show a handler: its versions, and the form from which to publish."""
    reads = visit.parts.reads
    found = await reads.within(visit.client.get_handler(check_name(visit.query.exact("name") or "")))
    if found is None:
        raise NotFound("No handler is registered under this name.")
    fields = None if found.declaration is None else fields_of(found.declaration)
    return visit.html("handler.html", handler=found, fields=fields, prefix=_PREFIX, now=await reads.now())


@addresses.post_at("/handler/publish", Role.PUBLISH, of_database=True)
async def publish(visit: Visit) -> Response:
    """Publish a task from the form of its handler."""
    form, name = visit.form, check_name(visit.query.exact("name") or "")
    found = await visit.client.get_handler(name)
    if found is None:
        raise NotFound("No handler is registered under this name.")
    if found.declaration is None or found.declaration.hash != form.text("hash"):
        raise InvalidInput("The handler has another version now. Reload its page.", field="hash")
    delay, expires, key = form.seconds("delay"), form.seconds("expires"), form.exact("key") or ""
    made = await visit.client.publish(
        name,
        params_in(form, fields_of(found.declaration)),
        key=check_key(key) if key else None,
        queue=form.text("queue") or None,
        delay=None if delay is None else timedelta(seconds=delay),
        expires=None if expires is None else timedelta(seconds=expires),
    )
    task_name, _, task_key = made.task_id.partition(":")
    words = "is published" if made.created else "existed already, and stays as it is"
    return visit.back(url("/task", name=task_name, key=task_key), f"The task {words}.")
