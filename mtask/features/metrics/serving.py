"""Serves metrics on a port, in threads of its own: a blocked event loop does not hide them."""

from __future__ import annotations

import ipaddress
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from mtask.errors import InvalidInput, MtaskError

logger = logging.getLogger("mtask.metrics")
_PLAIN = "text/plain; charset=utf-8"
_PATHS = frozenset({"/", "/metrics"})
#: The time after which a slow client is cut off, in seconds.
_PATIENCE = 10.0
_MAX_PORT = 65_535
#: The time for which an answer is kept, in seconds. It is far below the interval of a scraper.
_KEPT = 2.0


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(
        self, host: str, port: int, make: Callable[[], bytes], content_type: str, allowed: Sequence[str]
    ) -> None:
        self.make, self.content_type, self.allowed = make, content_type, (host, *allowed)
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, port), _Handler)

    def server_bind(self) -> None:
        """Bind without a search for the host's name: that search may take seconds."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of clients that go away."""
        logger.debug("a request for metrics failed", exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = _PATIENCE
    has_body = True  #: whether the answer is sent with its body; each handler takes one request
    server_version, sys_version = "mtask", ""

    def do_GET(self) -> None:
        given = self.headers.get_all("host") or []
        if len(given) != 1 or not is_own(given[0], self.server.allowed):
            self._answer(
                421, b"The header Host does not name this port: see --metrics-allow-hosts and --allow-host.\n", _PLAIN
            )
            return
        if self.path.partition("?")[0] not in _PATHS:
            self._answer(404, b"The metrics are at /metrics.\n", _PLAIN)
            return
        try:
            body = self.server.make()
        except MtaskError as error:
            logger.warning("metrics cannot be read: %s", error)
            self._answer(503, b"The database cannot be read now.\n", _PLAIN)
        else:
            self._answer(200, body, self.server.content_type)

    def do_HEAD(self) -> None:
        self.has_body = False
        self.do_GET()

    def _answer(self, status: int, body: bytes, content_type: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        if self.has_body:
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Log no scrapes."""


class Kept:
    """Keeps an answer for two seconds, so that many scrapes cost what one costs. Threads may ask at once."""

    def __init__(self, make: Callable[[], bytes]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._answer: tuple[bytes, float] | None = None

    def __call__(self) -> bytes:
        """Return the kept answer, or make a new one. What `make` raises is raised, and not kept."""
        with self._lock:
            if self._answer is None or time.monotonic() - self._answer[1] >= _KEPT:
                made_at = time.monotonic()  # the answer is as old as its reading
                self._answer = self._make(), made_at
            return self._answer[0]


def check_address(host: str, port: int) -> None:
    """Raise InvalidInput if the port or the host cannot be."""
    if not 0 <= port <= _MAX_PORT:
        raise InvalidInput(f"--metrics-port {port}: use 1 to {_MAX_PORT}, or 0 for any free port.", field="port")
    if not host.strip():
        raise InvalidInput("the host is empty: use 127.0.0.1, or 0.0.0.0 for all addresses.", field="host")


def check_extra(what: str) -> None:
    """Raise InvalidInput if the extra `metrics` is not installed."""
    try:
        import prometheus_client
    except ImportError:
        raise InvalidInput(
            f"{what} needs the extra `metrics` (prometheus_client is missing): pip install 'mtask[metrics]'.",
            field="metrics",
        ) from None
    del prometheus_client


@contextmanager
def serving(
    host: str, port: int, make: Callable[[], bytes], content_type: str, allowed: Sequence[str] = ()
) -> Iterator[int]:
    """Serve what `make` returns during the block; yield the port. Raises InvalidInput if the port cannot be had.

    `allowed` are further values of the header Host.
    """
    check_address(host, port)
    try:
        server = _Server(host, port, make, content_type, allowed)
    except OSError as error:
        reason = error.strerror or str(error)
        raise InvalidInput(
            f"metrics cannot be served on {host} port {port}: {reason}. Use another host or port.", field="port"
        ) from None
    thread = threading.Thread(target=server.serve_forever, name="mtask-metrics", daemon=True)
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


# --- hosts -----------------------------------------------------------------------------------------------

# Which headers Host the port of metrics answers: a page of another site must not read it by DNS rebinding.


def is_own(header: str, allowed: Sequence[str] = ()) -> bool:
    """Whether a request may have this header Host, whatever its port.

    A page of another site can make its own name resolve to this machine. The browser then sends that name, which has a
    dot. An IP address and a name without a dot cannot be rebound. `allowed`: further names, with a port or without.
    """
    given = header.strip().lower()
    name = given if given.endswith("]") else given.rpartition(":")[0] or given
    if given in (each.lower() for each in allowed) or name in (each.lower() for each in allowed):
        return True
    if _is_address(name) or name == socket.gethostname().lower():
        return True
    return bool(name) and "." not in name.removesuffix(".") and ":" not in name


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name[1:-1] if name.startswith("[") and name.endswith("]") else name)
    except ValueError:
        return False
    return True
