"""Which addresses a worker may call: public ones, and those of networks that its operator allows.

Python's own `is_global` accepts addresses that lead into a private network, such as 64:ff9b::7f00:1 and
2002:7f00:1::. So the ranges are listed here.
"""

from __future__ import annotations

from collections.abc import Sequence
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import TypeAlias

from mtask.errors import InvalidInput

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
