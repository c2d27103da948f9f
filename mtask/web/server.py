"""Builds the API and the page, and runs them on uvicorn until a signal ends them."""

from __future__ import annotations

import asyncio
import copy
import logging
import signal
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.utils import get_openapi
from starlette.exceptions import HTTPException

from mtask.client import AsyncClient
from mtask.errors import DatabaseError, InvalidInput, MtaskError
from mtask.features.events.hub import Hub
from mtask.parts import surfaces
from mtask.version import __version__
from mtask.web.access import ANYBODY, Caller
from mtask.web.gate import Connections, Gate, config_of
from mtask.web.page.page import WebPage
from mtask.web.paths import BY_QUERY
from mtask.web.problems import (
    BadRequest,
    InternalError,
    InvalidRequest,
    MethodNotAllowed,
    NotFound,
    Refusal,
    detail_of,
    response_of,
)
from mtask.web.rooms import MakeClient, Rooms
from mtask.web.routes import listing, operating, publishing, tasks
from mtask.web.settings import WebSettings
from mtask.web.sharing import Counts
from mtask.web.tokens import Logins, Tokens

#: The time that requests have to end after a signal, in whole seconds.
_GRACE = 1
#: The most connections that wait to be taken.
_BACKLOG = 2048


class _Server(uvicorn.Server):
    """A server that ends its event streams on the signal itself: uvicorn's own shutdown waits for open streams."""

    def __init__(self, config: uvicorn.Config, hub: Hub) -> None:
        super().__init__(config)
        self._hub = hub

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to take connections: a few in one step of the event loop. The others wait in the system."""
        await super().startup(sockets)
        for listening in sockets or ():
            listening.listen(_BACKLOG)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle signals within the block. Unlike uvicorn's own, this raises no signal again: the exit code is 0."""
        if threading.current_thread() is not threading.main_thread():
            yield  # signals are the main thread's
            return
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.handle_exit, number, None)
        try:
            yield
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """End the streams, then the server. A second signal does not wait for requests."""
        self._hub.close()
        self.force_exit = self.should_exit
        self.should_exit = True


