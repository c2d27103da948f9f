"""The connections of the server: how many there may be, and how long each may keep the server waiting.

uvicorn closes a connection on which nothing comes after an answer, and no other: neither one that never sends anything,
nor one that sends half a request, nor one that does not read its answer. Each takes a file descriptor.
"""

from __future__ import annotations

import asyncio
import resource
from collections import Counter
from contextlib import suppress
from typing import Any

import uvicorn
from starlette.types import Scope
from uvicorn.protocols.http.auto import AutoHTTPProtocol

#: Times in seconds. _HEAD: for the head of a request. _UNREAD: for which a client may read nothing of its answer; each
#: _SLOWEST bytes that it reads give it a second more. _LOOK: between two looks at all connections.
_HEAD, _UNREAD, _SLOWEST, _LOOK = 15.0, 20.0, 1024, 1.0
#: The part of all connections that give way at once when there are too many: so the search for them is rare.
_GIVING_WAY = 20
#: The most connections that are taken in one step of the event loop.
_AT_ONCE = 100
#: File descriptors for everything else: the connections to the database, and those that come within one step.
_RESERVED = 250
_KEY = "mtask.connection"


def connections_within(wanted: int) -> int:
    """Return how many connections the process may have, at most `wanted`. This raises its limit of open files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    enough = wanted + _RESERVED
    if soft != resource.RLIM_INFINITY and soft < enough:
        most = enough if hard == resource.RLIM_INFINITY else min(hard, enough)
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
            soft = most
    if soft == resource.RLIM_INFINITY:
        return wanted
    return min(wanted, max(soft - _RESERVED, soft // 2, 1))


def tell(scope: Scope, *, is_known: bool) -> None:
    """Tell the connection of a request whether its sender has shown a token or a session."""
    found = scope.get("state", {}).get(_KEY)
    if isinstance(found, Connection):
        found.is_known = is_known


class Connections:
    """All connections of one server."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._open: dict[Connection, None] = {}  # the oldest one first
        self._looking: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._open)

    @property
    def at_once(self) -> int:
        """How many connections may be taken in one step. Those that give way for them are closed some steps later."""
        return max(1, min(_AT_ONCE, self._most // 16))

    def protocol(self, *, app_state: dict[str, Any], **given: Any) -> Connection:
        """Return the protocol of a new connection: uvicorn asks for it."""
        state = dict(app_state)
        inner: Any = AutoHTTPProtocol
        made = Connection(self, inner(app_state=state, **given))
        state[_KEY] = made  # each request gets the state of its connection
        return made

    def add(self, made: Connection) -> None:
        """Take a new connection. If there are too many, some that no known caller needs give way, or else this one."""
        self._open[made] = None
        if self._looking is None:
            self._looking = asyncio.get_running_loop().call_later(_LOOK, self._look)
        if len(self._open) > self._most:
            for each in self._giving_way(made):
                self.discard(each)  # at once, so that the next new connection finds others
                each.abort()

    def discard(self, closed: Connection) -> None:
        """Forget a connection."""
        self._open.pop(closed, None)

    def _giving_way(self, newest: Connection) -> list[Connection]:
        """Return the oldest connections that nobody needs, first those of the address that has most of them."""
        idle = [each for each in self._open if each.may_give_way and each is not newest]
        of_address = Counter(each.address for each in idle)
        idle.sort(key=lambda each: -of_address[each.address])
        return idle[: max(1, self._most // _GIVING_WAY)] or [newest]

    def _look(self) -> None:
        loop = asyncio.get_running_loop()
        for each in tuple(self._open):
            each.look(loop.time())
        self._looking = loop.call_later(_LOOK, self._look) if self._open else None


class Connection(asyncio.Protocol):
    """One connection: it passes everything on to uvicorn's protocol, and looks at what becomes of it."""

    def __init__(self, connections: Connections, inner: Any) -> None:
        self._connections, self._inner = connections, inner
        self._transport: asyncio.Transport | None = None
        self._cycle: Any = None
        self._waits_since: float | None = None
        self._unread: tuple[float, int] | None = None
        self._is_paused = False
        self.address = ""
        self.is_known = False  #: whether the sender of the present request has shown a token or a session

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self.address = str((transport.get_extra_info("peername") or ("",))[0])
        self._waits_since = asyncio.get_running_loop().time()
        self._inner.connection_made(transport)
        self._connections.add(self)

    def connection_lost(self, error: Exception | None) -> None:
        """End."""
        self._connections.discard(self)
        self._inner.connection_lost(error)

    def data_received(self, data: bytes) -> None:
        """Pass on what has come."""
        self._inner.data_received(data)

    def eof_received(self) -> Any:
        """Pass on that nothing more comes."""
        return self._inner.eof_received()

    def pause_writing(self) -> None:
        """Pass on that the client reads too slowly."""
        self._is_paused = True
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        """Pass on that the client has read enough."""
        self._is_paused, self._unread = False, None
        self._inner.resume_writing()

    @property
    def _is_answering(self) -> bool:
        return self._inner.cycle is not None and not self._inner.cycle.response_complete

    @property
    def may_give_way(self) -> bool:
        """Whether nobody who is known waits for an answer to a whole request."""
        return not (self.is_known and self._is_answering and not self._inner.cycle.more_body)

    def abort(self) -> None:
        """End the connection at once."""
        if self._transport is not None:
            self._transport.abort()

    def look(self, now: float) -> None:
        """End the connection if its client keeps the server waiting."""
        assert self._transport is not None
        size = self._transport.get_write_buffer_size()
        is_closing = self._transport.is_closing()
        # Otherwise more may be written at any time, so the size would tell nothing about what was read.
        if not size or not (self._is_paused or is_closing or not self._is_answering):
            self._unread = None
        else:
            since, first = self._unread = self._unread or (now, size)
            if now - since > _UNREAD + max(0, first - size) / _SLOWEST:
                self.abort()
                return
        cycle, self._cycle = self._cycle, self._inner.cycle
        if self._is_answering or size or is_closing:
            self._waits_since = None
        elif self._waits_since is None or cycle is not self._cycle:
            self._waits_since = now
        elif now - self._waits_since > _HEAD:
            self._transport.close()


def config_of(app: Any, connections: Connections, **given: Any) -> uvicorn.Config:
    """Return the configuration of a server with these connections."""
    return uvicorn.Config(
        app,
        http=connections.protocol,  # type: ignore[arg-type]  # uvicorn calls it as it calls a class
        access_log=False,
        log_config=None,
        log_level="warning",
        server_header=False,
        proxy_headers=False,
        ws="none",
        **given,
    )
