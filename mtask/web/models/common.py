"""What the bodies of requests and answers share, and the answers that many addresses give."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

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


class Body(BaseModel):
    """The body of a request: it has no other members, and their types are exact."""

    model_config = ConfigDict(extra="forbid", strict=True)


class ProblemDocument(BaseModel):
    """An error (RFC 9457). `type` names the kind of error; further members tell of its details."""

    model_config = ConfigDict(
        extra="allow",
        json_schema_extra={
            "examples": [
                {
                    "type": "/v1/problems/task-not-found",
                    "title": "No task has this name and key.",
                    "status": 404,
                    "detail": "there is no task send_email:welcome/42. Check name and key; a task may also have "
                    "expired by its retention.",
                    "task_id": "send_email:welcome/42",
                }
            ]
        },
    )

    type: str
    title: str
    status: int
    detail: str


class Removed(BaseModel):
    """Whether something was removed."""

    removed: bool


class OpenAnswer(BaseModel):
    """An answer that may have further members."""

    model_config = ConfigDict(extra="allow", populate_by_name=True)


class ProblemKind(BaseModel):
    """A kind of problem."""

    type: str
    title: str
    status: int
