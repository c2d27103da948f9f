"""Chooses the ports on which servers listen."""

from __future__ import annotations

import contextlib
import random
import socket

#: The loopback interface: nobody beyond this machine can connect.
HOST = "127.0.0.1"
#: The range of ports to choose from. Linux and macOS choose the ports of outgoing connections above this range. An
#: outgoing connection could take such a port while its node is down. A client that reconnects could even connect to
#: itself.
FIRST_PORT, LAST_PORT = 20000, 32000


def is_free(port: int) -> bool:
    """Whether a server could listen on this port now."""
    with contextlib.closing(socket.socket(socket.AF_INET, socket.SOCK_STREAM)) as attempt:
        # mongod sets this option, too. With this option, connections that linger after a restart do not block the port.
        attempt.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            attempt.bind((HOST, port))
            attempt.listen(1)
        except OSError:
            return False
    return True


def free_ports(count: int) -> list[int]:
    """Return `count` ports that are free now. Another process may take one of them before the caller does."""
    candidates = random.sample(range(FIRST_PORT, LAST_PORT), LAST_PORT - FIRST_PORT)
    found: list[int] = []
    for port in candidates:
        if is_free(port):
            found.append(port)
            if len(found) == count:
                return found
    raise OSError(f"no free port on {HOST} from {FIRST_PORT} to {LAST_PORT}")
