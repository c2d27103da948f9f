"""What the routes share: the client, the caller, and the answers that the OpenAPI document lists."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request

from mtask.client import AsyncClient
from mtask.errors import InvalidInput
from mtask.features.events.hub import Hub
from mtask.kernel.document.options import STORED_NAMES, as_keywords
from mtask.web.access import Caller, Role, client_of
from mtask.web.bodies import Route
from mtask.web.models.common import instant
from mtask.web.problems import MEDIA_TYPE, Forbidden
from mtask.web.rooms import Rooms
from mtask.web.sharing import Counts


# These are coroutines, because FastAPI calls plain functions in a thread: that would cost as much as the publish.
async def _caller(request: Request) -> Caller:
    caller: Caller = request.scope["mtask.caller"]
    return caller


async def _client(request: Request) -> AsyncClient:
    # A request with a large body has the client of another event loop.
    client: AsyncClient = request.scope.get("mtask.client", request.app.state.client)
    return client_of(client, request.scope["mtask.caller"])


def _held(name: str) -> Any:
    """Return the dependency on something that the server holds for all requests."""

    async def found(request: Request) -> Any:
        return getattr(request.app.state, name)

    return Depends(found)


#: The options that decide when a task is removed.
_RETENTION = frozenset({"retain_success", "retain_fail"})

TheClient = Annotated[AsyncClient, Depends(_client)]
TheCaller = Annotated[Caller, Depends(_caller)]
TheCounts = Annotated[Counts, _held("counts")]
TheHub = Annotated[Hub, _held("hub")]
TheRooms = Annotated[Rooms, _held("rooms")]

_REFUSALS: Mapping[int, str] = {
    400: "The address or the headers cannot be read.",
    401: "The token is missing or unknown.",
    403: "The token does not allow this.",
    404: "It does not exist.",
    405: "The address does not take this method.",
    408: "The body did not come in time.",
    409: "Its state does not allow this.",
    412: "The task has another ETag than If-Match says.",
    413: "The body is too large, or has too many values.",
    415: "The body is not application/json.",
    421: "The header Host does not name this server.",
    422: "The input cannot be used.",
    429: "The caller sends too many requests.",
    503: "The database cannot do this now, or the server is busy.",
}


def _problem(text: str) -> dict[str, Any]:
    schema = {"$ref": "#/components/schemas/ProblemDocument"}
    return {"description": text, "content": {MEDIA_TYPE: {"schema": schema}}}


PROBLEMS: dict[int | str, dict[str, Any]] = {status: _problem(text) for status, text in _REFUSALS.items()}
UNCONFIRMED: dict[int | str, dict[str, Any]] = {
    202: _problem("The change is stored and in force, but a live worker has not confirmed it in time.")
}


def router(tag: str) -> APIRouter:
    """Return a router for the routes of one subject."""
    return APIRouter(route_class=Route, tags=[tag], responses=PROBLEMS, redirect_slashes=False)


def given_instant(text: str | None, field: str) -> datetime | None:
    """Return an instant of a query; raise InvalidInput."""
    try:
        return None if text is None else instant(text)
    except ValueError as error:
        raise InvalidInput(f"{field}: {error}.", field=field) from None


def tenant_of(given: str | None, caller: Caller) -> str | None:
    """Return the tenant for which a caller publishes; raise InvalidInput. One without a tenant publishes for any."""
    if caller.tenant is not None and given not in (None, caller.tenant):
        raise InvalidInput("tenant: the token is of another tenant, and publishes for that one alone.", field="tenant")
    return given if caller.tenant is None else caller.tenant


def check_retention(options: Mapping[str, Any], caller: Caller) -> None:
    """Raise Forbidden if these options would remove a task that exists, and the caller may not remove it."""
    given = sorted(_RETENTION & {*options})
    if given and not caller.may(Role.OPERATE):
        raise Forbidden(
            f"{STORED_NAMES[given[0]]} of a task that exists decides when it is removed: this takes a token with the "
            "role operate."
        )


def checked_options(options: Mapping[str, Any]) -> Any:
    """Return task options as keyword arguments; raise UnknownOption. So no option can be another argument."""
    return as_keywords(options)
