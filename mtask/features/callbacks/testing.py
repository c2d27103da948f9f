"""A receiver of callbacks for tests: it checks signatures, keeps what it gets, and answers as the test says."""

from __future__ import annotations

import json
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self

from mtask.errors import MtaskError
from mtask.features.callbacks import signatures

_MAX_BODY = 1024 * 1024


class NotGenuine(MtaskError, AssertionError):
    """A message was not signed with the secret, or is minutes old."""


@dataclass(frozen=True, slots=True)
class ReceivedCallback:
    """A message that a receiver got."""

    webhook_id: str  #: the same at each try to tell one end of a task
    timestamp: int  #: seconds since 1970
    event: Any  #: the body: `type`, `timestamp`, and `data` with ids, status and times
    is_genuine: bool  #: whether it was signed with the receiver's secret, and lately
    status: int  #: what the receiver answered
    headers: Mapping[str, str]  #: names in lower case
    body: bytes


def verify(headers: Mapping[str, str], body: bytes, secret: str) -> Any:
    """Return the event in a message; raise NotGenuine unless it was signed with this secret within five minutes."""
    lowered = {name.lower(): value for name, value in headers.items()}
    if not signatures.is_genuine(signatures.read_secret(secret), lowered, body, time.time()):
        raise NotGenuine("the message was not signed with this secret, or it is more than five minutes old")
    return json.loads(body)


class CallbackReceiver:
    """A receiver on 127.0.0.1, in threads of this process. Use it in a `with` block.

        with CallbackReceiver() as receiver:
            bench.client.publish("report", callback={"url": receiver.url})
            bench.run(callbacks=receiver)
            (got,) = receiver.wait(1)
            assert got.is_genuine and got.event["data"]["status"] == "SUCCESS"

    `answer` is the status of its answers, or a function that gets the number of the message (the first is 1) and
    returns a status; the function may sleep.
    """

    def __init__(self, secret: str | None = None, *, answer: int | Callable[[int], int] = 204, port: int = 0) -> None:
        self.secret = secret or signatures.write_secret(secrets.token_bytes(32))
        self.answer = answer
        #: Further headers of the answers, such as Location.
        self.answer_headers: dict[str, str] = {}
        self._key = signatures.read_secret(self.secret)
        self._received: list[ReceivedCallback] = []
        self._changed = threading.Condition()
        self._server = ThreadingHTTPServer(("127.0.0.1", port), _handler(self))
        self._server.daemon_threads = True
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, name="mtask-receiver", daemon=True
        )

    @property
    def port(self) -> int:
        """The port on which it listens."""
        return int(self._server.server_address[1])

    @property
    def host(self) -> str:
        """The entry for `mtask-worker --callbacks`. The network to allow is 127.0.0.0/8."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def url(self) -> str:
        """The address for a callback."""
        return f"{self.host}/callback"

    @property
    def received(self) -> list[ReceivedCallback]:
        """The messages, in the order in which they came."""
        with self._changed:
            return list(self._received)

    def wait(self, count: int = 1, *, timeout: float = 30.0) -> list[ReceivedCallback]:
        """Wait until this number of messages has come; return all of them. Raises TimeoutError."""
        with self._changed:
            if not self._changed.wait_for(lambda: len(self._received) >= count, timeout):
                raise TimeoutError(f"{len(self._received)} of {count} callbacks came within {timeout:g} s")
            return list(self._received)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the receiver."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _take(self, headers: Mapping[str, str], body: bytes) -> int:
        with self._changed:
            number = len(self._received) + 1
        status = self.answer(number) if callable(self.answer) else self.answer
        try:
            event = json.loads(body)
        except ValueError:
            event = None
        timestamp = headers.get(signatures.TIMESTAMP, "")
        got = ReceivedCallback(
            webhook_id=headers.get(signatures.ID, ""),
            timestamp=int(timestamp) if timestamp.isdecimal() else 0,
            event=event,
            is_genuine=signatures.is_genuine(self._key, headers, body, time.time()),
            status=status,
            headers=headers,
            body=body,
        )
        with self._changed:
            self._received.append(got)
            self._changed.notify_all()
        return status


def _handler(receiver: CallbackReceiver) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            length = self.headers.get("Content-Length", "")
            body = self.rfile.read(min(int(length), _MAX_BODY)) if length.isdecimal() else b""
            status = receiver._take({name.lower(): value for name, value in self.headers.items()}, body)
            self.send_response(status)
            for name, value in receiver.answer_headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 as in the class above
            """Print nothing."""

    return Handler