def listen(settings: WebSettings) -> socket.socket:
    """Return a socket on the address of the settings; raise InvalidInput."""
    try:
        host = settings.host or None
        found = socket.getaddrinfo(host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = found[0]
        # Only of a socket whose protocol it knows does asyncio switch Nagle's algorithm off. With it, an answer in two
        # parts takes 40 ms: the second part waits for the client's delayed acknowledgement of the first.
        made = socket.socket(family, kind, protocol)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(address)
    except OSError as error:
        raise InvalidInput(
            f"cannot listen on {settings.host}, port {settings.port}: {error.strerror or error}. Choose another "
            "--host or --port.",
            field="port",
        ) from None
    return made


async def serve(
    make_client: MakeClient,
    settings: WebSettings,
    tokens: Tokens,
    listening: socket.socket,
    ready: Callable[[int], None],
    ending: asyncio.Event | None = None,
) -> None:
    """Serve the page and the API on the socket, until a signal comes or `ending` is set.

    `ready` is called with the port once the server is set up.
    """
    client = make_client()
    app, hub = build(client, settings, tokens, make_client)
    connections = Connections(settings.connections)
    config = config_of(app, connections, timeout_graceful_shutdown=_GRACE, backlog=connections.at_once)
    listening.listen(_BACKLOG)
    ready(listening.getsockname()[1])
    server = _Server(config, hub)

    async def end() -> None:
        assert ending is not None
        await ending.wait()
        server.handle_exit(signal.SIGTERM, None)

    async with client:
        waiting = None if ending is None else asyncio.create_task(end())
        await server.serve([listening])
        if waiting is not None:
            waiting.cancel()
            await asyncio.wait((waiting,))


@contextmanager
def served(make_client: MakeClient, settings: WebSettings, tokens: Tokens) -> Iterator[int]:
    """Serve in a thread of its own during the block; give the port. Raises InvalidInput if the port is taken."""
    loop, ending = asyncio.new_event_loop(), asyncio.Event()
    failed: list[BaseException] = []

    def run() -> None:
        try:
            loop.run_until_complete(serve(make_client, settings, tokens, listening, lambda _: None, ending))
        except BaseException as error:
            failed.append(error)

    with listen(settings) as listening:
        port = listening.getsockname()[1]
        listening.listen(_BACKLOG)
        thread = threading.Thread(target=run, name="mtask web", daemon=True)
        thread.start()
        try:
            yield port
        finally:
            loop.call_soon_threadsafe(ending.set)
            thread.join()
            loop.close()
    if failed:
        raise failed[0]


# --- app -------------------------------------------------------------------------------------------------

# Builds the API: the routes, the answers to errors, and the OpenAPI document.

logger = logging.getLogger("mtask.web")
_BY_PATH = "/v1/tasks/{name}/{key}"
_DESCRIPTION = (
    "The REST API of mtask, a task queue on MongoDB. Field names are those of the documents. Instants are ISO 8601 "
    "text in UTC. Params and returns are MongoDB extended JSON; integers beyond 2^53 are `$numberLong`. Errors are "
    "problem documents (RFC 9457)."
)


class Api(FastAPI):
    """The API, without the gate around it."""

    def openapi(self) -> dict[str, Any]:
        """Return the OpenAPI document. Each address of a task appears in both forms."""
        if self.openapi_schema is None:
            made = get_openapi(title="mtask", version=__version__, description=_DESCRIPTION, routes=self.routes)
            settings: WebSettings = self.state.settings
            if not settings.is_open:
                made["components"]["securitySchemes"] = {"bearer": {"type": "http", "scheme": "bearer"}}
                made["security"] = [{"bearer": []}]
            for path_item in made["paths"].values():
                _drop_nulls(path_item)
            for path in [path for path in made["paths"] if path.startswith(_BY_PATH)]:
                made["paths"][BY_QUERY + path.removeprefix(_BY_PATH)] = _by_query(made["paths"][path])
            self.openapi_schema = made
        return self.openapi_schema


def _drop_nulls(path_item: dict[str, Any]) -> None:
    """Drop null as a value of parameters: an address or a header that has no value leaves the parameter out."""
    for operation in path_item.values():
        for parameter in operation.get("parameters", ()):
            schema = parameter["schema"]
            if {"type": "null"} in schema.get("anyOf", ()):
                rest = [one for one in schema.pop("anyOf") if one != {"type": "null"}]
                parameter["schema"] = {**rest[0], **schema}


def _by_query(path_item: dict[str, Any]) -> dict[str, Any]:
    copied = copy.deepcopy(path_item)
    for operation in copied.values():
        operation["operationId"] += "_by_query"
        for parameter in operation["parameters"]:
            if parameter["in"] == "path":
                parameter["in"] = "query"
    return copied


def build(client: AsyncClient, settings: WebSettings, tokens: Tokens, make_client: MakeClient) -> tuple[Gate, Hub]:
    """Return the API and the page as one ASGI application, and its hub of events.

    The caller closes the client. `make_client` makes another one of the same database, for another event loop.
    """
    settings.check(has_tokens=len(tokens) > 0)
    hub = Hub(client, settings)
    features = surfaces.modules("rest")
    services = {name: each.service(client, settings) for name, each in features.items() if hasattr(each, "service")}
    counts = Counts(client)
    rooms = Rooms(settings, make_client)
    known = Logins(settings, tokens)
    page = WebPage(client, settings, known, hub, services, counts, rooms)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        for service in services.values():
            service.begin()
        yield
        await page.end()
        for service in services.values():
            await service.end()
        await hub.end()
        await counts.end()
        await rooms.apart.end()

    # There is no page with documentation: FastAPI's own loads scripts from another host.
    api = Api(docs_url=None, redoc_url=None, openapi_url="/v1/openapi.json", redirect_slashes=False, lifespan=lifespan)
    api.state.client, api.state.settings, api.state.hub = client, settings, hub
    api.state.services, api.state.rooms = services, rooms
    api.state.counts = counts
    of_queue = (publishing.routes, listing.routes, tasks.routes, operating.routes, operating.health_routes)
    routers = (*of_queue, *(each.routes for each in features.values()))
    for routes in routers:
        api.include_router(routes)
    api.state.routes = [route for routes in routers for route in routes.routes]
    for kind, handler in (
        (MtaskError, _on_error),
        (Refusal, _on_error),
        (RequestValidationError, _on_invalid),
        (HTTPException, _on_http),
        (Exception, _on_mistake),
    ):
        api.add_exception_handler(kind, handler)
    return Gate(api, page, settings, known, rooms), hub


def _caller(request: Request) -> Caller:
    caller: Caller = request.scope.get("mtask.caller", ANYBODY)
    return caller


async def _on_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, MtaskError | Refusal)
    if isinstance(error, DatabaseError):
        logger.warning("%s %s: %s: %s", request.method, request.url.path, type(error).__name__, detail_of(error))
        logger.info("%s", error)
    return response_of(error, _caller(request))


async def _on_invalid(request: Request, error: Exception) -> Response:
    """Answer for input that does not have the form that a route takes. The answer quotes no values."""
    assert isinstance(error, RequestValidationError)
    found = [
        {"where": ".".join(str(part) for part in one["loc"]), "message": str(one["msg"]).removeprefix("Value error, ")}
        for one in error.errors()[:20]
    ]
    detail = "; ".join(f"{one['where']}: {one['message']}" for one in found[:5])
    return response_of(InvalidRequest(detail), _caller(request), {"errors": found})


async def _on_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 405:
        headers = dict(error.headers or {}) | _allowed(request)
        return response_of(MethodNotAllowed("This address does not take this method."), headers=headers)
    if error.status_code == 404 and ":" in request.scope["path"]:
        return response_of(NotFound("There is no such action. Write '%3A' for a colon inside a name or a key."))
    if error.status_code == 404:
        return response_of(NotFound("There is no such address."))
    return response_of(BadRequest("The request cannot be read."))


def _allowed(request: Request) -> dict[str, str]:
    """Return the header Allow with all methods of an address. Starlette's own names those of one route."""
    path, routes = request.scope["path"], request.app.state.routes
    matching = [route for route in routes if route.path_regex.match(path)]
    methods = {each for route in matching if route.path_format == matching[0].path_format for each in route.methods}
    return {"Allow": ", ".join(sorted(methods))} if methods else {}


async def _on_mistake(request: Request, error: Exception) -> Response:
    return response_of(InternalError("This is a mistake of the server. Its log says more."))
