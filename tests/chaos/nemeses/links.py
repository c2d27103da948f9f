"""The connections through a proxy, and what faults do to them. All of it lives in the proxy's event loop."""

from __future__ import annotations

import asyncio
import random
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, cast

from mtask.local.ownership import HOST
from tests.chaos.nemeses import wire

Direction = Literal["both", "requests", "replies"]

_HELLO = frozenset((b"hello", b"isMaster", b"ismaster"))
#: Closing then resets the connection: the other end is told at once, and nothing on its way arrives.
_RESET = struct.pack("ii", 1, 0)
_BULKY = ("value", "cursor", "$clusterTime", "operationTime", "opTime", "electionId")


@dataclass
class Counts:
    """What went through and what was done to it."""

    accepted: int = 0
    refused: int = 0  #: connections reset before they were used; those that found nobody listening do not count
    cut: int = 0
    held: int = 0  #: connections that fell into a black hole
    replies_dropped: int = 0
    messages_delayed: int = 0
    bytes_to_server: int = 0
    bytes_to_client: int = 0
    bytes_swallowed: int = 0


@dataclass(eq=False)
class Fault:
    """What is wrong with the connections to one member (its port) or all, of one app or all."""

    port: int | None
    app: str | None

    def concerns(self, link: Link) -> bool:
        """Tell whether it is this connection's fault too; of an app only once the connection has said who it is."""
        return self.port in (None, link.port) and link.is_of(self.app)


@dataclass(eq=False)
class Refusal(Fault):
    """New connections are refused."""


@dataclass(eq=False)
class Delay(Fault):
    """Messages come later."""

    seconds: float
    jitter: float


@dataclass(eq=False)
class Hole(Fault):
    """What is sent in a direction is swallowed."""

    direction: Direction


@dataclass(frozen=True, slots=True)
class Dropped:
    """A reply that was lost."""

    moment: float  #: on the monotonic clock
    command: str
    app: str
    reply: wire.Document  #: without what is bulky in it


@dataclass(eq=False)
class ReplyLoss(Fault):
    """Replies of some commands are lost, so many times or always."""

    commands: frozenset[bytes]
    text: bytes
    share: float
    left: int | None
    dropped: list[Dropped] = field(default_factory=list)
    is_done: threading.Event = field(default_factory=threading.Event)  #: it has lost as many as it was to lose


@dataclass(eq=False)
class Traffic:
    """All connections, and what is in force for them."""

    #: What the members call themselves, and what clients are to call them.
    addresses: dict[str, str]
    random: random.Random
    counts: Counts = field(default_factory=Counts)
    faults: list[Fault] = field(default_factory=list)
    links: set[Link] = field(default_factory=set)

    def refresh(self) -> None:
        """Apply the faults as they are now."""
        for link in list(self.links):
            link.refresh()

    def renamed(self, reply: wire.Document) -> wire.Document:
        """Return a reply to `hello` that names the proxy's ports, and offers no compression."""
        for several in ("hosts", "passives", "arbiters"):
            if several in reply:
                reply[several] = [self.addresses.get(address, address) for address in reply[several]]
        for one in ("primary", "me"):
            if one in reply:
                reply[one] = self.addresses.get(reply[one], reply[one])
        reply.pop("compression", None)
        return reply


