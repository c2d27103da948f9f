"""The routes of the registry: list the handlers, and read one."""

from typing import Any

from pydantic import BaseModel

from mtask.features.registry.client import RegisteredHandler
from mtask.web import views
from mtask.web.bodies import about
from mtask.web.models.common import OpenAnswer
from mtask.web.paths import TaskName
from mtask.web.problems import NotFound
from mtask.web.routes.common import TheClient, router

routes = router("operating")
_READ = about(of_database=True)


class VersionEntry(OpenAnswer):
    """One version of a handler. workers: the live ones that have it."""

    hash: str
    is_current: bool
    app_version: str | None
    version: int
    since: str | None
    queue: str
    options: dict[str, Any]
    workers: list[str]


class HandlerEntry(OpenAnswer):
    """The handlers of one name. params: the JSON Schema of the params, if it is known."""

    name: str
    current: str | None
    versions: list[VersionEntry]
    workers: list[str]
    params: dict[str, Any] | None


class HandlerList(BaseModel):
    """The registered handlers."""

    handlers: list[HandlerEntry]


@routes.get("/v1/handlers", response_model=HandlerList, openapi_extra=_READ)
async def handlers(client: TheClient) -> Any:
    """List the handlers that workers have registered: versions, queues, and who serves them."""
    return views.answer({"handlers": [_entry(one) for one in await client.handlers()]})


@routes.get("/v1/handlers/{name}", response_model=HandlerEntry, openapi_extra=_READ)
async def get_handler(name: TaskName, client: TheClient) -> Any:
    """Return what is registered under a name."""
    found = await client.get_handler(name)
    if found is None:
        raise NotFound("No handler is registered under this name.")
    return views.answer(_entry(found))


def _entry(found: RegisteredHandler) -> dict[str, Any]:
    versions = [
        {
            "hash": version.hash,
            "is_current": version.is_current,
            "app_version": version.app_version,
            "version": version.version,
            "since": views.plain(version.since),
            "queue": version.queue,
            "options": views.plain(dict(version.options)),
            "workers": list(version.workers),
        }
        for version in found.versions
    ]
    return {
        "name": found.name,
        "current": None if found.current is None else found.current.hash,
        "versions": versions,
        "workers": list(found.workers),
        "params": None if found.declaration is None else dict(found.declaration.schema),
    }
