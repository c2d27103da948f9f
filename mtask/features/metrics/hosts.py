"""Which headers Host the port of metrics answers: a page of another site must not read it by DNS rebinding."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Sequence


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
