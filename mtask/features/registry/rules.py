"""What handlers declare: the stored documents, the hash of a declaration, and how a publish by name uses one."""

from __future__ import annotations

import difflib
import hashlib
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from mtask.errors import InvalidParams
from mtask.kernel.document.handlers import Handler
from mtask.kernel.document.identity import check_text
from mtask.kernel.document.lookup import MAX_LOOKUPS, taken_from
from mtask.kernel.document.options import PositiveDuration, build_option
from mtask.kernel.document.task import MAX_APP_VERSION, MAX_HASH, HandlerVersionNumber, Instant, Text

#: The most versions of a handler that its document keeps. A start of a worker drops the oldest one beyond these.
MAX_VERSIONS = 10
#: The longest schema that is stored, in characters. Of a longer one, only the names of the parameters are stored.
MAX_SCHEMA = 16_000
_HASH_LENGTH = 12
#: What a schema says for people or for programs that fill in defaults. Default values may be secrets.
_LEFT_OUT = frozenset({"default", "title", "examples"})
#: The parts of a schema that hold schemas by name, one schema, or a list of schemas.
_BY_NAME, _LISTS = ("properties", "$defs", "patternProperties"), ("anyOf", "oneOf", "allOf", "prefixItems")
_SINGLE = ("items", "additionalProperties", "not", "propertyNames")

_document = ConfigDict(defer_build=True, extra="ignore", populate_by_name=True)


class NextName(BaseModel):
    """As which task a task goes on. `kind`: only in flows whose key begins so."""

    model_config = _document

    kind: Text | None = None
    name: Text


class HandlerVersion(BaseModel):
    """One version of a handler: what it declares."""

    model_config = _document

    hash: Annotated[Text, Field(min_length=1, max_length=MAX_HASH)]
    app_version: Annotated[Text, Field(max_length=MAX_APP_VERSION)] | None = None
    #: The time at which a worker started it, and no live worker had it.
    since: Instant | None = None
    queue: Annotated[Text, Field(min_length=1)]
    options: dict[str, Any] = Field(default_factory=dict)
    lookup: Annotated[list[Text], Field(max_length=MAX_LOOKUPS)] = Field(default_factory=list)
    sole: Text | None = None  #: the only parameter, which takes params that are no mapping
    next: list[NextName] = Field(default_factory=list)
    isolation: Text | None = None
    on_exception: Text = "retry"
    expires_ms: PositiveDuration | None = None  #: the time after the publish in which a task must start
    #: The version of the params. Only one above 1 is stored.
    version: HandlerVersionNumber = 1
    unknown: Text = "refuse"
    #: The JSON Schema of the params, as JSON text: the names of fields in it could not be stored as they are.
    stored_schema: Annotated[Text, Field(alias="schema")]


class HandlerDocument(BaseModel):
    """All that is known of the handlers of one name: a document in the collection `handlers`."""

    model_config = _document

    id: Annotated[Text, Field(alias="_id")]
    #: The hash of the version whose declaration counts.
    current: Annotated[Text, Field(min_length=1, max_length=MAX_HASH)]
    #: The versions, the last started one last.
    versions: list[HandlerVersion]
    schema_version: Literal[1] = 1


# --- what a handler declares -----------------------------------------------------------------------------


def declared_by(handler: Handler) -> dict[str, Any]:
    """Return what a handler declares, as it is stored, with its hash. It is worked out once for each handler."""
    found: dict[str, Any] | None = handler.known.get("declared")
    if found is None:
        found = handler.known["declared"] = _declared_by(handler)
    return found


def hash_of(handler: Handler) -> str:
    """Return the hash of what a handler declares."""
    return str(declared_by(handler)["hash"])


