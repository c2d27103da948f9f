"""The validators of the collections, made from the pydantic models; and the layout of each collection."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from pydantic import BaseModel
from pymongo import IndexModel

from mtask.features.audit_log.rules import ActionDocument
from mtask.features.bulk.rules import BulkDocument
from mtask.features.controls.rules import Control, PermitPoolDocument
from mtask.features.logs.rules import RunLog
from mtask.features.metrics.rules import MetricsDocument
from mtask.features.registry.rules import HandlerDocument
from mtask.features.schedules.rules import Schedule
from mtask.kernel.document.identity import MAX_KEY_BYTES
from mtask.kernel.document.lookup import MAX_LOOKUP_TEXT
from mtask.kernel.document.options import MAX_LIMIT_KEY_BYTES, STORED_OPTIONS
from mtask.kernel.document.task import SCHEMA_REVISION, SCHEMA_VERSION, Task, WorkerDocument
from mtask.kernel.driver.indexes import (
    action_indexes,
    bulk_indexes,
    log_indexes,
    metrics_indexes,
    place_indexes,
    schedule_indexes,
    task_indexes,
    worker_indexes,
)
from mtask.kernel.driver.operation import Collection
from mtask.kernel.statements import expressions as x
from mtask.kernel.statements.filters import FIRST_TIME, LAST_TIME, Filter, undiscoverable

_BSON_TYPES = {"string": "string", "boolean": "bool", "object": "object", "array": "array", "null": "null"}
_KEPT = ("minimum", "maximum", "minLength", "maxLength", "pattern", "minItems", "maxItems", "enum")

#: The BSON types of numbers that the drivers of all languages use. The pydantic models refuse decimals.
_NUMBERS = ["int", "long", "double"]
_NUMBER, _NULL = {"bsonType": "number"}, {"bsonType": "null"}
#: A limit bounds the concurrency, the starts in a window of time, or both.
_BOUNDS = [
    {"required": ["starts", "window_ms"], "properties": {"starts": _NUMBER, "window_ms": _NUMBER}},
    {"required": ["concurrency"], "properties": {"concurrency": _NUMBER, "starts": _NULL, "window_ms": _NULL}},
]

#: The value of a lookup, as `lookup.LookupEntry` takes it. The bound applies only to text.
_SCALAR = {"not": {"bsonType": ["object", "array", "null"]}, "maxLength": MAX_LOOKUP_TEXT}

#: Matches printable text without a comma, as `identity.check_text` does in Python.
_PRINTABLE = r"\A(?=.*\S)(?:[^,\p{C}\p{Z}]| )+\z"
_RUN_INSTANTS = ("claim_time", "ping_expire_time", "success_time", "fail_time", "retry_time", "progress.time")
_INSTANTS = (
    "expire_time",
    "quiet_time",
    "callback_owed.time",
    "owed_since",
    "flow.release_time",
    "flow.end_time",
    *(f"{gather}.{name}" for gather in ("gather", "again.gather") for name in ("first_time", "newest.asked_time")),
    "gather.consumed.asked_time",
    "again.start_time",
    "former_params.until",
    *(f"task_state.{name}" for name in ("create_time", "start_time", "finish_time", "next_preempt_time")),
    *(f"task_state.worker_states.{name}" for name in _RUN_INSTANTS),
)


def schema_title(collection: str) -> str:
    """Return a validator's title, which contains the version and revision of the schema."""
    return f"mtask {collection}, schema_version {SCHEMA_VERSION}, revision {SCHEMA_REVISION}"


