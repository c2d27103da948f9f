"""Sends one message to an address that was checked, and to no other.

The host's name is resolved once, all its addresses are checked, and the connection goes to one of these. So a name that
means another address a moment later leads nowhere else. Redirects are not followed, and no proxy is used.
"""

from __future__ import annotations

import http.client
import json
import random
import socket
import ssl
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeAlias

from mtask.app.app import App
from mtask.app.context import Context
from mtask.errors import Fail, Retry
from mtask.features.callbacks.allowed import Address, CallbackOptions, NotAllowed, Target, may_call, parsed
from mtask.features.callbacks.rules import DELIVERY, DELIVERY_QUEUE
from mtask.features.callbacks.signatures import headers_of
from mtask.version import __version__

#: The most bytes of an answer that are read. Only its status counts.
_MAX_ANSWER = 16 * 1024
#: The longest attempt to connect to one of several addresses, in seconds.
_CONNECT = 5.0

#: Returns the addresses of a host, given its name and a port.
Resolve: TypeAlias = Callable[[str, int], Sequence[str]]


class NotTaken(Exception):
    """The receiver has not taken the message."""


def resolved(host: str, port: int) -> list[str]:
    """Return the addresses of a host, as the system's resolver gives them."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


def send(
    target: Target,
    body: bytes,
    headers: Mapping[str, str],
    options: CallbackOptions,
    resolve: Resolve = resolved,
) -> int:
    """Post the body; return the status of the answer. This blocks: call it in a thread.

    Raises NotAllowed if the host leads to an address that may not be called, or NotTaken if there was no answer.
    """
    deadline = time.monotonic() + options.timeout
    failure: Exception | None = None
    for address in _checked(target, options, _within(resolve, target, deadline)):
        if time.monotonic() >= deadline:
            break
        connection = _Pinned(target, address, deadline)
        try:
            return connection.post(body, headers)
        except (OSError, http.client.HTTPException, ValueError, AttributeError) as error:
            if connection.is_sent:
                raise NotTaken(_reason(error, deadline)) from None  # another address would get the message twice
            failure = error
        finally:
            connection.close()
    raise NotTaken(_reason(failure, deadline))


def _within(resolve: Resolve, target: Target, deadline: float) -> Sequence[str]:
    """Resolve the host until the deadline. The system's resolver has time limits of its own, and cannot be stopped."""
    found: list[Sequence[str]] = []

    def look() -> None:
        with suppress(OSError, UnicodeError):
            found.append(resolve(target.host, target.port))

    looking = threading.Thread(target=look, name="mtask-callback-resolve", daemon=True)
    looking.start()
    looking.join(max(0.0, deadline - time.monotonic()))
    if not found or not found[0]:
        raise NotTaken(f"the host {target.host} cannot be resolved")
    return found[0]


def _checked(target: Target, options: CallbackOptions, texts: Sequence[str]) -> list[Address]:
    """Return the addresses; raise NotAllowed if one of them may not be called, whichever would be tried first."""
    addresses = []
    for text in texts:
        try:
            address = parsed(text)
        except ValueError:
            raise NotAllowed(f"the host {target.host} has an address that cannot be read") from None
        if not may_call(address, options.networks):
            raise NotAllowed(f"the host {target.host} leads to {address}, which is not public; see --callback-networks")
        addresses.append(address)
    return addresses


def _reason(error: Exception | None, deadline: float) -> str:
    # Text of the receiver is never quoted, so only the kind of the error is told.
    if time.monotonic() >= deadline or isinstance(error, TimeoutError):
        return "no answer in time"
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate was refused: {error.verify_message}"
    if isinstance(error, OSError) and error.strerror and not isinstance(error, ssl.SSLError):
        return error.strerror
    return f"the connection failed: {type(error).__name__}"


class _Pinned(http.client.HTTPConnection):
    """A connection to one address. The name of the host is only told: in the header Host, and to check a certificate.

    A timer shuts the connection down at the deadline, because the socket's own time limit begins anew with each byte.
    """

    def __init__(self, target: Target, address: Address, deadline: float) -> None:
        super().__init__(target.host, target.port)
        self._target = target
        self._address = address
        self._deadline = deadline
        self._timer = threading.Timer(max(0.0, deadline - time.monotonic()), self._expire)
        self._timer.daemon = True
        self.is_sent = False  #: whether the receiver may have got something

    def connect(self) -> None:
        """Connect to the address, and check the certificate of the host."""
        left = max(0.001, min(_CONNECT, self._deadline - time.monotonic()))
        raw = socket.create_connection((str(self._address), self._target.port), timeout=left)
        self.sock = raw
        raw.settimeout(max(0.001, self._deadline - time.monotonic()))
        if self._target.scheme == "https":
            context = ssl.create_default_context()
            self.sock = wrapped = context.wrap_socket(
                raw, server_hostname=self._target.host, do_handshake_on_connect=False
            )
            wrapped.do_handshake()

    def post(self, body: bytes, headers: Mapping[str, str]) -> int:
        """Send the body; return the status of the answer."""
        self._timer.start()
        self.connect()
        self.is_sent = True
        self.request("POST", self._target.path, body, {"Connection": "close", **headers})
        answer = self.getresponse()
        try:
            with suppress(OSError, http.client.HTTPException):
                answer.read(_MAX_ANSWER)
        finally:
            answer.close()
        return answer.status

    def close(self) -> None:
        """Close the connection and stop the timer."""
        self._timer.cancel()
        super().close()

    def _expire(self) -> None:
        sock = self.sock
        if sock is not None:
            with suppress(OSError):
                # Of the plain socket, because that of a TLS socket changes what another thread is using.
                socket.socket.shutdown(sock, socket.SHUT_RDWR)


