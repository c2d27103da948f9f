"""The socket on which `mtask web` listens."""

from __future__ import annotations

import socket

from mtask.web.server import listen
from mtask.web.settings import WebSettings


def test_answer_in_two_parts_does_not_wait_for_an_acknowledgement() -> None:
    with listen(WebSettings(host="127.0.0.1", port=0)) as listening:
        # asyncio switches Nagle's algorithm off for sockets of this protocol, and not for those of protocol 0.
        assert listening.proto == socket.IPPROTO_TCP