def _bson_schema(node: dict[str, Any], definitions: dict[str, Any]) -> dict[str, Any]:
    """Translate one node of pydantic's JSON Schema into MongoDB's dialect: bsonType, no $ref, no format."""
    if "$ref" in node:
        node = definitions[node["$ref"].rsplit("/", 1)[1]] | {k: v for k, v in node.items() if k == "description"}
    made: dict[str, Any] = {}
    if "anyOf" in node or "oneOf" in node:
        parts = [_bson_schema(part, definitions) for part in node.get("anyOf") or node["oneOf"]]
        nullable = [part for part in parts if part.get("bsonType") != "null"]
        if len(nullable) == 1 and len(nullable) < len(parts):
            made = dict(nullable[0])
            types = made.get("bsonType", [])
            made["bsonType"] = [*([types] if isinstance(types, str) else types), "null"]
            if "enum" in made:
                made["enum"] = [*made["enum"], None]
        else:
            made["anyOf"] = parts
        return made
    if "const" in node:
        # For the server, a decimal can equal the number. But the model refuses decimals, so the type is checked, too.
        is_number = type(node["const"]) is int
        return {"enum": [node["const"]], **({"bsonType": _NUMBERS} if is_number else {})}
    made |= {key: node[key] for key in _KEPT if key in node}
    kind = node.get("type")
    if kind == "integer":
        # In a language without integers, the driver writes whole numbers as doubles.
        made |= {"bsonType": _NUMBERS, "multipleOf": 1}
    elif kind == "number":
        made["bsonType"] = _NUMBERS
    elif node.get("format") == "date-time":
        made["bsonType"] = "date"
    elif kind in _BSON_TYPES:
        made["bsonType"] = _BSON_TYPES[kind]
    if kind == "array" and "items" in node:
        made["items"] = _bson_schema(node["items"], definitions)
    if kind == "object" and "properties" in node:
        made["properties"] = {key: _bson_schema(value, definitions) for key, value in node["properties"].items()}
    return made


@cache
def _standard_schema(model: type[BaseModel]) -> dict[str, Any]:
    """Return pydantic's JSON Schema of a model. Making it takes 5 to 10 ms, which each new client would spend anew."""
    return model.model_json_schema(by_alias=True)


def _model_schema(model: type[BaseModel], collection: str, required: dict[str, list[str]]) -> dict[str, Any]:
    standard = _standard_schema(model)
    made = _bson_schema(standard, standard.get("$defs", {}))
    for path, names in required.items():
        node = made
        for part in filter(None, path.split(".")):
            node = node["properties"][part]
            node = node.get("items", node)
        node["required"] = names
    parts = [made["properties"], made["properties"].get("again", {}).get("properties", {})]
    for lookup in (part["lookup"] for part in parts if "lookup" in part):
        lookup["items"] |= {"required": ["k", "v"]}
        lookup["items"]["properties"]["v"] = _SCALAR
    return {"title": schema_title(collection), **made}


def task_schema() -> dict[str, Any]:
    """Return the `$jsonSchema` of a task."""
    made = _task_schema()
    state = made["properties"]["task_state"]["properties"]
    run = state["worker_states"]["items"]["properties"]
    # These texts may be encrypted.
    run_texts = (run["fail_reason"], run["error"]["properties"]["traceback"], run["progress"]["properties"]["message"])
    for text in (state["reason"], *run_texts):
        kinds = text["bsonType"]
        text["bsonType"] = [*([kinds] if isinstance(kinds, str) else kinds), "binData"]
    return made


def _task_schema() -> dict[str, Any]:
    return _model_schema(
        Task,
        "tasks",
        {
            "": ["_id", "name", "key", "queue", "params", "task_option", "task_state", "schema_version"],
            "task_option": list(STORED_OPTIONS),
            "task_state": ["status", "create_time", "failed_cnt", "cancel_requested", "worker_states"],
            "task_state.worker_states": ["run_id", "worker_id", "attempt", "status", "claim_time", "ping_expire_time"],
            "flow": ["key", "step", "after", "on_failed"],
            "chain": ["before", "first", "number"],
            "former_params": ["until"],
            "gather.newest": ["asked_time", "call_id"],
            "gather.consumed": ["asked_time", "call_id"],
            # The end of a run makes the next round the present one, so it must be as complete.
            "again": ["params", "queue", "task_option", "gather"],
            "again.task_option": list(STORED_OPTIONS),
            "again.gather": ["kind", "newest"],
            "again.gather.newest": ["asked_time", "call_id"],
            "callback": ["url", "on"],
            "trace": ["traceparent"],
            "callback_owed": ["number", "status", "time", "url"],
        },
    )