# --- deliverer -------------------------------------------------------------------------------------------

# The handler of the tasks `mtask/callback`: each tells one end of a task to a receiver.

_GONE = 410


class Deliverer:
    """Sends messages, with what one worker may call."""

    def __init__(self, options: CallbackOptions, resolve: Resolve = resolved, seats: Seats | None = None) -> None:
        self._options = options
        self._resolve = resolve
        self._seats = Seats(MOST) if seats is None else seats

    def deliver(
        self, context: Context, webhook_id: str, url: str, event: dict[str, Any], secret: str | None = None
    ) -> dict[str, int]:
        """Tell the receiver one end of a task, unless too many other messages are under way."""
        target = self._options.target(url)
        owners = [f"receiver {target.host}:{target.port}"]
        tenant, slash, _ = (secret or "").partition("/")  # a tenant's callbacks are signed with its own secrets
        owners += [f"tenant {tenant}"] if slash else []
        with self._seats.taken(owners) as is_taken:
            if not is_taken:
                raise Retry(delay=random.uniform(1.0, 3.0))
            return {"status": self._send(context, webhook_id, target, event, secret)}

    def _send(
        self, context: Context, webhook_id: str, target: Target, event: dict[str, Any], secret: str | None
    ) -> int:
        body = json.dumps(event, separators=(",", ":")).encode()
        signed = headers_of(self._options.key(secret, target), webhook_id, _now(context), body)
        headers = {"Content-Type": "application/json", "User-Agent": f"mtask/{__version__}", **signed}
        status = send(target, body, headers, self._options, self._resolve)
        if status == _GONE:
            raise Fail(f"{target.host} answered 410: it wants no more messages")
        if not 200 <= status < 300:
            more = ": redirects are not followed" if 300 <= status < 400 else ""
            raise NotTaken(f"{target.host} answered {status}{more}")
        return status


def _now(context: Context) -> int:
    """Return the time of the message in seconds: when this run was claimed, by the server's clock.

    A receiver refuses a message that is minutes old, and the clock of this machine may be wrong by minutes.
    """
    claimed = next(run.claim_time for run in reversed(context.task.runs) if run.run_id == context.run_id)
    return int(claimed.timestamp())


def with_deliveries(app: App, options: CallbackOptions, concurrency: int) -> App:
    """Return an app with all that this one has registered, and with the handler that delivers callbacks.

    `concurrency` is the number of the worker's slots: receivers that are slow must not take all of them.
    """
    own = App(version=app.version)
    own.include(app)
    deliverer = Deliverer(options, seats=Seats(max(1, min(MOST, concurrency // 2))))
    own.task(name=DELIVERY, queue=DELIVERY_QUEUE, isolation="thread")(deliverer.deliver)
    return own


# --- seats -----------------------------------------------------------------------------------------------

# The seats of messages that are under way, shared so that no receiver and no tenant takes those of all others.

#: The most messages that a worker sends at once.
MOST = 40


class Seats:
    """The seats. Whoever has some may have as many as are left for the others: half, then half of the rest, and so on.

    So a receiver that does not answer delays its own messages, and those of its tenant. Threads may ask at once.
    """

    def __init__(self, most: int) -> None:
        self._left = most
        self._of: Counter[str] = Counter()
        self._lock = threading.Lock()

    @contextmanager
    def taken(self, owners: Sequence[str]) -> Iterator[bool]:
        """Take a seat for these owners during the block; give whether there was one."""
        with self._lock:
            is_taken = all(self._of[owner] < self._left for owner in owners)
            if is_taken:
                self._left -= 1
                self._of.update(owners)
        try:
            yield is_taken
        finally:
            if is_taken:
                with self._lock:
                    self._left += 1
                    self._of.subtract(owners)
                    self._of = +self._of  # without those that have none
