"""Errors as problem documents (RFC 9457): each kind of error has its own `type`, a status and a title.

A problem never holds MongoDB's own text: a message about access quotes the command, with its values.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, TypeAlias

from starlette.responses import Response

from mtask import errors
from mtask.errors import MtaskError
from mtask.kernel.driver.errors import scrubbed
from mtask.web.access import ANYBODY, Caller

MEDIA_TYPE = "application/problem+json"
PATH = "/v1/problems/"

#: The statuses of errors. An error has the status of its nearest class in this table.
_STATUSES: Mapping[type[MtaskError], int] = {
    MtaskError: 409,
    errors.InvalidInput: 422,
    errors.TaskNotFound: 404,
    errors.FlowNotFound: 404,
    errors.BulkNotFound: 404,
    errors.PreconditionFailed: 412,
    errors.ScheduleNotFound: 404,
    errors.WorkerNotFound: 404,
    errors.ControlUnconfirmed: 202,
    errors.DatabaseError: 503,
    errors.LocalError: 503,
    errors.EventsLost: 410,
    errors.DocumentTooLarge: 422,
    errors.NotStorable: 422,
}
_AGAIN = "Send the request again, a publish with the key in this answer: nothing is done twice."
#: What a problem says about an error whose message may quote MongoDB.
_INSTEAD: Mapping[type[MtaskError], str] = {
    errors.DatabaseError: "The database cannot do this now. The log of the server says why.",
    errors.DatabaseUnavailable: f"The database cannot be reached. {_AGAIN}",
    errors.DatabaseTimeout: f"The database did not answer in time. {_AGAIN}",
    errors.AccessDenied: "The database user of this server may not do this. The log of the server names the right.",
    errors.SchemaMismatch: "A document in the database is malformed or of a newer mtask. The log says which one.",
    errors.EventsLost: "The history of events no longer reaches back that far. Begin anew.",
    errors.DocumentTooLarge: "The document would be too large for the database: store the values elsewhere.",
    errors.NotStorable: "A value cannot be stored in the database.",
    errors.LocalError: "The embedded database does not work. The log of the server says why.",
}
#: The attributes of errors that a problem holds, by the names that they have there.
_FIELDS = {
    "field": "field",
    "option": "option",
    "nearest": "nearest",
    "task_id": "task_id",
    "status": "task_status",
    "dependency": "dependency",
    "schedule_id": "schedule_id",
    "worker_id": "worker_id",
    "worker_ids": "worker_ids",
    "kind": "kind",
    "target": "target",
}
_OF_TASKS = frozenset({"task_id", "dependency"})


class Refusal(Exception):
    """The base class of errors that only the web server raises."""

    status: ClassVar[int] = 400


class BadRequest(Refusal):
    """The request's address or headers cannot be read."""


class Unauthenticated(Refusal):
    """The request has no token, or a token that the server does not know."""

    status = 401


class Forbidden(Refusal):
    """The caller's token does not allow this."""

    status = 403


class WrongHost(Refusal):
    """The header Host does not name this server."""

    status = 421


class NotFound(Refusal):
    """There is no such address."""

    status = 404


class MethodNotAllowed(Refusal):
    """The address does not take this method."""

    status = 405


class UnsupportedMediaType(Refusal):
    """The body is not application/json."""

    status = 415


class RequestTimeout(Refusal):
    """The body of the request did not come in time."""

    status = 408


class BodyTooLarge(Refusal):
    """The body is larger than the server reads, or has more values."""

    status = 413


class InvalidRequest(Refusal):
    """The request can be read, but its content cannot be used."""

    status = 422


class IdempotencyKeyReused(Refusal):
    """The Idempotency-Key belongs to a task with other params."""

    status = 422


class TooManyRequests(Refusal):
    """The caller sends more requests than the server takes."""

    status = 429

    def __init__(self, message: str, delay: float) -> None:
        super().__init__(message)
        self.delay = delay  #: the time after which to send the request again, in seconds


class Busy(Refusal):
    """The server has no room for this at the moment."""

    status = 503


class InternalError(Refusal):
    """The server made a mistake."""

    status = 500


#: What a problem document can tell of.
Problem: TypeAlias = MtaskError | Refusal


def kinds() -> Iterator[type[Problem]]:
    """Yield all kinds of errors that a problem can tell of."""
    pending: list[type[Problem]] = [MtaskError, Refusal]
    while pending:
        kind = pending.pop(0)
        pending += kind.__subclasses__()
        if not issubclass(kind, errors.Verdict | errors.RunError):  # only handlers get these
            yield kind


def slug_of(kind: type[Problem]) -> str:
    """Return the last part of the `type` of a problem: "task-not-found", for example."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "-", kind.__name__).lower()


def status_of(kind: type[Problem]) -> int:
    """Return the HTTP status of an error."""
    if issubclass(kind, Refusal):
        return kind.status
    return next(_STATUSES[base] for base in kind.__mro__ if base in _STATUSES)


def title_of(kind: type[Problem]) -> str:
    """Return the title of an error: the same for all errors of this kind."""
    return (kind.__doc__ or kind.__name__).strip().split("\n", 1)[0]


def detail_of(error: Problem) -> str:
    """Return the message of an error, without any text of MongoDB."""
    for kind in type(error).__mro__:
        if kind in _INSTEAD:
            return _INSTEAD[kind]
    return scrubbed("\n".join([str(error), *getattr(error, "__notes__", [])]))


def document_of(error: Problem, caller: Caller = ANYBODY) -> dict[str, Any]:
    """Return the problem document of an error, as this caller may see it."""
    kind = type(error)
    made: dict[str, Any] = {
        "type": PATH + slug_of(kind),
        "title": title_of(kind),
        "status": status_of(kind),
        "detail": caller.shown_text(detail_of(error)),
    }
    for attribute, name in _FIELDS.items():
        value = vars(error).get(attribute)
        if isinstance(value, str) and isinstance(error, MtaskError):
            made[name] = caller.shown_id(value) if name in _OF_TASKS else value
        elif isinstance(value, list | tuple) and attribute == "worker_ids":
            made[name] = [str(one) for one in value]
    return made


def response_of(
    error: Problem,
    caller: Caller = ANYBODY,
    extra: Mapping[str, Any] | None = None,
    headers: Mapping[str, str] | None = None,
) -> Response:
    """Return the answer that tells of an error. `extra`: further members of the problem document."""
    document = document_of(error, caller) | dict(extra or {})
    sent = dict(headers or {})
    if isinstance(error, Unauthenticated):
        sent["WWW-Authenticate"] = "Bearer"
    if isinstance(error, TooManyRequests):
        sent["Retry-After"] = str(math.ceil(error.delay))
    if isinstance(error, RequestTimeout):
        sent["Connection"] = "close"  # what still comes of the body is no request
    if document["status"] == 503:
        sent.setdefault("Retry-After", "1")
    sent.setdefault("Cache-Control", "no-store")
    text = json.dumps(document, ensure_ascii=True)
    return Response(text, document["status"], headers=sent, media_type=MEDIA_TYPE)