def task_validator() -> dict[str, Any]:
    """Return the validator of `tasks`: its rules, after a case that costs next to nothing.

    The server checks each write of a document. To check all rules takes about a fifth of the time of a claim, and the
    statements of claims and finishes cannot break them. So the server takes a document at once if it looks as only
    workers write it: the task has been claimed, is marked with quiet_time, and is not about to be claimed again. What
    a service publishes is checked in full, and so is each task that becomes INIT or WAITING.
    """
    written_by_workers = {
        "task_state.status": {"$in": ["RUNNING", "SUCCESS", "FAIL", "CANCELED"]},
        "quiet_time": {"$type": "date"},
        "task_state.worker_states.run_id": {"$exists": True},
    }
    # Every version of mtask looks for the title here.
    return {"$jsonSchema": {"title": schema_title("tasks")}, "$or": [written_by_workers, task_rules()]}


def task_rules() -> dict[str, Any]:
    """Return the rules for documents in `tasks`: the schema, and the conditions that a schema cannot express."""
    can_be_met = {
        "$switch": {
            "branches": [
                {"case": {"$in": ["$task_state.status", ["SUCCESS", "FAIL", "CANCELED"]]}, "then": True},
                {
                    "case": {"$eq": ["$task_state.status", "WAITING"]},
                    "then": {"$eq": [{"$type": "$flow"}, "object"]},
                },
            ],
            "default": {"$eq": [{"$type": "$task_state.next_preempt_time"}, "date"]},
        }
    }
    return {
        "$jsonSchema": task_schema(),
        "$expr": {
            "$and": [
                {"$eq": ["$_id", {"$concat": ["$name", ":", "$key"]}]},
                {"$not": [_is_of_another()]},
                {"$lte": [{"$strLenBytes": "$key"}, 512]},
                {"$gt": [f"{x.OPTION}.worker_timeout_ms", f"{x.OPTION}.ping_interval_ms"]},
                can_be_met,
            ]
        },
    }


def misfits() -> Filter:
    """Match the documents in `tasks` that cannot be read as tasks.

    The validator refuses some of these documents and cannot detect others. Any field may have any type, so each
    expression checks types first.
    """
    stricter = {
        "properties": {
            "name": {"pattern": r"\A[A-Za-z0-9_./-]*\z"},
            "tenant": {"pattern": r"\A[A-Za-z0-9_.-]*\z"},
            "task_option": {
                "properties": {
                    "specific_worker_ids": {"uniqueItems": True, "items": {"pattern": _PRINTABLE}},
                    "limit_key": {"pattern": _PRINTABLE},
                }
            },
        }
    }
    texts = _are("string", "$name", "$key")
    another_id = {"$cond": [texts, {"$ne": ["$_id", {"$concat": ["$name", ":", "$key"]}]}, False]}
    too_long = [
        {"$cond": [_are("string", field), {"$gt": [{"$strLenBytes": field}, most]}, False]}
        for field, most in (("$key", MAX_KEY_BYTES), (f"{x.OPTION}.limit_key", MAX_LIMIT_KEY_BYTES))
    ]
    lease, ping = f"{x.OPTION}.worker_timeout_ms", f"{x.OPTION}.ping_interval_ms"
    has_no_ping = {"$and": [{"$isNumber": lease}, {"$isNumber": ping}, {"$lte": [lease, ping]}]}
    beyond = [
        {path: {bound: limit}} for path in _INSTANTS for bound, limit in (("$gt", LAST_TIME), ("$lt", FIRST_TIME))
    ]
    return {
        "$or": [
            {"$nor": [{"$jsonSchema": task_schema()}]},
            {"$nor": [{"$jsonSchema": stricter}]},
            {"$expr": {"$or": [another_id, _is_of_another(), *too_long, has_no_ping]}},
            *beyond,
            undiscoverable(),
            {"task_state.status": "WAITING", "flow": {"$not": {"$type": "object"}}},
        ]
    }


def _is_of_another() -> dict[str, Any]:
    """Whether a task names a tenant, and its key is not one of that tenant. Any field may have any type."""
    prefix = {"$concat": ["$tenant", ":"]}
    is_own = {
        "$and": [
            {"$eq": [{"$indexOfBytes": ["$key", prefix]}, 0]},
            {"$gt": [{"$strLenBytes": "$key"}, {"$strLenBytes": prefix}]},
        ]
    }
    return {"$cond": [_are("string", "$tenant", "$key"), {"$not": [is_own]}, False]}


