"""What the OpenAPI document says about values that the client checks: the client's own messages say what to do.

A JSON schema cannot say all of it. A description says the rest: how many bytes a key has, which steps a flow has.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field
from pydantic.fields import FieldInfo

from mtask.kernel.document.identity import MAX_KEY_BYTES, MAX_TEXT_BYTES, NAME_PATTERN, TENANT_PATTERN
from mtask.kernel.document.lookup import LOOKUP_NAME_PATTERN, MAX_LOOKUP_TEXT, MAX_LOOKUPS
from mtask.kernel.document.options import MIN_PING_INTERVAL_MS, WHOLE, TaskOption
from mtask.kernel.document.status import TaskStatus
from mtask.kernel.document.task import MAX_CALL_ID, Task
from mtask.kernel.statements.views import DERIVED_FIELDS

Schema = dict[str, Any]


def says(description: str | None = None, **schema: Any) -> Any:
    """Return a field that the OpenAPI document describes by this schema. It checks nothing."""
    made: FieldInfo = Field(description=description, json_schema_extra=schema)
    return made


NAME: Schema = {"pattern": NAME_PATTERN}
KEY: Schema = {"minLength": 1, "maxLength": MAX_KEY_BYTES}
#: Printable text with at least one character that is no space.
TEXT: Schema = {
    "minLength": 1,
    "maxLength": MAX_TEXT_BYTES,
    "pattern": r"^ *[^,\p{C}\p{Z}]([^,\p{C}\p{Z}]| )*$",
}
TENANT: Schema = {"pattern": TENANT_PATTERN}
INSTANT: Schema = {"format": "date-time"}
STATUS: Schema = {"enum": [status.value for status in TaskStatus]}
#: A path in the params, such as user.id.
PARAMS_PATH: Schema = {"pattern": r"^[^$.\x00][^.\x00]*(\.[^$.\x00][^.\x00]*)*$"}
#: An ETag as an answer had it, or any.
ETAG: Schema = {"pattern": r'^(\*|"[!#-~]{1,100}")$'}

_FIELD = rf"({'|'.join([*DERIVED_FIELDS, '_id', *(name for name in Task.model_fields if name != 'id')])})"
_PATH = rf"{_FIELD}(\.[^$.,\x00][^.,\x00]*)*"
#: Fields of a task's document, or paths below them.
FIELDS: Schema = {"pattern": rf"^{_PATH}(,{_PATH})*$"}

Name = Annotated[str, says("Name of the task. It selects the handler.", **NAME)]
Key = Annotated[str, says("1 to 512 bytes of UTF-8.", **KEY)]
Text = Annotated[str, says("Printable text without a comma, of 1 to 256 bytes of UTF-8.", **TEXT)]
Status = Annotated[str, says(**STATUS)]
Tenant = Annotated[str, says("Whose task it is. The stored key begins with it and a colon.", **TENANT)]
CallId = Annotated[
    str,
    says("The id of a call that gathers: a repeat of it is not collected again.", minLength=1, maxLength=MAX_CALL_ID),
]
Wait = Annotated[
    float, Field(ge=0, le=315_360_000, allow_inf_nan=False), says("Seconds, at least 0.001.", minimum=0.001)
]
# WHOLE takes 10.0 for 10: for JSON the two are the same number.
Slots = Annotated[int, says(minimum=0, maximum=10_000), WHOLE]


def _options() -> Schema:
    """Return the schema of options: their ranges and defaults are those of the model."""
    properties = TaskOption.model_json_schema()["properties"]
    for schema in properties.values():
        schema.pop("title", None)
    properties["ping_interval_ms"]["minimum"] = MIN_PING_INTERVAL_MS
    properties["specific_worker_ids"] |= {"items": {"type": "string", **TEXT}, "uniqueItems": True}
    return {"properties": properties, "additionalProperties": False}


def _one_member(name: str, *schemas: Schema) -> Schema:
    return {
        "type": "object",
        "properties": {name: schemas[0] if len(schemas) == 1 else {"anyOf": list(schemas)}},
        "required": [name],
        "additionalProperties": False,
    }


_SCALARS: list[Schema] = [
    {"type": "string", "maxLength": MAX_LOOKUP_TEXT},
    {"type": "boolean"},
    {"type": "number", "description": "Integers have at most 64 bits."},
    _one_member(
        "$date",
        {"type": "string", **INSTANT},
        {"type": "integer", "minimum": -62_135_596_800_000, "maximum": 253_402_300_799_999},
    ),
    _one_member("$oid", {"type": "string", "pattern": "^[0-9a-fA-F]{24}$"}),
    _one_member("$uuid", {"type": "string", "format": "uuid"}),
]
#: Scalars by name. The bound counts all values; of one value for each name, it is that of the names.
LOOKUP: Schema = {
    "propertyNames": {"pattern": LOOKUP_NAME_PATTERN},
    "maxProperties": MAX_LOOKUPS,
    "additionalProperties": {
        "anyOf": [*_SCALARS, {"type": "array", "items": {"anyOf": _SCALARS}, "maxItems": MAX_LOOKUPS}]
    },
}
Options = Annotated[
    dict[str, Any],
    Field(
        description="Options by their document names; durations in ms. worker_timeout_ms exceeds ping_interval_ms.",
        examples=[{"priority": 5}],
        json_schema_extra=_options(),
    ),
]
Lookup = Annotated[
    dict[str, Any],
    Field(
        description="Values by which lists find the task, by name: at most 32 values in all.",
        examples=[{"user_id": 7, "tags": ["a", "b"]}],
        json_schema_extra=LOOKUP,
    ),
]