class Link:
    """One client's connection, and the one to the member that stands for it."""

    def __init__(self, traffic: Traffic, port: int, look: Callable[[], None]) -> None:
        self.port = port
        self.app: str | None = None  #: what the client calls itself, once it has said so
        self.address: str | None = None  #: from where the member sees it come
        self.client = _Side(self, self._take_request)
        self.server = _Side(self, self._take_reply)
        self.traffic = traffic
        self._look = look
        self._is_used = False
        self._is_over = False
        self._is_held = False
        self._swallows_requests = False
        self._swallows_replies = False
        self._delay: Delay | None = None
        self._losses: list[ReplyLoss] = []
        self._hellos: set[int] = set()
        self._awaited: dict[int, tuple[str, ReplyLoss]] = {}

    def is_of(self, app: str | None) -> bool:
        """Tell whether the client is of that name, or of one that starts so where it ends with *; None: any."""
        if app is None:
            return True
        if self.app is None:
            return False
        return self.app.startswith(app[:-1]) if app.endswith("*") else self.app == app

    def has_ended(self) -> bool:
        """Tell whether it is over, or about to be."""
        return self._is_over

    def begin(self) -> None:
        """Take up the client's connection; what it sends is kept until the member's connection is there."""
        self.traffic.links.add(self)
        self.traffic.counts.accepted += 1
        # Pausing the transport here would not do: before Python 3.11.3 asyncio reads from it all the same.
        self.client.hold_back()
        self.refresh()

    async def dial(self) -> None:
        """Connect to the member; if it is dead, be as a dead server is."""
        if self.has_ended():
            return
        try:
            await asyncio.get_running_loop().create_connection(lambda: self.server, HOST, self.port)
        except OSError:
            self._look()
            if not self._swallows_replies:
                self._refuse()
            return
        if self.has_ended():
            self.server.abort()
            return
        host, port = self.server.transport.get_extra_info("sockname")
        self.address = f"{host}:{port}"
        self.client.pass_on()

    def refresh(self) -> None:
        """Apply the faults in force."""
        faults = [fault for fault in self.traffic.faults if fault.concerns(self)]
        if any(isinstance(fault, Refusal) for fault in faults):
            self.cut() if self._is_used else self._refuse()
            return
        holes = [fault for fault in faults if isinstance(fault, Hole)]
        if self._is_held and not holes:
            self.cut()
            return
        if holes and not self._is_held:
            self._is_held = True
            self.traffic.counts.held += 1
        # What was swallowed once is missing for good: a direction opens again only by a new connection.
        self._swallows_requests |= any(hole.direction != "replies" for hole in holes)
        self._swallows_replies |= any(hole.direction != "requests" for hole in holes)
        self._delay = next((fault for fault in reversed(faults) if isinstance(fault, Delay)), None)
        self._losses = [fault for fault in faults if isinstance(fault, ReplyLoss)]

    def _refuse(self) -> None:
        if not self.has_ended():
            self.traffic.counts.refused += 1
        self._abort()

    def cut(self) -> None:
        """Reset both connections, also where one is just about to end."""
        if not self.has_ended():
            self.traffic.counts.cut += 1
        self._abort()

    def _abort(self) -> None:
        self._is_over = True
        self.client.abort()
        self.server.abort()

    def ended(self, side: _Side) -> None:
        """Let the other side follow a side that has gone, if it gets to know."""
        is_client = side is self.client
        is_swallowed = self._swallows_requests if is_client else self._swallows_replies
        if not self.has_ended() and not is_swallowed:
            self._is_over = True
            if not is_client:
                self._look()
            (self.server if is_client else self.client).close()
        if not self.client.is_open and not self.server.is_open:
            self.traffic.links.discard(self)

    def _take_request(self, message: bytes) -> None:
        if self.has_ended():
            return
        if self.app is None:
            self._identify(message)
            if self.has_ended():
                return
        self._is_used = True
        counts = self.traffic.counts
        if self._swallows_requests:
            counts.bytes_swallowed += len(message)
            return
        counts.bytes_to_server += len(message)
        name = wire.command_name(message)
        if name in _HELLO:
            self._hellos.add(wire.request_id(message))
        for loss in self._losses:
            if name in loss.commands and loss.text in message:
                self._awaited[wire.request_id(message)] = (name.decode(), loss)
                break
        self.server.send(message, self._delay)

    def _identify(self, message: bytes) -> None:
        told = wire.body(message).get("client", {})
        self.app = str(told.get("application", {}).get("name", ""))
        self.refresh()

    def _take_reply(self, message: bytes) -> None:
        if self.has_ended():
            return
        counts = self.traffic.counts
        if self._swallows_replies:
            counts.bytes_swallowed += len(message)
            return
        if self._hellos or self._awaited:
            number = wire.response_to(message)
            if number in self._hellos:
                self._hellos.discard(number)
                if wire.has_more_to_come(message):
                    self._hellos.add(wire.request_id(message))
                message = wire.with_body(message, self.traffic.renamed)
            elif number in self._awaited and self._is_lost(message, *self._awaited.pop(number)):
                self.cut()
                return
        counts.bytes_to_client += len(message)
        self.client.send(message, self._delay)

    def _is_lost(self, message: bytes, command: str, loss: ReplyLoss) -> bool:
        if loss not in self._losses or self.traffic.random.random() >= loss.share:
            return False
        reply = wire.body(message)
        if not reply["ok"] or not reply.get("n", reply.get("lastErrorObject", {}).get("n", 1)):
            return False  # nothing was carried out
        kept = {name: value for name, value in reply.items() if name not in _BULKY}
        loss.dropped.append(Dropped(asyncio.get_running_loop().time(), command, self.app or "", kept))
        self.traffic.counts.replies_dropped += 1
        if loss.left is not None:
            loss.left -= 1
            if loss.left == 0:
                self.traffic.faults.remove(loss)
                self.traffic.refresh()
                loss.is_done.set()
        return True