def _are(kind: str, *fields: str) -> dict[str, Any]:
    return {"$and": [{"$eq": [{"$type": field}, kind]} for field in fields]}


def control_validator() -> dict[str, Any]:
    """Return the validator of `controls`."""
    required = ["_id", "kind", "target", "paused", "revision", "update_time", "schema_version"]
    made = _model_schema(Control, "controls", {"": required})
    for name in ("limit", "key_limit", "tenant_limit"):
        made["properties"][name]["anyOf"] = _BOUNDS
    return {"$jsonSchema": made}


def action_validator() -> dict[str, Any]:
    """Return the validator of `actions`."""
    made = _model_schema(ActionDocument, "actions", {"": ["_id", "time", "expire_time", "schema_version"]})
    made["properties"]["time"] = {"bsonType": "timestamp"}
    begins = {"required": ["actor", "via", "intent", "target"]}
    return {"$jsonSchema": {**made, "anyOf": [begins, {"required": ["result"]}]}}


def log_validator() -> dict[str, Any]:
    """Return the validator of `logs`."""
    required = ["_id", "task_id", "worker_id", "attempt", "first", "lines", "expire_time", "schema_version"]
    paths = {"": required, "lines": ["time", "level", "logger", "message"]}
    return {"$jsonSchema": _model_schema(RunLog, "logs", paths)}


def _plain(model: type[BaseModel], collection: str, *required: str) -> Callable[[], dict[str, Any]]:
    """Return what makes the validator of a collection whose schema is that of its model, with these fields required."""
    return lambda: {"$jsonSchema": _model_schema(model, collection, {"": ["_id", *required]})}


_WORKER = ("incarnation", "host", "pid", "status", "heartbeat_expire_time", "queues", "names")
worker_validator = _plain(WorkerDocument, "workers", *_WORKER)
_SCHEDULE = ("name", "queue", "task_option", "trigger", "create_time", "update_time", "schedule_state", "revision")
schedule_validator = _plain(Schedule, "schedules", *_SCHEDULE, "schema_version")
place_validator = _plain(PermitPoolDocument, "places", "schema_version")
#: One of the documents in `bulks` holds only the secret by which plans are signed.
bulk_validator = _plain(BulkDocument, "bulks", "schema_version")
metrics_validator = _plain(MetricsDocument, "metrics", "kind", "schema_version")


def handler_validator() -> dict[str, Any]:
    """Return the validator of `handlers`."""
    paths = {"": ["_id", "current", "versions", "schema_version"], "versions": ["hash", "queue", "options", "schema"]}
    return {"$jsonSchema": _model_schema(HandlerDocument, "handlers", paths)}


@dataclass(frozen=True, slots=True)
class Layout:
    """The setup of a collection."""

    model: type[BaseModel]
    validator: Callable[[], dict[str, Any]]
    indexes: Callable[[], list[IndexModel]]
    mark: str  #: a field that every document of mtask has; a document without it is foreign
    #: What the validator checks, as a filter, if the validator itself is another one.
    unabridged: Callable[[], dict[str, Any]] | None = None

    @property
    def rules(self) -> dict[str, Any]:
        """The rules for documents of the collection, as a filter."""
        return (self.unabridged or self.validator)()

    @property
    def index_names(self) -> list[str]:
        """The names of the indexes."""
        return [str(index.document["name"]) for index in self.indexes()]


LAYOUTS: Mapping[Collection, Layout] = {
    "tasks": Layout(Task, task_validator, task_indexes, "schema_version", task_rules),
    "workers": Layout(WorkerDocument, worker_validator, worker_indexes, "incarnation"),
    "schedules": Layout(Schedule, schedule_validator, schedule_indexes, "schedule_state"),
    "controls": Layout(Control, control_validator, list, "revision"),
    "places": Layout(PermitPoolDocument, place_validator, place_indexes, "schema_version"),
    "actions": Layout(ActionDocument, action_validator, action_indexes, "schema_version"),
    "bulks": Layout(BulkDocument, bulk_validator, bulk_indexes, "schema_version"),
    "metrics": Layout(MetricsDocument, metrics_validator, metrics_indexes, "schema_version"),
    "logs": Layout(RunLog, log_validator, log_indexes, "schema_version"),
    "handlers": Layout(HandlerDocument, handler_validator, list, "versions"),
}