def _declared_by(handler: Handler) -> dict[str, Any]:
    option = build_option(handler.options).stored()
    given = handler.next
    by_kind: Iterable[tuple[str | None, str]] = ()
    if given is not None:
        by_kind = [(None, given)] if isinstance(given, str) else sorted(given.items())
    made: dict[str, Any] = {
        "queue": handler.queue,
        "options": {name: option[name] for name in sorted(handler.options) if name in option},
        "lookup": list(handler.lookup),
        "sole": handler.sole_parameter,
        "next": [{"name": name} if kind is None else {"kind": kind, "name": name} for kind, name in by_kind],
        "isolation": handler.isolation,
        "on_exception": handler.on_exception,
        "schema": schema_of(handler),
        # What is as it always was leaves no trace, so that the hash stays the same.
        **({} if handler.version == 1 else {"version": handler.version}),
        **({} if handler.unknown == "refuse" else {"unknown": handler.unknown}),
    }
    if handler.expires_ms is not None:
        made["expires_ms"] = handler.expires_ms
    text = json.dumps(made, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return {"hash": hashlib.sha256(text.encode()).hexdigest()[:_HASH_LENGTH], **made}


def schema_of(handler: Handler) -> str:
    """Return the JSON Schema of a handler's params as JSON text, without default values.

    Where a type has no JSON Schema, or it is too long, it holds only the names of the parameters.
    """
    try:
        made = _cleaned(handler.arguments.model_json_schema(by_alias=True))
        text = json.dumps(made, separators=(",", ":"))
    except Exception:  # a type of the user's may raise anything
        text = ""
    if not text or len(text) > MAX_SCHEMA:
        text = json.dumps(_names_alone(handler), separators=(",", ":"))
    return text


def _names_alone(handler: Handler) -> dict[str, Any]:
    fields = handler.arguments.model_fields
    required = [parameter for name, parameter in handler.fields.items() if fields[name].is_required()]
    made: dict[str, Any] = {"type": "object", "properties": {name: {} for name in handler.fields.values()}}
    made["additionalProperties"] = handler.arguments.model_config.get("extra") == "allow"
    return made | ({"required": required} if required else {})


def _cleaned(node: Any) -> Any:
    """Return a schema without the parts that are not to be stored. Values, such as those of an enum, stay."""
    if not isinstance(node, Mapping):
        return node
    made: dict[str, Any] = {}
    for key, value in node.items():
        if key in _LEFT_OUT:
            continue
        if key in _BY_NAME and isinstance(value, Mapping):
            made[key] = {name: _cleaned(part) for name, part in value.items()}
        elif key in _LISTS and isinstance(value, list):
            made[key] = [_cleaned(part) for part in value]
        else:
            made[key] = _cleaned(value) if key in _SINGLE else value
    return made


# --- what a publisher uses -------------------------------------------------------------------------------


class Declaration:
    """What a publisher without the code of a handler knows of it. It stands where the handler itself would stand."""

    def __init__(self, name: str, version: HandlerVersion) -> None:
        self.name = name
        self.version = version
        self.hash = version.hash
        # These raise if somebody has stored what this mtask cannot use.
        self.queue = check_text("queue", version.queue)
        self.options: Mapping[str, Any] = version.options
        self.lookup = tuple(version.lookup)
        self.expires_ms = version.expires_ms
        build_option(self.options)

    @cached_property
    def schema(self) -> Mapping[str, Any]:
        """The JSON Schema of the params; empty if it cannot be read."""
        try:
            found = json.loads(self.version.stored_schema)
        except (ValueError, RecursionError):
            return {}
        return found if isinstance(found, dict) else {}

    @cached_property
    def _names(self) -> frozenset[str]:
        found = self.schema.get("properties")
        return frozenset(found) if isinstance(found, dict) else frozenset()

    @cached_property
    def _required(self) -> tuple[str, ...]:
        found = self.schema.get("required")
        return tuple(str(name) for name in found) if isinstance(found, list) else ()

    @cached_property
    def _is_open(self) -> bool:
        return self.schema.get("additionalProperties") is not False

    def lookup_in(self, params: Any) -> dict[str, Any]:
        """Return the lookups that these params give, as the handler would."""
        return taken_from(params, self.lookup, self.version.sole) if self.lookup else {}

    def bind(self, params: Any) -> None:
        """Check which parameters the params name; raise InvalidParams. The worker checks the types."""
        sole = self.version.sole
        if not isinstance(params, Mapping):
            if params is not None and sole is None:
                given = type(params).__name__
                raise InvalidParams(self.name, f"give a mapping of {self._expected()}, not {given}")
            params = {} if params is None else {sole: params}
        missing = [name for name in self._required if name not in params]
        unknown = [] if self._is_open else [name for name in params if name not in self._names]
        if missing or unknown:
            found = [f"{name}: Field required" for name in missing]
            found += [f"{name}: Extra inputs are not permitted" for name in unknown]
            more = f"; and {len(found) - 5} more" if len(found) > 5 else ""
            raise InvalidParams(self.name, f"{'; '.join(found[:5])}{more} (expected {self._expected()})")

    def _expected(self) -> str:
        properties = self.schema.get("properties")
        return ", ".join(properties) if isinstance(properties, dict) and properties else "no arguments"


def declaration_of(document: Mapping[str, Any]) -> Declaration:
    """Return the current declaration in a document of `handlers`.

    Raises ValueError, also as a ValidationError or an InvalidInput, if the document is malformed.
    """
    found = HandlerDocument.model_validate(document)
    version = next((version for version in found.versions if version.hash == found.current), None)
    if version is None:
        raise ValueError(f"it has no version {found.current!r}")
    return Declaration(found.id, version)


def nearest_of(name: str, names: Iterable[str]) -> str | None:
    """Return the most similar name; None: none is similar."""
    return next(iter(difflib.get_close_matches(name, list(names), n=1)), None)


# --- versions --------------------------------------------------------------------------------------------


def label(name: str, version_hash: str) -> str:
    """Return how a worker's document names a version of a handler. Names hold no @."""
    return f"{name}@{version_hash}"


def successor(versions: Sequence[str], current: str, live: Collection[str]) -> str | None:
    """Return the version that becomes current in place of one that no live worker has; None: nothing changes.

    `versions` are the hashes, the last started one last. `live` are those that live workers have.
    """
    if current in live:
        return None
    return next((version for version in reversed(versions) if version in live), None)
