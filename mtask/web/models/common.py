"""What the bodies of requests and answers share, and the answers that many addresses give."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, TypeVar, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, create_model

from mtask.says import hints_of
from mtask.web.schemas import CallId, Key, Lookup, Name, Status, Tenant, Text, Wait

ANY_JSON = "MongoDB extended JSON: {'$date': ...}, {'$oid': ...} and the like keep BSON's types."


def instant(value: object) -> datetime:
    """Return an instant: ISO 8601 text with an offset, or extended JSON's `$date`."""
    if isinstance(value, str):
        value = datetime.fromisoformat(value)
    if not isinstance(value, datetime):
        raise ValueError("write ISO 8601 with an offset: 2030-12-31T23:59:00Z")
    if value.utcoffset() is None:
        raise ValueError("it has no offset: add Z for UTC")
    try:
        return value.astimezone(UTC)
    except OverflowError:
        raise ValueError("it lies outside of the years 1 to 9999") from None


Instant = Annotated[
    datetime,
    BeforeValidator(instant),
    Field(description="ISO 8601 with an offset.", examples=["2030-12-31T23:59:00Z"]),
]


Seconds = Annotated[float, Field(ge=0, le=315_360_000, allow_inf_nan=False, description="Seconds.")]


Params = Annotated[Any, Field(description=f"What the handler gets. {ANY_JSON}")]


def example(of: Mapping[str, Any]) -> ConfigDict:
    """Return the configuration of a body or an answer that has this example in the OpenAPI document."""
    return ConfigDict(json_schema_extra={"examples": [dict(of)]})


class Body(BaseModel):
    """The body of a request: it has no other members, and their types are exact."""

    model_config = ConfigDict(extra="forbid", strict=True)


B = TypeVar("B", bound=Body)
#: What a schema says of an argument of this name; and of each of several values. The others are as their types say.
_IN_JSON: Mapping[str, Any] = {
    "call_id": CallId,
    "delay": Seconds,
    "expires": Seconds | Instant,
    "key": Key,
    "key_prefix": Key,
    "lookup": Lookup,
    "queue": Text,
    "start_time": Instant,
    "tenant": Tenant,
}
EACH: Mapping[str, Any] = {"name": Name, "key": Key, "status": Status}


def _in_json(name: str, told: Any) -> Any:
    kinds = get_args(told)
    if Sequence[str] in kinds:
        return Annotated[list[EACH.get(name, str)], Field(min_length=1, max_length=1000)] | None  # type: ignore[misc]
    told_so = _IN_JSON.get(name, Wait if timedelta in kinds else None)
    return told if told_so is None else told_so | None


def taking(declared: Any) -> Callable[[type[B]], type[B]]:
    """Give a body the members that a TypedDict declares, as JSON has them, beside those that it has already."""

    def extended(cls: type[B]) -> type[B]:
        given: Any = {
            name: (_in_json(name, hint.__origin__), hint.__metadata__[0].default)
            for name, hint in hints_of(declared)
            if name not in cls.model_fields
        }
        return create_model(cls.__name__, __base__=cls, __module__=cls.__module__, __doc__=cls.__doc__, **given)

    return extended


def taken(body: Body, declared: Any) -> Any:
    """Return the declared arguments that a body has, as keywords for the client."""
    return {name: getattr(body, name) for name in declared.__annotations__ if name in type(body).model_fields}


class OpenAnswer(BaseModel):
    """An answer that may have further members."""

    model_config = ConfigDict(extra="allow", populate_by_name=True)


class ProblemDocument(OpenAnswer):
    """An error (RFC 9457). `type` names the kind of error; further members tell of its details."""

    model_config = example(
        {
            "type": "/v1/problems/task-not-found",
            "title": "No task has this name and key.",
            "status": 404,
            "detail": "there is no task send_email:welcome/42. Check name and key; a task may also have "
            "expired by its retention.",
            "task_id": "send_email:welcome/42",
        }
    )

    type: str
    title: str
    status: int
    detail: str


class Removed(BaseModel):
    """Whether something was removed."""

    removed: bool


class ProblemKind(BaseModel):
    """A kind of problem."""

    type: str
    title: str
    status: int
