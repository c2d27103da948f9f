"""Choice of ports to listen on."""

from __future__ import annotations

import contextlib
import random
import socket

#: The loopback interface: nobody beyond this machine can connect.
HOST = "127.0.0.1"
#: The range of ports to choose from. Linux and macOS choose the ports of outgoing connections above it. A port up there
#: could be taken while its node is down, and a client that reconnects could even connect to itself.
FIRST_PORT, LAST_PORT = 20000, 32000


def is_free(port: int) -> bool:
    """Whether a server could listen on this port now."""
    with contextlib.closing(socket.socket(socket.AF_INET, socket.SOCK_STREAM)) as attempt:
        # mongod sets this option, too. So connections that linger after a restart do not block the port.
        attempt.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            attempt.bind((HOST, port))
            attempt.listen(1)
        except OSError:
            return False
    return True


def free_ports(count: int) -> list[int]:
    """Return distinct ports that are free now. Another process may still take one first."""
    candidates = random.sample(range(FIRST_PORT, LAST_PORT), LAST_PORT - FIRST_PORT)
    found: list[int] = []
    for port in candidates:
        if is_free(port):
            found.append(port)
            if len(found) == count:
                return found
    raise OSError(f"no free port on {HOST} from {FIRST_PORT} to {LAST_PORT}")