class _Side(asyncio.Protocol):
    """One of a link's two connections: puts its messages together, and sends those of the other."""

    transport: asyncio.Transport

    def __init__(self, link: Link, take: Callable[[bytes], None]) -> None:
        self.is_open = False
        self._link = link
        self._take = take
        self._frames = wire.Frames()
        self._early: list[bytes] | None = None  #: what came while it was held back
        self._late: deque[tuple[float, bytes]] = deque()
        self._last_due = 0.0
        self._is_closing = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Come to life."""
        self.transport = cast(asyncio.Transport, transport)
        self.is_open = True
        if self is self._link.client:
            self._link.begin()

    def hold_back(self) -> None:
        """Keep what comes, and take nothing of it before `pass_on`."""
        self._early = []

    def pass_on(self) -> None:
        """Take what was held back, and from now on what comes."""
        early, self._early = self._early or [], None
        for data in early:
            self.data_received(data)

    def data_received(self, data: bytes) -> None:
        """Take the messages that are now whole."""
        if self._early is not None:
            self._early.append(data)
            return
        for message in self._frames.feed(data):
            self._take(message)

    def connection_lost(self, exc: Exception | None) -> None:
        """End."""
        self.is_open = False
        self._late.clear()
        self._link.ended(self)

    def pause_writing(self) -> None:
        """Read no more than can be written."""
        self._other().pause_reading()

    def resume_writing(self) -> None:
        """Go on reading."""
        self._other().resume_reading()

    def _other(self) -> asyncio.Transport:
        link = self._link
        return (link.server if self is link.client else link.client).transport

    def send(self, message: bytes, delay: Delay | None) -> None:
        """Send a message in its turn, as late as the delay has it."""
        if not self.is_open:
            return
        if delay is None and not self._late:
            self.transport.write(message)
            return
        loop = asyncio.get_running_loop()
        traffic = self._link.traffic
        traffic.counts.messages_delayed += 1
        wait = 0.0 if delay is None else delay.seconds + delay.jitter * traffic.random.random()
        self._last_due = max(self._last_due, loop.time() + wait)
        self._late.append((self._last_due, message))
        if len(self._late) == 1:
            loop.call_at(self._last_due, self._send_due)

    def _send_due(self) -> None:
        loop = asyncio.get_running_loop()
        while self._late and self._late[0][0] <= loop.time():
            self.transport.write(self._late.popleft()[1])
        if self._late:
            loop.call_at(self._late[0][0], self._send_due)
        elif self._is_closing:
            self.transport.close()

    def close(self) -> None:
        """End in order, after all that is to be sent."""
        self._is_closing = True
        if self.is_open and not self._late:
            self.transport.close()

    def abort(self) -> None:
        """End by a reset."""
        if self.is_open:
            self._late.clear()
            own: Any = self.transport.get_extra_info("socket")
            own.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            self.transport.abort()
