"""What this worker may call: hosts, networks, and the secrets that sign its messages."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from pathlib import Path
from typing import Any, TypeAlias
from urllib.parse import urlsplit

from mtask.errors import InvalidInput, shown
from mtask.features.callbacks.rules import DEFAULT_SECRET
from mtask.features.callbacks.signatures import read_secret

_PORTS = {"https": 443, "http": 80}
_WRITE_HOSTS = "write hosts as hooks.example.com, *.example.com:8443, http://10.0.0.5:8080, or * for all with https"
_WRITE_SECRETS = 'write {"NAME": "whsec_...", "OTHER": {"secret": "whsec_...", "hosts": ["hooks.example.com"]}}'


class NotAllowed(Exception):
    """This worker may not call the address."""


@dataclass(frozen=True, slots=True)
class Target:
    """The receiver of a message, as its address names it."""

    scheme: str
    host: str
    port: int
    path: str


@dataclass(frozen=True, slots=True)
class HostRule:
    """Hosts that may be called, by scheme and port. `host` may be "*", or begin with "*." for all hosts below one."""

    scheme: str
    host: str
    port: int

    def admits(self, target: Target) -> bool:
        """Whether the target is one of these hosts."""
        if (self.scheme, self.port) != (target.scheme, target.port):
            return False
        if self.host.startswith("*."):
            return target.host.endswith(self.host[1:]) and len(target.host) >= len(self.host)
        return self.host in ("*", target.host)


@dataclass(frozen=True, slots=True)
class Secret:
    """A secret, and the hosts whose messages it may sign. None: all that this worker may call."""

    key: bytes = field(repr=False)
    hosts: Sequence[HostRule] | None = None


@dataclass(frozen=True, slots=True)
class CallbackOptions:
    """What a worker that delivers callbacks may call, and with which secrets."""

    hosts: Sequence[HostRule]
    #: Networks that are not public, and may be called nevertheless.
    networks: Sequence[Network] = ()
    secrets: Mapping[str, Secret] = field(default_factory=dict, repr=False)
    #: The time limit of one message, in seconds, from the search for its host to the end of the answer.
    timeout: float = 20.0

    def target(self, url: str) -> Target:
        """Return the receiver of this address; raise NotAllowed."""
        target = target_of(url)
        if not any(rule.admits(target) for rule in self.hosts):
            raise NotAllowed(f"{target.host} is none of the hosts that this worker may call; see --callbacks")
        return target

    def key(self, name: str | None, target: Target) -> bytes:
        """Return the secret of this name for this receiver; raise NotAllowed."""
        wanted = name or DEFAULT_SECRET
        secret = self.secrets.get(wanted)
        if secret is None:
            raise NotAllowed(f"this worker has no secret {shown(wanted)}; see --callback-secret-file")
        if secret.hosts is not None and not any(rule.admits(target) for rule in secret.hosts):
            raise NotAllowed(f"the secret {shown(wanted)} is not for {target.host}")
        return secret.key


def target_of(url: str) -> Target:
    """Return the parts of an address; raise NotAllowed if it has none that can be called."""
    try:
        parts = urlsplit(url)
        port = parts.port or _PORTS[parts.scheme]
    except (ValueError, KeyError):
        raise NotAllowed("the address cannot be read") from None
    host = (parts.hostname or "").rstrip(".").lower()
    if not host or "@" in parts.netloc or not url.isascii() or not url.isprintable() or " " in url:
        raise NotAllowed("the address cannot be read")
    path = parts.path or "/"
    return Target(parts.scheme, host, port, f"{path}?{parts.query}" if parts.query else path)


def read_options(
    hosts: str, networks: str | None = None, secrets: str | None = None, secret_file: Path | None = None
) -> CallbackOptions:
    """Return the options in these texts; raise InvalidInput, which quotes no secret."""
    given: dict[str, Any] = {}
    if secret_file is not None:
        given |= _parsed(_read_private(secret_file), f"file {secret_file}")
    if secrets is not None:
        given |= _parsed(secrets, "variable MTASK_CALLBACK_SECRETS")
    return CallbackOptions(
        [_rule(text) for text in hosts.split(",")],
        check_networks(networks.split(",")) if networks else (),
        {name: _secret(name, entry) for name, entry in given.items()},
    )


def _rule(text: str) -> HostRule:
    wanted = text.strip().lower()
    try:
        parts = urlsplit(wanted if "://" in wanted else f"https://{wanted}")
        port = parts.port or _PORTS[parts.scheme]
        host = (parts.hostname or "").rstrip(".")
    except (ValueError, KeyError):
        host, port = "", 0
    is_pattern = "*" in host.removeprefix("*.") and host != "*"
    if not host or is_pattern or parts.path or parts.query or "@" in wanted:
        raise InvalidInput(f"--callbacks {shown(text)}: {_WRITE_HOSTS}.", field="callbacks")
    return HostRule(parts.scheme, host, port)


def _read_private(path: Path) -> str:
    try:
        with path.open(encoding="utf-8") as file:
            mode, text = os.fstat(file.fileno()).st_mode, file.read()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is no UTF-8"
        raise InvalidInput(f"callback secret file {path}: {reason}.", field="callback_secret_file") from None
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise InvalidInput(
            f"callback secret file {path}: others can read it; make it yours alone: chmod 600 {path}.",
            field="callback_secret_file",
        )
    return text


def _parsed(text: str, where: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise InvalidInput(f"callback secrets, {where}: {_WRITE_SECRETS}.", field="callback_secrets")
    return found


def _secret(name: str, entry: Any) -> Secret:
    if isinstance(entry, str):
        return Secret(read_secret(entry, shown(name)))
    if isinstance(entry, dict) and isinstance(entry.get("secret"), str) and isinstance(entry.get("hosts"), list):
        return Secret(read_secret(entry["secret"], shown(name)), [_rule(str(host)) for host in entry["hosts"]])
    raise InvalidInput(f"the secret {shown(name)}: {_WRITE_SECRETS}.", field="callback_secrets")


# --- addresses -------------------------------------------------------------------------------------------

# Which addresses a worker may call: public ones, and those of networks that its operator allows.
#
# Python's own `is_global` accepts addresses that lead into a private network, such as 64:ff9b::7f00:1 and
# 2002:7f00:1::. So the ranges are listed here.

Address: TypeAlias = IPv4Address | IPv6Address
Network: TypeAlias = IPv4Network | IPv6Network

_NOT_PUBLIC = [
    IPv4Network(text)
    for text in (
        "0.0.0.0/8",  # this network
        "10.0.0.0/8",  # private
        "100.64.0.0/10",  # shared by the customers of a provider
        "127.0.0.0/8",  # loopback
        "169.254.0.0/16",  # link-local, with the metadata services of clouds
        "172.16.0.0/12",  # private
        "192.0.0.0/24",  # protocols
        "192.0.2.0/24",  # documentation
        "192.88.99.0/24",  # relays of 6to4
        "192.168.0.0/16",  # private
        "198.18.0.0/15",  # benchmarks
        "198.51.100.0/24",  # documentation
        "203.0.113.0/24",  # documentation
        "224.0.0.0/4",  # multicast
        "240.0.0.0/4",  # reserved, and broadcast
    )
]
_PUBLIC_6 = IPv6Network("2000::/3")
#: Protocols (Teredo among them), documentation, 6to4.
_NOT_PUBLIC_6 = [IPv6Network(text) for text in ("2001::/23", "2001:db8::/32", "2002::/16")]
_NAT64 = IPv6Network("64:ff9b::/96")


def unwrapped(address: Address) -> Address:
    """Return the IPv4 address inside an IPv6 address that leads to it (mapped, NAT64, 6to4), or the address itself."""
    if isinstance(address, IPv4Address):
        return address
    if address.ipv4_mapped is not None:
        return address.ipv4_mapped
    if address in _NAT64:
        return IPv4Address(int(address) & 0xFFFF_FFFF)
    return address.sixtofour or address


def is_public(address: Address) -> bool:
    """Whether the address is one of the public internet. 6to4 is not: nobody knows who relays it."""
    if isinstance(address, IPv6Address) and address.sixtofour is not None:
        return False
    inner = unwrapped(address)
    if isinstance(inner, IPv4Address):
        return not any(inner in network for network in _NOT_PUBLIC)
    return inner in _PUBLIC_6 and not any(inner in network for network in _NOT_PUBLIC_6)


def may_call(address: Address, allowed: Sequence[Network] = ()) -> bool:
    """Whether a worker may call the address: a public one, or one in an allowed network."""
    inner = unwrapped(address)
    return is_public(address) or any(inner.version == one.version and inner in one for one in allowed)


def parsed(text: str) -> Address:
    """Return the address that a resolver gave. A zone, as in fe80::1%eth0, is left out: only the address counts."""
    return ip_address(text.partition("%")[0])


def check_networks(texts: Sequence[str]) -> list[Network]:
    """Return networks such as 10.0.0.0/8; raise InvalidInput."""
    try:
        return [ip_network(text.strip()) for text in texts]
    except ValueError as error:
        raise InvalidInput(f"{error}: write networks as 10.0.0.0/8 or fd00::/8.", field="callback_networks") from None
