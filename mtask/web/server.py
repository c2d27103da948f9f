"""Runs the API on uvicorn, until a signal ends it."""

from __future__ import annotations

import asyncio
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

import uvicorn

from mtask.errors import InvalidInput
from mtask.features.events.hub import Hub
from mtask.web.app import build
from mtask.web.connections import Connections, config_of
from mtask.web.rooms import MakeClient
from mtask.web.settings import WebSettings
from mtask.web.tokens import Tokens

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
