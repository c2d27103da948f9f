"""A network before a replica set that can be cut, slowed down, and made to lose replies or all that it carries, for
everybody or for one client.

A proxy listens once per member and tells clients, in every reply to `hello`, its own ports in place of the members':
so a driver that discovers the set through it stays behind it, its monitoring too, whoever is elected.
"""

from __future__ import annotations

import asyncio
import random
import socket
import threading
from collections.abc import Callable, Collection, Coroutine
from contextlib import closing, suppress
from dataclasses import replace
from typing import Any, Self, TypeVar

from mtask.local import ReplicaSet
from mtask.local.node import Node
from mtask.local.ownership import HOST
from tests.chaos.nemeses.links import Counts, Delay, Direction, Dropped, Fault, Hole, Link, Refusal, ReplyLoss, Traffic

__all__ = ["Counts", "Delay", "Dropped", "Fault", "Hole", "Refusal", "ReplicaSetProxy", "ReplyLoss"]

T = TypeVar("T")
F = TypeVar("F", bound=Fault)

#: The commands by which the engine writes.
WRITES = ("findAndModify", "update", "insert", "commitTransaction")
#: Neither where the system takes the ports of outgoing connections from, nor where the mongods' are from.
_PORTS = range(10_000, 20_000)
_PROBE_INTERVAL = 0.02
_PATIENCE = 20.0


class ReplicaSetProxy:
    """Carries connections to the members of a replica set, in a thread of its own; command it from any other.

    A fault concerns all members or one `node`, and all clients or those whose `app` name is that, or starts so where
    it ends with *: `mtask-worker:*`. It is in force when the call returns. Several can be so at once.
    """

    def __init__(self, replica_set: ReplicaSet, seed: int | None = None) -> None:
        self._name = replica_set.nodes[0].replica_set
        chance = random.Random(seed)
        places = [_Place() for _ in replica_set.nodes]
        addresses = {
            node.address: f"{HOST}:{place.port}" for node, place in zip(replica_set.nodes, places, strict=True)
        }
        self._traffic = Traffic(addresses, chance)
        self._doors = [
            _Door(self._traffic, node.port, place) for node, place in zip(replica_set.nodes, places, strict=True)
        ]
        self._loop = asyncio.new_event_loop()
        self._is_ready = threading.Event()
        self._thread = threading.Thread(target=self._run, name="replica-set-proxy", daemon=True)

    @property
    def uri(self) -> str:
        """The address to connect to."""
        return f"mongodb://{','.join(self._traffic.addresses.values())}/?replicaSet={self._name}"

    def address(self, node: Node) -> str:
        """Return host:port by which clients find this member."""
        return self._traffic.addresses[node.address]

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._is_ready.wait(_PATIENCE)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stopping.set)
        self._thread.join(_PATIENCE)
        assert not self._thread.is_alive()

    # --- what is there --------------------------------------------------------------------------------------

    def counts(self) -> Counts:
        """Return what has gone through and been done so far."""
        return self._do(lambda: replace(self._traffic.counts))

    def connections(self, node: Node | None = None, app: str | None = None) -> set[str]:
        """Return the addresses from which members see the connections of these clients come."""
        concerned = _scope(node, app)
        return self._do(lambda: {link.address for link in self._traffic.links if link.address and concerned(link)})

    # --- faults ---------------------------------------------------------------------------------------------

    def cut(self, node: Node | None = None, app: str | None = None) -> int:
        """Reset all present connections at once; return how many there were."""
        concerned = _scope(node, app)

        def cut() -> int:
            links = [link for link in self._traffic.links if concerned(link)]
            for link in links:
                link.cut()
            return len(links)

        return self._do(cut)

    def refuse(self, node: Node | None = None, app: str | None = None) -> Refusal:
        """Reset all present connections, and refuse new ones until healed.

        With an app, new ones are reset once they have said who they are; else nobody listens.
        """
        return self._begin(Refusal(_port(node), app))

    def delay(self, seconds: float, jitter: float = 0.0, node: Node | None = None, app: str | None = None) -> Delay:
        """Deliver each message later, by `seconds` and up to `jitter` more, in both directions and in order."""
        return self._begin(Delay(_port(node), app, seconds, jitter))

    def drop_replies(
        self,
        times: int | None = None,
        *,
        share: float = 1.0,
        commands: Collection[str] = WRITES,
        text: bytes = b"",
        node: Node | None = None,
        app: str | None = None,
    ) -> ReplyLoss:
        """Lose replies to commands that the server has carried out, and reset the connections they were to come by.

        So many `times`, or until healed; each with the probability `share`; where `text` is given, only to commands
        with that somewhere in them: a claim has `claim_time` in it, a finish `success_time` or `retry_time`.
        """
        names = frozenset(name.encode() for name in commands)
        return self._begin(ReplyLoss(_port(node), app, names, text, share, times))

    def black_hole(self, direction: Direction = "both", node: Node | None = None, app: str | None = None) -> Hole:
        """Swallow what is sent and leave the connections open, new ones too; once healed, all of them are reset.

        `requests` do not reach the server, `replies` not the client: nor does the end of a connection.
        """
        return self._begin(Hole(_port(node), app, direction))

    def heal(self, fault: Fault | None = None) -> None:
        """End a fault, or all of them."""

        def heal() -> None:
            self._traffic.faults = [other for other in self._traffic.faults if fault not in (None, other)]
            self._refresh()

        self._do(heal)

    def _begin(self, fault: F) -> F:
        def begin() -> F:
            self._traffic.faults.append(fault)
            self._refresh()
            return fault

        return self._do(begin)

    def _refresh(self) -> None:
        for door in self._doors:
            door.refresh()
        self._traffic.refresh()

    # --- the thread -----------------------------------------------------------------------------------------

    def _do(self, action: Callable[[], T]) -> T:
        async def done() -> T:
            return action()

        return asyncio.run_coroutine_threadsafe(done(), self._loop).result(_PATIENCE)

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        self._stopping = asyncio.Event()
        for door in self._doors:
            door.refresh()
        self._is_ready.set()
        await self._stopping.wait()
        for door in self._doors:
            await door.end()
        for link in list(self._traffic.links):
            link.cut()
        while self._traffic.links:  # noqa: ASYNC110 each ends in the loop's next round
            await asyncio.sleep(0)


