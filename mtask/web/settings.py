"""The settings of one web server, and the check of the address that it listens on."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from mtask.errors import InvalidInput, shown

Network: TypeAlias = ipaddress.IPv4Network | ipaddress.IPv6Network
DEFAULT_HOST, DEFAULT_PORT = "127.0.0.1", 8787
#: The names under which programs reach a server on the loopback interface.
_LOOPBACK_NAMES = ("localhost", "127.0.0.1", "[::1]")


@dataclass(frozen=True, slots=True)
class Largest:
    """The largest body of a request: its bytes, and the values in it."""

    size: int
    values: int


#: What is left for the body of a request that takes none.
NO_BODY = Largest(1024, 100)


@dataclass(frozen=True, slots=True)
class WebSettings:
    """The settings of one web server."""

    host: str = DEFAULT_HOST
    port: int = DEFAULT_PORT
    is_read_only: bool = False  #: whether every change is refused, whatever the token
    #: Whether callers need no token. Only a server on the loopback interface may do without.
    is_open: bool = False
    allowed_hosts: Sequence[str] = ()  #: further values of the header Host, such as "mtask.example.org"
    #: The largest bodies of requests, in bytes and in values. A value takes a hundred bytes when it is parsed.
    max_body: int = 1024 * 1024
    max_values: int = 100_000
    max_batch_body: int = 16 * 1024 * 1024
    max_batch_values: int = 300_000
    #: The bytes of large bodies that the server holds at once, and the values in them.
    max_held_bytes: int = 48 * 1024 * 1024
    max_held_values: int = 1_000_000
    #: What all callers share (see `Shares`): event streams, live pages, requests that wait for the end of a task, and
    #: event streams that read old events.
    max_streams: int = 1_000
    max_pages: int = 1_000
    max_waiters: int = 1_000
    max_catch_ups: int = 8
    max_streams_each: int = 500  #: the most event streams of one caller
    max_rate: float = 2_000.0  #: the most requests of one caller in a second; 0: no limit
    #: The most requests in a second from an address, as long as it shows no token; 0: no limit.
    max_stranger_rate: float = 200.0
    #: Proxies whose header X-Forwarded-For is believed: addresses and networks, such as "10.0.0.0/8".
    proxies: Sequence[str] = ()
    connections: int = 4_000  #: the most connections at once
    max_behind: int = 1_000  #: the number of events after which a slow reader of events is disconnected

    def largest(self, *, is_batch: bool) -> Largest:
        """Return the largest body of a request. `is_batch`: it may hold many tasks."""
        if is_batch:
            return Largest(self.max_batch_body, self.max_batch_values)
        return Largest(self.max_body, self.max_values)

    @property
    def is_public(self) -> bool:
        """Whether other machines can reach the server."""
        return not is_loopback(self.host)

    def check(self, *, has_tokens: bool) -> None:
        """Raise InvalidInput if a server with these settings could be used by everybody."""
        if not 0 <= self.port <= 65_535:
            raise InvalidInput(f"port {self.port}: use 1 to 65535, or 0 for any free port.", field="port")
        if self.connections < 4:
            raise InvalidInput(f"connections {self.connections}: use 4 or more.", field="connections")
        for given in self.proxies:
            _network(given)
        if self.is_open and has_tokens:
            raise InvalidInput("give a token file or --no-token, not both.", field="no_token")
        if self.is_public and not has_tokens:
            raise InvalidInput(
                f"{shown(self.host)} can be reached from other machines, so callers need tokens: give --token-file or "
                "MTASK_WEB_TOKENS, or listen on 127.0.0.1.",
                field="host",
            )

    def accepts_host(self, header: str, port: int) -> bool:
        """Whether a request may have this header Host. `port`: the port that the server listens on.

        A page of another site can make its own name resolve to this server (DNS rebinding). The browser then sends the
        name of that site. An IP address cannot be rebound.
        """
        given = header.lower()
        if given in (allowed.lower() for allowed in self.allowed_hosts):
            return True
        own = _LOOPBACK_NAMES if not self.is_public else (*_LOOPBACK_NAMES, _in_url(self.host))
        if given in {f"{name.lower()}:{port}" for name in own} or (port == 80 and given in own):
            return True
        return self._is_any_address and _is_address_with_port(given, port)

    @property
    def trusted(self) -> Sequence[Network]:
        """The networks of the proxies."""
        return [_network(given) for given in self.proxies]

    @property
    def _is_any_address(self) -> bool:
        return self.host in ("", "0.0.0.0", "::")


def _network(given: str) -> Network:
    try:
        return ipaddress.ip_network(given.strip())
    except ValueError:
        raise InvalidInput(
            f"proxy {shown(given)}: use an address or a network, such as 10.0.0.5 or 10.0.0.0/8.", field="proxies"
        ) from None


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a server on this host."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _is_address_with_port(header: str, port: int) -> bool:
    name, colon, digits = header.rpartition(":")
    if header.endswith("]") or not colon:
        name, digits = header, "80"
    try:
        ipaddress.ip_address(name[1:-1] if name.startswith("[") and name.endswith("]") else name)
    except ValueError:
        return False
    return digits == str(port)
