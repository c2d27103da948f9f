"""A proxy before a mongod that loses the reply of one command, after the server has carried it out."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Self

from tests.chaos.nemeses import wire

_CHUNK = 1 << 18


@dataclass
class Loss:
    """One reply that is to be lost: that of the next command that looks like this."""

    command: str
    collection: str
    text: bytes  #: somewhere in the command
    request_id: int | None = None
    seen: list[dict[str, Any]] = field(default_factory=list)
    is_lost: threading.Event = field(default_factory=threading.Event)


class LossyProxy:
    """Listens on loopback; connections through it reach the server at `port`."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._loss: Loss | None = None
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lossy-proxy", daemon=True)
        self._connections: set[asyncio.Task[None]] = set()
        self.port = 0

    @property
    def uri(self) -> str:
        """The address to connect to."""
        return f"mongodb://127.0.0.1:{self.port}/?directConnection=true"

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._ready.wait(10)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stopping.set)
        self._thread.join(10)
        assert not self._thread.is_alive()

    def lose_next(self, command: str, collection: str = "tasks", text: bytes = b"") -> Loss:
        """Lose the reply of the next such command, whichever connection it comes by, and cut that connection."""
        loss = Loss(command, collection, text)
        self._loss = loss
        return loss

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        self._stopping = asyncio.Event()
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        self._ready.set()
        await self._stopping.wait()
        server.close()
        for connection in list(self._connections):
            connection.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        losses: dict[int, Loss] = {}
        writers = [writer]
        try:
            server_reader, server_writer = await asyncio.open_connection("127.0.0.1", self._target)
            writers.append(server_writer)
            directions = {
                asyncio.create_task(self._requests(reader, server_writer, losses)),
                asyncio.create_task(self._replies(server_reader, writer, losses)),
            }
            try:
                await asyncio.wait(directions, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for direction in directions:
                    direction.cancel()
                await asyncio.gather(*directions, return_exceptions=True)
        except asyncio.CancelledError:
            pass
        finally:
            for each in writers:
                each.transport.abort()
            for each in writers:
                with suppress(Exception):
                    await each.wait_closed()
            self._connections.discard(task)

    async def _requests(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, losses: dict[int, Loss]
    ) -> None:
        async for message in _messages(reader):
            loss = self._loss
            if loss is not None and _is_of(message, loss):
                self._loss = None
                loss.request_id = wire.request_id(message)
                losses[loss.request_id] = loss
            writer.write(message)
            await writer.drain()

    async def _replies(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, losses: dict[int, Loss]
    ) -> None:
        async for message in _messages(reader):
            loss = losses.get(wire.response_to(message))
            if loss is not None:
                loss.seen.append(wire.body(message))
                loss.is_lost.set()
                return  # which cuts the connection
            writer.write(message)
            await writer.drain()


async def _messages(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    frames = wire.Frames()
    with suppress(ConnectionError):
        while received := await reader.read(_CHUNK):
            for message in frames.feed(received):
                yield message


def _is_of(message: bytes, loss: Loss) -> bool:
    if wire.operation(message) != wire.OP_MSG or wire.command_name(message) != loss.command.encode():
        return False
    return wire.body(message)[loss.command] == loss.collection and loss.text in message