def _port(node: Node | None) -> int | None:
    return None if node is None else node.port


def _scope(node: Node | None, app: str | None) -> Callable[[Link], bool]:
    scope = Fault(_port(node), app)
    return lambda link: scope.concerns(link) and not link.has_ended()


class _Place:
    """A port that stays ours while nobody listens on it."""

    def __init__(self) -> None:
        self._holder = socket.socket()
        for port in random.sample(_PORTS, len(_PORTS)):
            try:
                self._holder.bind((HOST, port))  # alone: another proxy may hold it
            except OSError:
                continue
            # From now on a listener may be on it as well.
            self._holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self.port = port
            return
        raise OSError("no free port for a proxy")

    def listener(self) -> socket.socket:
        """Return a socket to listen with."""
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((HOST, self.port))
        return listener

    def close(self) -> None:
        """Give the port up."""
        self._holder.close()


class _Door:
    """Where clients find one member: open while the member lives and nobody has it refuse."""

    def __init__(self, traffic: Traffic, target: int, place: _Place) -> None:
        self._traffic = traffic
        self._target = target
        self._place = place
        self._listener: socket.socket | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_watched = False
        self._is_dead = False

    def refresh(self) -> None:
        """Open or close, as the member's life and the faults have it."""
        refusals = [fault for fault in self._traffic.faults if isinstance(fault, Refusal) and fault.app is None]
        self._set_open(not self._is_dead and all(fault.port not in (None, self._target) for fault in refusals))

    def _set_open(self, is_open: bool) -> None:
        loop = asyncio.get_running_loop()
        if is_open and self._listener is None:
            self._listener = self._place.listener()
            self._listener.setblocking(False)
            self._listener.listen(512)
            loop.add_reader(self._listener, self._accept, self._listener)
        elif not is_open and self._listener is not None:
            loop.remove_reader(self._listener)
            self._listener.close()
            self._listener = None

    def _accept(self, listener: socket.socket) -> None:
        with suppress(BlockingIOError, ConnectionError):
            accepted, _ = listener.accept()
            accepted.setblocking(False)
            self._keep(self._carry(accepted))

    async def _carry(self, accepted: socket.socket) -> None:
        link = Link(self._traffic, self._target, self._look)
        await asyncio.get_running_loop().connect_accepted_socket(lambda: link.client, accepted)
        await link.dial()

    def _look(self) -> None:
        """Find out whether the member lives; be closed while it does not."""
        if not self._is_watched:
            self._is_watched = True
            self._keep(self._watch())

    async def _watch(self) -> None:
        while self._is_watched:
            self._is_dead = not await _listens(self._target)
            self.refresh()
            self._is_watched = self._is_dead
            if self._is_dead:
                await asyncio.sleep(_PROBE_INTERVAL)

    def _keep(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def end(self) -> None:
        """Close for good."""
        self._set_open(False)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._place.close()


async def _listens(port: int) -> bool:
    with closing(socket.socket()) as attempt:
        attempt.setblocking(False)
        try:
            await asyncio.get_running_loop().sock_connect(attempt, (HOST, port))
        except OSError:
            return False
    return True
