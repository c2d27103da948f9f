"""Viewers of a web process: many open event streams, and what they cost."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from benchmarks.measuring.server import NotMeasured, Scratch, Server
from benchmarks.measuring.web import Connection, Web, connect
from mtask import AsyncClient

NAME = "noop"
#: Tasks published a second while viewers watch, and the events of each.
RATE, KINDS = 5.0, 3
#: The longest time, in seconds, until all streams are open, and until all events have come.
_PATIENCE = 60.0
#: Seconds of events before the memory is read first: they make the process compile and keep what it needs.
_WARM_UP = 5.0
_PARTS = 10


@dataclass(frozen=True, slots=True)
class Watched:
    """What many viewers cost, and what they got."""

    streams: int  #: change streams on the server
    memory: list[int]  #: of the web process at the start, each tenth of the window, and the end, in bytes
    delivered: float  #: of the events that each stream of the API should have, %
    messages: float  #: to one live page, a second
    cpu: float  #: of one core, %


async def watched(server: Server, scratch: Scratch, web: Web, count: int, seconds: float) -> Watched:
    """Keep this number of streams open while tasks are published at a steady rate; a worker must run them."""
    viewers = _Viewers()
    async with AsyncClient(scratch.uri, database=scratch.name) as client, _watching(web, viewers, count):
        published = await _publish(client, "warm", min(_WARM_UP, seconds))
        memory, cpu, before = [web.memory()], web.cpu(), sum(viewers.counts_of(pages=True))
        began = time.monotonic()
        for part in range(_PARTS):
            published += await _publish(client, f"part{part}", seconds / _PARTS)
            memory.append(web.memory())
        took, cpu = time.monotonic() - began, web.cpu() - cpu
        messages = sum(viewers.counts_of(pages=True)) - before
        streams = await asyncio.to_thread(_streams_on, server, scratch)
        wanted = published * KINDS
        for _ in range(round(_PATIENCE / 0.1)):
            if min(viewers.counts_of(pages=False)) >= wanted:
                break
            await asyncio.sleep(0.1)
        counts = viewers.counts_of(pages=False)
        if min(counts) < wanted:
            server.say(f"web: {wanted:,} events wanted by each stream; {viewers.missed(published)}")
    server.say("web: memory of the web process in MB: " + ", ".join(f"{size / 1e6:.1f}" for size in memory))
    return Watched(
        streams,
        memory,
        100 * sum(counts) / (wanted * len(counts)) if not viewers.lost else 0.0,
        messages / took / (count // 2),
        100 * cpu / took,
    )


async def _publish(client: AsyncClient, label: str, seconds: float) -> int:
    """Publish at a steady rate for this time; return the number of tasks."""
    count = max(1, round(RATE * seconds))
    began = time.monotonic()
    for number in range(count):
        await asyncio.sleep(max(0.0, began + number / RATE - time.monotonic()))
        await client.publish(NAME, key=f"{label}/{number}")
    await asyncio.sleep(max(0.0, began + seconds - time.monotonic()))
    return count


class _Viewers:
    """Open event streams, and the number of events that came through each."""

    def __init__(self) -> None:
        self.counts: dict[int, int] = {}
        self.is_page: dict[int, bool] = {}
        self.kinds: dict[int, Counter[bytes]] = {}  #: the kinds of the events of each stream of the API
        self.lost = 0  #: streams that told of lost events, or that ended

    def missed(self, tasks: int) -> str:
        """Return what the streams of the API lack, by kind: the fewest and the most events of a stream."""
        of_kinds = list(self.kinds.values())
        names = sorted({name for found in of_kinds for name in found})
        ranges = {name: sorted(found[name] for found in of_kinds) for name in names}
        told = [f"{name.decode()} {found[0]:,} to {found[-1]:,}" for name, found in ranges.items()]
        return f"{tasks:,} tasks; " + ", ".join(told)

    def counts_of(self, *, pages: bool) -> list[int]:
        """Return the number of events of each stream of the API, or of messages of each live page."""
        return [count for number, count in self.counts.items() if self.is_page[number] is pages]


@asynccontextmanager
async def _watching(web: Web, viewers: _Viewers, count: int) -> AsyncIterator[None]:
    """Keep this number of streams open during the block: half of the API, half of live pages."""
    connections: list[Connection] = []
    opened = asyncio.Semaphore(0)

    async def watch(number: int) -> None:
        connection = await connect(web)
        connections.append(connection)
        viewers.is_page[number] = bool(number % 2)
        viewers.counts[number] = 0
        kinds = viewers.kinds.setdefault(number, Counter()) if number % 2 == 0 else Counter[bytes]()
        status, _ = await connection.begin("/live" if number % 2 else "/v1/events")
        if status != 200:
            raise NotMeasured(f"mtask web refused stream {number + 1} of {count} with {status}.")
        await connection.message()  # the first one says that the stream is open
        opened.release()
        while True:
            message = await connection.message()
            if b"event: lost\n" in message or b"event: behind\n" in message:
                viewers.lost += 1
            elif b"event: " in message:
                viewers.counts[number] += 1
                kinds[message.partition(b"event: ")[2].partition(b"\n")[0]] += 1

    streams = [asyncio.create_task(watch(number)) for number in range(count)]
    try:
        async with asyncio.timeout(_PATIENCE):
            for _ in range(count):
                await opened.acquire()
        yield
        viewers.lost += sum(stream.done() for stream in streams)
    finally:
        for stream in streams:
            stream.cancel()
        ended = await asyncio.gather(*streams, return_exceptions=True)
        for connection in connections:
            await connection.close()
    for one in ended:
        if isinstance(one, Exception) and not isinstance(one, asyncio.IncompleteReadError):
            raise one


def _streams_on(server: Server, scratch: Scratch) -> int:
    """Return the number of change streams on the tasks of a database. Workers watch the whole database instead."""
    stages: list[dict[str, Any]] = [
        {"$currentOp": {"allUsers": True, "idleCursors": True}},
        {"$match": {"cursor": {"$exists": True}}},
    ]
    found = set()
    for row in server.mongo.admin.aggregate(stages):
        command = row["cursor"].get("originatingCommand", {})
        stage = (command.get("pipeline") or [{}])[0]
        if (command.get("aggregate"), command.get("$db")) == ("tasks", scratch.name) and "$changeStream" in stage:
            found.add(row["cursor"]["cursorId"])
    return len(found)
